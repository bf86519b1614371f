"""Serving benchmark: shifted and unshifted workloads on stock SGLang and radix_rope."""
