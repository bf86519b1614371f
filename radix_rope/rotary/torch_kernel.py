"""The correction in plain torch operations, on any device.

Owns the fallback that works wherever torch does. It gathers, rotates and scatters in three
steps with temporaries, in blocks of tokens so that these stay small.
"""

from __future__ import annotations

import torch

from radix_rope.rotary.dtypes import round_to
from radix_rope.rotary.pool import KVPoolView
from radix_rope.rotary.request import Move, MoveChecker
from radix_rope.rotary.spec import angle_table

# Tokens handled at once: bounds the temporaries to a few rows times this.
BLOCK_TOKENS = 4096

# Gather and scatter move bits: torch has no index_put for float8, and a copy must not
# canonicalise NaNs.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.view(_BITS[buffer.element_size()])


def read_rows(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Gathers rows: ``[tokens, heads, dim]``, as bits."""
    bits = _bits(buffer)
    if bits.dim() == 3:
        return bits[slots]
    page = bits.shape[1]
    return bits[slots // page, slots % page]


def write_rows(buffer: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Scatters rows ``[tokens, heads, dim]``, given as bits."""
    bits = _bits(buffer)
    if bits.dim() == 3:
        bits[slots] = rows
    else:
        page = bits.shape[1]
        bits[slots // page, slots % page] = rows


class TorchCorrector:
    """`Corrector` in torch operations."""

    name = "torch"

    def __init__(self, pool: KVPoolView, rotate: bool = True) -> None:
        """Prepares to work in a pool.

        Args:
            pool: the pool to work in.
            rotate: False copies keys unrotated (the counter-example of the demo).
        """
        self._pool = pool
        self._rotate = rotate
        self._checker = MoveChecker(pool.num_slots, pool.device)

    def move(self, src: torch.Tensor, dst: torch.Tensor, delta: torch.Tensor) -> None:
        """See `Corrector.move`."""
        move = self._checker.check(src, dst, delta)
        pool = self._pool
        for start in range(0, move.src.numel(), BLOCK_TOKENS):
            block = slice(start, start + BLOCK_TOKENS)
            source, target = move.src[block], move.dst[block]
            for buffer in pool.v:
                write_rows(buffer, target, read_rows(buffer, source))
            self._move_keys(move, block, source, target)

    def _move_keys(
        self, move: Move, block: slice, source: torch.Tensor, target: torch.Tensor
    ) -> None:
        pool = self._pool
        row = move.row[block]
        deltas = move.deltas.numpy()
        still = (move.deltas == 0).to(pool.device)[row].view(-1, 1, 1)
        tables: dict[tuple[float, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        for buffer, spec in zip(pool.k, pool.specs, strict=True):
            rows = read_rows(buffer, source)
            if self._rotate and spec.has_rope:
                if spec.inv_freq not in tables:
                    cos, sin = angle_table(spec.inv_freq, deltas)
                    tables[spec.inv_freq] = (
                        torch.from_numpy(cos).to(pool.device)[row].unsqueeze(1),
                        torch.from_numpy(sin).to(pool.device)[row].unsqueeze(1),
                    )
                cos_rows, sin_rows = tables[spec.inv_freq]
                lo, hi = spec.rotary_offset, spec.rotary_offset + spec.rotary_dim
                part = rows[..., lo:hi]
                values = part.view(buffer.dtype).to(torch.float32)
                moved = torch.empty_like(values)
                if spec.is_neox:
                    first, second = values.chunk(2, dim=-1)
                    out_first, out_second = moved.chunk(2, dim=-1)
                else:
                    first, second = values[..., 0::2], values[..., 1::2]
                    out_first, out_second = moved[..., 0::2], moved[..., 1::2]
                # Two products and a sum, never addcmul: a fused multiply-add would give
                # other bits than the other kernels.
                out_first.copy_(first * cos_rows - second * sin_rows)
                out_second.copy_(second * cos_rows + first * sin_rows)
                stored = _bits(round_to(moved, buffer.dtype))
                rows[..., lo:hi] = torch.where(still, part, stored)
            write_rows(buffer, target, rows)
