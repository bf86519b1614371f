"""Helpers of the rotary tests: pools, slot patterns, kernels, and the naive twin of a move."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from radix_rope.rotary.corrector import Corrector, make_corrector
from radix_rope.rotary.dtypes import cache_dtype, move_bound, round_to
from radix_rope.rotary.pool import KVPoolView
from radix_rope.rotary.reference import rotate
from radix_rope.rotary.spec import RopeSpec, standard_inv_freq

DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def spec_of(
    head_dim: int, rotary_dim: int, offset: int = 0, neox: bool = True, base: float = 1e4
) -> RopeSpec:
    return RopeSpec(head_dim, rotary_dim, offset, neox, standard_inv_freq(rotary_dim, base))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(BITS[tensor.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def random_rows(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, scale: float = 2.0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


@dataclass
class Pool:
    """A small pool and a copy of what it held at first."""

    view: KVPoolView
    k_before: list[torch.Tensor]
    v_before: list[torch.Tensor]


def make_pool(
    specs: Sequence[RopeSpec],
    dtype: torch.dtype,
    slots: int = 96,
    heads: int = 2,
    v_dim: int | None = None,
    layout: str = "nhd",
    page: int = 4,
    seed: int = 0,
) -> Pool:
    """Layouts: nhd; hnd (a view of [pages, heads, page, dim]); major (pages hold all layers)."""
    v_widths = [] if v_dim == 0 else [v_dim or spec.head_dim for spec in specs]

    def fill(dims: list[int], offset: int) -> list[torch.Tensor]:
        shape = (slots // page, page, heads)
        if layout == "nhd":
            return [
                random_rows((slots, heads, dim), dtype, seed + offset + i)
                for i, dim in enumerate(dims)
            ]
        if layout == "hnd":
            return [
                random_rows((slots // page, heads, page, dim), dtype, seed + offset + i).transpose(
                    1, 2
                )
                for i, dim in enumerate(dims)
            ]
        assert layout == "major"
        widest = max(dims)
        whole = random_rows((slots // page, len(dims), page, heads, widest), dtype, seed + offset)
        assert whole[:, 0].shape[:3] == shape
        return [whole[:, i, :, :, :dim] for i, dim in enumerate(dims)]

    k = fill([spec.head_dim for spec in specs], 0)
    v = fill(v_widths, 100) if v_widths else []
    view = KVPoolView(k, v, list(specs))
    return Pool(view, [flat(t).clone() for t in k], [flat(t).clone() for t in v])


def flat(buffer: torch.Tensor) -> torch.Tensor:
    """[slots, heads, dim] values of a buffer in any layout (a copy unless NHD)."""
    if buffer.dim() == 3:
        return buffer
    pages, page, heads, dim = buffer.shape
    return bits(buffer).reshape(pages * page, heads, dim).view(buffer.dtype)


def rows(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return bits(flat(buffer))[slots].view(buffer.dtype)


def naive_move(
    k: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, delta: torch.Tensor, spec: RopeSpec
) -> torch.Tensor:
    """What a move must leave in one layer's keys, token by token, in float64 and rounded once."""
    for s, d, distance in zip(src.tolist(), dst.tolist(), delta.tolist(), strict=True):
        moved = round_to(rotate(rows(k, torch.tensor([s])), distance, spec), k.dtype)
        bits(k)[d] = bits(moved if distance else rows(k, torch.tensor([s])))[0]
    return k


def assert_within_bound(
    result: torch.Tensor, source: torch.Tensor, delta: torch.Tensor, spec: RopeSpec
) -> None:
    """Result rows against the float64 reference: every rotated element within its bound."""
    exact = rotate(source, delta, spec)
    limit = cache_dtype(source.dtype)
    if limit.is_fp8:
        exact = exact.clamp(-limit.largest, limit.largest)
    lo, hi = spec.rotary_offset, spec.rotary_offset + spec.rotary_dim
    part = source.double()[..., lo:hi]
    if spec.is_neox:
        half = spec.rotary_dim // 2
        norm = torch.hypot(part[..., :half], part[..., half:]).repeat(1, 1, 2)
    else:
        norm = torch.hypot(part[..., 0::2], part[..., 1::2]).repeat_interleave(2, dim=-1)
    error = (result.double() - exact).abs()
    bound = move_bound(norm, source.dtype)
    assert (error[..., lo:hi] <= bound).all(), (
        f"{spec.name}: {float((error[..., lo:hi] / bound).max()):.3f} of the bound"
    )
    kept = torch.ones(spec.head_dim, dtype=torch.bool)
    kept[lo:hi] = False
    assert same_bits(result[..., kept].contiguous(), source[..., kept].contiguous())


@contextmanager
def interpreter() -> Iterator[None]:
    """Triton's interpreter for kernels that are first imported or built inside."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def build(view: KVPoolView, kernel: str, rotate: bool = True) -> Corrector:
    """A corrector on the CPU; Triton in its interpreter."""
    if kernel != "triton":
        return make_corrector(view, kernel, rotate)
    with interpreter():
        # Functions are bound to the interpreter when they are defined.
        importlib.import_module("radix_rope.rotary.triton_program")
        return make_corrector(view, kernel, rotate)


KERNELS = ("cpu", "torch", "triton")


def slot_pattern(name: str, tokens: int, slots: int, page: int) -> tuple[torch.Tensor, ...]:
    """(src, dst) without overlap: contiguous, scattered, or whole pages in random order."""
    generator = torch.Generator().manual_seed(tokens)
    half = slots // 2
    if name == "contiguous":
        return torch.arange(tokens), torch.arange(half, half + tokens)
    if name == "scattered":
        order = torch.randperm(slots, generator=generator)
        return order[:tokens], order[half : half + tokens]
    assert name == "pages"
    pages = torch.randperm(slots // page, generator=generator)
    each = (pages[:, None] * page + torch.arange(page)).flatten()
    return each[:tokens], each[half : half + tokens]
