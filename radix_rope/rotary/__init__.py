"""What moving a cached key by some distance means for a model, and the kernels that do it.

Imports numpy and torch (and numba, Triton or FlashInfer where present), never SGLang.
"""
