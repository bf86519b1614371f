"""How the error of a key grows when it is moved again and again.

Owns the measurement behind the rule that a key is moved from its original: a copy that is
moved again is rounded again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radix_rope.rotary.corrector import make_corrector
from radix_rope.rotary.pool import KVPoolView
from radix_rope.rotary.reference import rotate
from radix_rope.rotary.spec import RopeSpec, standard_inv_freq

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class RoundingError:
    """Error of moved keys against float64, relative to the keys' own norm.

    Attributes:
        generations: moves that the keys went through.
        copies: each move started from the result of the last one (True) or from the
            original (False).
        rms: root mean square error of an element over that of the keys.
        worst: largest error of an element over that of the keys.
    """

    generations: int
    copies: bool
    rms: float
    worst: float


def error_after(
    dtype: torch.dtype, generations: int, copies: bool, tokens: int = 512, kernel: str = "auto"
) -> RoundingError:
    """Moves keys of unit variance by random distances, as often as asked, and measures.

    Args:
        dtype: cache dtype. The keys' own rounding to it is not counted: the original in
            the cache is the truth.
        generations: how many moves, at least 1.
        copies: move the last copy (True) or the original by the whole distance (False).
        tokens: how many keys, of 4 heads of 64.
        kernel: see `make_corrector`.
    """
    spec = RopeSpec(64, 64, inv_freq=standard_inv_freq(64, 5e5), name="roundings")
    generator = torch.Generator().manual_seed(2024)
    buffer = torch.zeros(tokens * (generations + 1), 4, 64, dtype=dtype)
    original = torch.randn(tokens, 4, 64, generator=generator).to(dtype)
    buffer.view(_BITS[dtype.itemsize])[:tokens] = original.view(_BITS[dtype.itemsize])
    corrector = make_corrector(KVPoolView([buffer], [], [spec]), kernel)
    slots = torch.arange(tokens)
    total = torch.zeros(tokens, dtype=torch.int64)
    for generation in range(1, generations + 1):
        step = torch.randint(-4096, 4097, (tokens,), generator=generator)
        total += step
        source = slots + (generation - 1) * tokens if copies else slots
        corrector.move(source, slots + generation * tokens, step if copies else total)
    last = buffer[generations * tokens :].to(torch.float64)
    exact = rotate(original, total, spec)
    size = float(exact.pow(2).mean().sqrt())
    error = (last - exact).abs()
    return RoundingError(
        generations, copies, float(error.pow(2).mean().sqrt()) / size, float(error.max()) / size
    )
