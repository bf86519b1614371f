"""What content matching costs beside stock SGLang, on the same keys, in one process."""
