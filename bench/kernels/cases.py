"""What is measured: model shapes, their pools, and the contestants of a case.

All contestants of a case run in one process, one after the other in each round, and ratios
are taken within a round. Bytes counted are those read plus those written by an ideal move:
every key and value once each way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from radix_rope.rotary.corrector import KernelUnavailable, available_kernels, make_corrector
from radix_rope.rotary.pool import KVPoolView
from radix_rope.rotary.spec import RopeSpec, standard_inv_freq

GIB = 1 << 30


@dataclass(frozen=True)
class Shape:
    """KV shape of a model on one rank."""

    name: str
    layers: int
    heads: int
    head_dim: int
    rotary_dim: int
    rotary_offset: int
    neox: bool
    has_v: bool
    base: float

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """K and V of one token over all layers."""
        rows = 2 if self.has_v else 1
        return self.layers * rows * self.heads * self.head_dim * dtype.itemsize


SHAPES = (
    Shape("SmolLM2-135M", 30, 3, 64, 64, 0, True, True, 1e5),
    Shape("Llama-3-8B", 32, 8, 128, 128, 0, True, True, 5e5),
    Shape("DeepSeek-V2-Lite", 27, 1, 576, 64, 512, False, False, 1e4),
)


@dataclass(frozen=True)
class Result:
    """One contestant in one case; ratios are copy time over its time, per round."""

    shape: str
    layers: int
    dtype: str
    tokens: int
    contestant: str
    median_ms: float
    gb_per_s: float
    ratio_median: float
    ratio_low: float
    ratio_high: float


def build_pool(shape: Shape, dtype: torch.dtype, slots: int, device: torch.device) -> KVPoolView:
    """A pool of random bits that are small finite numbers."""
    frequencies = standard_inv_freq(shape.rotary_dim, shape.base)
    spec = RopeSpec(
        shape.head_dim, shape.rotary_dim, shape.rotary_offset, shape.neox, frequencies, shape.name
    )
    row = torch.randn(256, shape.heads, shape.head_dim).to(dtype).to(device)

    def buffer() -> torch.Tensor:
        whole = torch.empty((slots, shape.heads, shape.head_dim), dtype=dtype, device=device)
        for start in range(0, slots, 256):
            part = whole[start : start + 256]
            part.copy_(row[: len(part)])
        return whole

    k = [buffer() for _ in range(shape.layers)]
    v = [buffer() for _ in range(shape.layers)] if shape.has_v else []
    return KVPoolView(k, v, [spec] * shape.layers)


def torch_copies(
    pool: KVPoolView, src: torch.Tensor, dst: torch.Tensor
) -> dict[str, Callable[[], None]]:
    """Plain gather-and-scatter copies of the same bytes: two ways to write it in torch."""
    # Rows as the widest integers, so that torch copies few elements.
    wide = [t.flatten(1).view(torch.int64) for t in (*pool.k, *pool.v)]
    plain = [t.view(torch.int16) if t.element_size() == 2 else t for t in (*pool.k, *pool.v)]

    def assign() -> None:
        for buffer in plain:
            buffer[dst] = buffer[src]

    def index_copy() -> None:
        for buffer in wide:
            buffer.index_copy_(0, dst, buffer.index_select(0, src))

    return {"torch buf[dst]=buf[src]": assign, "torch index_copy_": index_copy}


def device_copy(pool: KVPoolView, tokens: int) -> dict[str, Callable[[], None]]:
    """Device-to-device copies of contiguous halves: the upper limit on a GPU."""

    def copy() -> None:
        for buffer in (*pool.k, *pool.v):
            buffer[tokens : 2 * tokens].copy_(buffer[:tokens])

    return {"device copy": copy}


def clock(run: Callable[[], None], device: torch.device, calls: int) -> float:
    """Seconds of one call, averaged over `calls`."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def run_case(
    shape: Shape, dtype: torch.dtype, tokens: int, device: torch.device, rounds: int
) -> list[Result]:
    """All contestants, alternating."""
    pool = build_pool(shape, dtype, 2 * tokens, device)
    generator = torch.Generator().manual_seed(tokens)
    src = torch.randperm(tokens, generator=generator).to(device)
    dst = (torch.randperm(tokens, generator=generator) + tokens).to(device)
    # Two runs that moved by different distances, as in a plan.
    delta = torch.where(torch.arange(tokens) < tokens // 2, 777, -4096)
    if device.type == "cuda":
        contestants = device_copy(pool, tokens)
    else:
        contestants = torch_copies(pool, src, dst)
    copies = list(contestants)
    for kernel in available_kernels(device):
        try:
            corrector = make_corrector(pool, kernel)
        except KernelUnavailable as reason:
            print(f"  {kernel}: {reason}")
            continue
        contestants[f"move: {kernel}"] = lambda c=corrector: c.move(src, dst, delta)  # type: ignore[misc]
    moved_bytes = 2 * tokens * pool.bytes_per_token
    calls = max(1, min(20, (64 << 20) // moved_bytes))
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for run in contestants.values():
        run()
    for _ in range(rounds):
        for name, run in contestants.items():
            seconds[name].append(clock(run, device, calls))
    # The faster of the plain copies is what everything is measured against.
    best = min(copies, key=lambda name: statistics.median(seconds[name]))
    results = []
    for name, times in seconds.items():
        ratios = [copy / own for copy, own in zip(seconds[best], times, strict=True)]
        median = statistics.median(times)
        results.append(
            Result(
                shape.name,
                shape.layers,
                str(dtype).removeprefix("torch."),
                tokens,
                name,
                median * 1e3,
                moved_bytes / median / 1e9,
                statistics.median(ratios),
                min(ratios),
                max(ratios),
            )
        )
    return results


def fitting(shape: Shape, dtype: torch.dtype, tokens: int, limit_gib: float) -> Shape:
    """The shape with as many layers as fit: bandwidth does not depend on their number."""
    per_layer = shape.bytes_per_token(dtype) / shape.layers * 2 * tokens
    return replace(shape, layers=max(1, min(shape.layers, int(limit_gib * GIB / per_layer))))
