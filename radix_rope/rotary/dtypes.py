"""Cache dtypes a key can be stored in, and what rounding to each may cost.

Owns the list of supported dtypes, the one rounding every kernel must reproduce, and the
error bound per dtype that tests, proofs and the documentation quote.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radix_rope.rotary.spec import UnsupportedRope


@dataclass(frozen=True)
class CacheDtype:
    """Rounding behaviour of one cache dtype.

    Attributes:
        dtype: the torch dtype.
        unit_roundoff: half the distance between 1 and the next value: the relative error of
            one rounding to nearest in the normal range.
        smallest_step: distance between subnormal values: half of it is the absolute error of
            one rounding near zero.
        largest: largest finite value; results beyond it saturate there for fp8.
    """

    dtype: torch.dtype
    unit_roundoff: float
    smallest_step: float
    largest: float

    @property
    def is_fp8(self) -> bool:
        """Whether one element takes one byte."""
        return self.dtype.itemsize == 1


def _describe(dtype: torch.dtype) -> CacheDtype:
    info = torch.finfo(dtype)
    step = info.smallest_normal * info.eps
    return CacheDtype(dtype, info.eps / 2, step, info.max)


CACHE_DTYPES: dict[torch.dtype, CacheDtype] = {
    dtype: _describe(dtype)
    for dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
}


def cache_dtype(dtype: torch.dtype) -> CacheDtype:
    """Looks a cache dtype up.

    Raises:
        UnsupportedRope: for any dtype whose rounding was not proven here (fp4, int8, mxfp8,
            the `fnuz` variants of fp8, float64).
    """
    known = CACHE_DTYPES.get(dtype)
    if known is None:
        names = ", ".join(str(d).removeprefix("torch.") for d in CACHE_DTYPES)
        raise UnsupportedRope(
            f"KV cache dtype {dtype}",
            "no proven dequantise-rotate-requantise rule exists for it",
            f"use one of {names}, or the stock radix cache",
        )
    return known


def round_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds float32 or float64 values once to a cache dtype, to nearest even.

    fp8 saturates at the largest finite value instead of becoming NaN or infinity: two
    elements of 448 can rotate into one of 634, and an infinity would poison the whole row.
    NaN stays NaN.

    Args:
        x: float32 or float64 tensor.
        dtype: a supported cache dtype.
    """
    info = cache_dtype(dtype)
    if info.is_fp8:
        x = x.clamp(-info.largest, info.largest)
    return x.to(dtype)


def move_bound(pair_norm: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Largest error one move may make on an element, against the float64 reference.

    Each output is ``x1 * cos - x2 * sin``. With ``r = hypot(x1, x2)`` and ``u = 2**-24``, the
    rounded cosine and sine, the two products and the difference err by at most
    ``2u (|x1 cos| + |x2 sin|) + u r <= 3u r`` (Cauchy-Schwarz); ``4u r`` covers the higher
    orders. The final rounding adds half a step of the cache dtype: ``unit_roundoff * r``, or
    half a subnormal step.

    Args:
        pair_norm: ``hypot(x1, x2)`` of each element's pair, in stored units.
        dtype: the cache dtype.

    Returns:
        Bound per element, same shape, float64.
    """
    info = cache_dtype(dtype)
    arithmetic = 4.0 * 2.0**-24
    rounding = info.unit_roundoff if dtype != torch.float32 else 0.0
    relative = arithmetic + rounding * (1.0 + arithmetic)
    return pair_norm.to(torch.float64) * relative + 0.5 * info.smallest_step
