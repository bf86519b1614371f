"""The Triton kernel's host side: tables of addresses and angles, and the launches.

Owns the grouping of layers into launches (one for all layers of one shape, so one for most
models) and the choice of block sizes. Runs on CUDA and ROCm, and on the CPU in Triton's
interpreter (``TRITON_INTERPRET=1``, set before this module is imported) for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from radix_rope.rotary import triton_program as program
from radix_rope.rotary.pool import KVPoolView, RowGeometry, geometry
from radix_rope.rotary.request import Move, MoveChecker
from radix_rope.rotary.spec import RopeSpec, angle_table

_CODES = {
    torch.float32: program.FLOAT32.value,
    torch.float16: program.FLOAT16.value,
    torch.bfloat16: program.BFLOAT16.value,
    torch.float8_e4m3fn: program.FLOAT8_E4M3.value,
    torch.float8_e5m2: program.FLOAT8_E5M2.value,
}

# Elements of one program: enough to keep a GPU's load units busy without spilling.
_BLOCK_ELEMENTS = 2048


@dataclass(frozen=True)
class _Launch:
    """Layers that share every constant of the program."""

    layers: tuple[int, ...]
    constants: dict[str, Any]
    heads: int


class TritonCorrector:
    """`Corrector` in Triton, one launch per shape of layer."""

    name = "triton"

    def __init__(self, pool: KVPoolView, rotate: bool = True) -> None:
        """Prepares to work in a pool, compiling the program.

        Args:
            pool: the pool to work in, on a GPU (or anywhere in the interpreter).
            rotate: False copies keys unrotated (the counter-example of the demo).
        """
        self._pool = pool
        self._checker = MoveChecker(pool.num_slots, pool.device)
        self._frequencies: list[tuple[float, ...]] = []
        self._table_of_layer: list[int] = []
        for spec in pool.specs:
            if not (rotate and spec.has_rope):
                self._table_of_layer.append(-1)
                continue
            if spec.inv_freq not in self._frequencies:
                self._frequencies.append(spec.inv_freq)
            self._table_of_layer.append(self._frequencies.index(spec.inv_freq))
        self._launches = self._group(rotate)
        codes = torch.arange(256, dtype=torch.uint8)
        fp8 = pool.dtype.itemsize == 1
        lookup = codes.view(pool.dtype).to(torch.float32) if fp8 else torch.zeros(1)
        self._lookup = lookup.to(pool.device)
        # Compiles now: a program without tokens inside the mask touches nothing.
        slots = torch.zeros(1, dtype=torch.int64, device=pool.device)
        self._launch_all(Move(slots, slots, torch.zeros(1, dtype=torch.int64), slots), tokens=0)

    def _group(self, rotate: bool) -> list[_Launch]:
        groups: dict[tuple[Any, ...], list[int]] = {}
        constants: dict[tuple[Any, ...], dict[str, Any]] = {}
        for index, spec in enumerate(self._pool.specs):
            value = self._pool.v[index] if self._pool.v else None
            chosen = _constants(self._pool.k[index], value, spec, rotate)
            key = tuple(chosen.values())
            groups.setdefault(key, []).append(index)
            constants[key] = chosen
        launches = []
        for key, layers in groups.items():
            chosen = constants[key]
            pieces = chosen.pop("V_PIECES")
            launches.append(_Launch(tuple(layers), chosen, chosen["K_HEADS"] + pieces))
        return launches

    def move(self, src: torch.Tensor, dst: torch.Tensor, delta: torch.Tensor) -> None:
        """See `Corrector.move`."""
        move = self._checker.check(src, dst, delta)
        if move.src.numel():
            self._launch_all(move, move.src.numel())

    def _launch_all(self, move: Move, tokens: int) -> None:
        device = self._pool.device
        deltas = move.deltas.numpy()
        still = (move.deltas == 0).to(torch.int8).to(device)[move.row]
        tables = {
            index: np.concatenate(angle_table(frequencies, deltas), axis=1)
            for index, frequencies in enumerate(self._frequencies)
        }
        for launch in self._launches:
            used = sorted({self._table_of_layer[layer] for layer in launch.layers} - {-1})
            stacked = np.concatenate([tables[i] for i in used]) if used else np.zeros((1, 1))
            angles = torch.from_numpy(stacked.astype(np.float32)).to(device)
            first_row = {index: place * len(deltas) for place, index in enumerate(used)}
            addresses = torch.tensor(
                [
                    (
                        self._pool.k[layer].data_ptr(),
                        self._pool.v[layer].data_ptr() if self._pool.v else 0,
                        first_row.get(self._table_of_layer[layer], 0),
                    )
                    for layer in launch.layers
                ],
                dtype=torch.int64,
            ).to(device)
            block = launch.constants["BLOCK"]
            grid = (triton.cdiv(max(tokens, 1), block), launch.heads, len(launch.layers))
            program.move_program[grid](
                addresses,
                angles,
                self._lookup,
                move.src,
                move.dst,
                move.row,
                still,
                tokens,
                **launch.constants,
                num_warps=4,
                enable_fp_fusion=False,
            )


def _pow2(value: int) -> int:
    return int(triton.next_power_of_2(max(value, 1)))


def _constants(
    key: torch.Tensor, value: torch.Tensor | None, spec: RopeSpec, rotate: bool
) -> dict[str, Any]:
    """Everything that a launch is specialised on, for one layer."""
    k = geometry(key)
    half = spec.rotary_dim // 2 if rotate else 0
    half_pad = _pow2(half)
    rest = half == 0 or spec.head_dim > 2 * half
    dim_pad = _pow2(spec.head_dim) if rest else 1
    item = key.element_size()
    byte_counts = [key.data_ptr(), *_byte_strides(k, item)]
    v = _value_constants(value)
    if value is not None:
        byte_counts += [value.data_ptr(), *_byte_strides(geometry(value), value.element_size())]
    align = 16
    while any(count % align for count in byte_counts):
        align //= 2
    widest = max(2 * half_pad, dim_pad, v["V_WORDS_PAD"])
    return {
        "CODE": _CODES[key.dtype],
        "K_PAGE": k.page_tokens,
        "K_PAGE_STRIDE": k.page_stride,
        "K_TOKEN_STRIDE": k.token_stride,
        "K_HEAD_STRIDE": k.head_stride,
        "K_HEADS": k.heads,
        "DIM": spec.head_dim,
        "DIM_PAD": dim_pad,
        "OFFSET": spec.rotary_offset,
        "HALF": half,
        "HALF_PAD": half_pad,
        "NEOX": spec.is_neox,
        **v,
        "ALIGN": align,
        "BLOCK": max(1, min(64, _BLOCK_ELEMENTS // widest)),
    }


def _byte_strides(where: RowGeometry, item: int) -> list[int]:
    strides = [where.page_stride, where.token_stride]
    if where.heads > 1:
        strides.append(where.head_stride)
    return [stride * item for stride in strides]


def _value_constants(value: torch.Tensor | None) -> dict[str, Any]:
    """V is copied in words of up to four bytes, in pieces that are contiguous."""
    if value is None:
        words, pieces, word, v = 0, 0, 4, RowGeometry(1, 0, 0, 0, 0, 0)
    else:
        v = geometry(value)
        item = value.element_size()
        # Head by head, which keeps pieces short enough for one program's registers.
        pieces, row_bytes = v.heads, v.head_dim * item
        word = 4
        byte_counts = [value.data_ptr(), row_bytes, *_byte_strides(v, item)]
        while any(count % word for count in byte_counts):
            word //= 2
        words = row_bytes // word
        v = RowGeometry(
            v.page_tokens,
            v.page_stride * item // word,
            v.token_stride * item // word,
            v.head_stride * item // word,
            v.heads,
            v.head_dim,
        )
    return {
        "V_PAGE": v.page_tokens,
        "V_PAGE_STRIDE": v.page_stride,
        "V_TOKEN_STRIDE": v.token_stride,
        "V_HEAD_STRIDE": v.head_stride,
        "V_WORDS": words,
        "V_WORDS_PAD": _pow2(words),
        "V_WORD_BYTES": word,
        "V_PIECES": pieces,
    }
