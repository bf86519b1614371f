"""Fingerprints of token windows: 60-bit numbers that propose where content may be equal.

Owns the hash and its vectorised forms. May not decide anything: equality is always checked on the
tokens, so a collision costs time and never a wrong reuse.

The hash is polynomial, sum(mix(t[i]) * B**(n-1-i)) mod 2**64, as in Rabin and Karp: windows at
every offset follow from shorter windows by doubling, windows at multiples of the stride are one
matrix product. Tokens are mixed first (the finaliser of splitmix64), for low bits of a polynomial
mod 2**64 would otherwise depend on low bits of the tokens alone.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from radix_rope.content.segment import Tokens

Keys = npt.NDArray[np.uint64]

_BASE = 0x9E3779B97F4A7C15 | 1
_MASK = (1 << 64) - 1
KEY_BITS = 60  # a Python int of two digits: 32 bytes instead of 36
_KEY_SHIFT = np.uint64(64 - KEY_BITS)


def _mixed(tokens: Tokens) -> Keys:
    mixed = tokens.view(np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0x94D049BB133111EB)
    return mixed


def _finished(sums: Keys, salt: int) -> Keys:
    sums += np.uint64(salt)
    sums ^= sums >> np.uint64(32)
    sums *= np.uint64(0xD6E8FEB86659FD93)
    sums >>= _KEY_SHIFT
    return sums


@lru_cache(maxsize=64)
def _powers(stride: int) -> Keys:
    powers = [pow(_BASE, stride - 1 - i, 1 << 64) for i in range(stride)]
    return np.array(powers, dtype=np.uint64)


def namespace_salt(number: int) -> int:
    """A 64-bit salt for the namespace with this number (splitmix64 of it)."""
    x = (number + 1) * 0x9E3779B97F4A7C15 & _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def at_every_offset(tokens: Tokens, stride: int, salt: int) -> Keys:
    """Keys of all windows of `stride` tokens.

    tokens: int64 (n,), contiguous. Returns uint64 (n - stride + 1,), element i for the window
    tokens[i : i + stride]; empty when n < stride. O(n log stride), all in numpy.
    """
    count = len(tokens) - stride + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    level = _mixed(tokens)  # windows of `width` tokens
    width = 1
    sums: Keys | None = None
    covered = 0  # the last `covered` tokens of the window are in sums (as their own polynomial)
    remaining = stride
    # Binary decomposition of the stride: sums[i] holds the window of `covered` tokens at i.
    while True:
        if remaining & 1:
            if sums is None:
                sums = level.copy() if remaining > 1 else level
            else:
                size = len(level) - covered
                factor = np.uint64(pow(_BASE, covered, 1 << 64))
                joined = level[:size] * factor
                joined += sums[width : width + size]
                sums = joined
            covered += width
        remaining >>= 1
        if not remaining:
            break
        factor = np.uint64(pow(_BASE, width, 1 << 64))
        doubled = level[:-width] * factor
        doubled += level[width:]
        level = doubled
        width *= 2
    assert sums is not None and covered == stride
    return _finished(sums[:count], salt)


def at_multiples(tokens: Tokens, stride: int, salt: int) -> Keys:
    """Keys of the windows at 0, stride, 2 * stride, ...: what the tree side stores.

    tokens: int64 (n,). Returns uint64 (n // stride,). O(n).
    """
    count = len(tokens) // stride
    if count == 0:
        return np.empty(0, dtype=np.uint64)
    mixed = _mixed(tokens[: count * stride]).reshape(count, stride)
    mixed *= _powers(stride)
    sums: Keys = mixed.sum(axis=1, dtype=np.uint64)
    return _finished(sums, salt)
