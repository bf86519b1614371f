"""The correction through FlashInfer's own RoPE operator.

Owns the translation of a move into `apply_rope_with_cos_sin_cache_inplace`: the operator
rotates by a row of a cosine and sine table, so a table with one row per distinct distance,
of magnitude one, turns it into the correction. It is the second opinion on NVIDIA beside the
Triton kernel, and the fallback where Triton is missing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from radix_rope.rotary.pool import KVPoolView
from radix_rope.rotary.request import Move, MoveChecker
from radix_rope.rotary.spec import RopeSpec, angle_table
from radix_rope.rotary.torch_kernel import BLOCK_TOKENS, read_rows, write_rows

# Head sizes for which the operator has a compiled path that reads 16 bytes at a time;
# rotated parts are padded to the next one.
_HEAD_SIZES = (64, 128, 256, 512)

DTYPES = (torch.float16, torch.bfloat16)
"""Cache dtypes that FlashInfer's operator rotates."""


def load_operator() -> Callable[..., None]:
    """FlashInfer's operator.

    Raises:
        ImportError: FlashInfer is not installed or does not load here.
    """
    from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

    operator: Callable[..., None] = apply_rope_with_cos_sin_cache_inplace
    return operator


def unsupported(pool: KVPoolView) -> str | None:
    """Why a pool can't be served by the operator, or None."""
    if pool.dtype not in DTYPES:
        return f"FlashInfer's RoPE works on float16 and bfloat16, not on {pool.dtype}"
    for spec in pool.specs:
        # The operator reads vectors of 16 bytes (32 for 512 wide heads) from each half.
        vector = 16 if spec.rotary_dim > _HEAD_SIZES[-2] else 8
        if spec.rotary_dim > _HEAD_SIZES[-1] or (spec.rotary_dim // 2) % vector:
            return f"FlashInfer's RoPE has no path for rotary dimension {spec.rotary_dim}"
    return None


class FlashInferCorrector:
    """`Corrector` through FlashInfer.

    Its bits may differ from the other kernels' in the last place: the operator is free to
    fuse a product and a sum. The error bound of one move holds all the same.
    """

    name = "flashinfer"

    def __init__(
        self,
        pool: KVPoolView,
        rotate: bool = True,
        operator: Callable[..., None] | None = None,
    ) -> None:
        """Prepares to work in a pool.

        Args:
            pool: the pool to work in, on an NVIDIA GPU.
            rotate: False copies keys unrotated (the counter-example of the demo).
            operator: what to call instead of FlashInfer's operator, with its signature.
        """
        self._pool = pool
        self._rotate = rotate
        self._operator = operator if operator is not None else load_operator()
        self._checker = MoveChecker(pool.num_slots, pool.device)

    def move(self, src: torch.Tensor, dst: torch.Tensor, delta: torch.Tensor) -> None:
        """See `Corrector.move`."""
        move = self._checker.check(src, dst, delta)
        pool = self._pool
        tables: dict[tuple[float, ...], torch.Tensor] = {}
        deltas = move.deltas.numpy()
        for spec in pool.specs:
            if spec.has_rope and spec.inv_freq not in tables:
                rows = np.concatenate(angle_table(spec.inv_freq, deltas), axis=1)
                tables[spec.inv_freq] = torch.from_numpy(rows).to(pool.device)
        for start in range(0, move.src.numel(), BLOCK_TOKENS):
            block = slice(start, start + BLOCK_TOKENS)
            for buffer in pool.v:
                write_rows(buffer, move.dst[block], read_rows(buffer, move.src[block]))
            for buffer, spec in zip(pool.k, pool.specs, strict=True):
                rows_k = read_rows(buffer, move.src[block])
                if self._rotate and spec.has_rope:
                    self._rotate_rows(rows_k, move, block, spec, tables[spec.inv_freq])
                write_rows(buffer, move.dst[block], rows_k)

    def _rotate_rows(
        self, rows: torch.Tensor, move: Move, block: slice, spec: RopeSpec, table: torch.Tensor
    ) -> None:
        """Rotates gathered rows ``[tokens, heads, head_dim]`` (as bits) in place."""
        tokens, heads, _ = rows.shape
        width = next(size for size in _HEAD_SIZES if size >= spec.rotary_dim)
        part = rows[..., spec.rotary_offset : spec.rotary_offset + spec.rotary_dim]
        dtype, device = self._pool.dtype, self._pool.device
        key = torch.zeros((tokens, heads, width), dtype=dtype, device=device)
        key[..., : spec.rotary_dim] = part.view(dtype)
        row = move.row[block]
        self._operator(
            positions=row,
            # The operator rotates queries beside keys; one idle head satisfies it.
            query=torch.zeros((tokens, width), dtype=dtype, device=device),
            key=key.view(tokens, heads * width),
            head_size=width,
            cos_sin_cache=table,
            is_neox=spec.is_neox,
        )
        still = (move.deltas == 0).to(device)[row].view(-1, 1, 1)
        moved = key[..., : spec.rotary_dim].contiguous().view(part.dtype)
        part.copy_(torch.where(still, part, moved))
