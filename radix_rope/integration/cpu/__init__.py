"""SGLang on a CPU without AMX: a platform and an attention backend.

Independent of the cache: stock SGLang uses it the same way, which is what
makes a fair baseline possible on a machine without a GPU.
"""
