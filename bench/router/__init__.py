"""SGLang's router in front of two workers: what each policy leaves for the cache to find."""
