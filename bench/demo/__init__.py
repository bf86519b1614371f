"""The demo: stock SGLang and radix_rope on the same prompts, compared in one table."""
