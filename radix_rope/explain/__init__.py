"""Which parts of a prompt would be reused, and from where? Without an engine, without weights.

Owns the command `radix-rope explain`. Knows the tokenizer of a model folder, the options and
`radix_rope.content`; may not know SGLang: `tests/explain/test_like_server.py` holds it to what a
server plans.
"""
