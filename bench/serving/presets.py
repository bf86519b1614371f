"""How much is measured: sizes from small CPUs to GPUs, and how many requests of each.

Plain data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bench.serving.fit import Size
from bench.serving.workloads import CLAIMED, WORKLOADS

INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class CellPlan:
    """One workload at one size, its requests sent one after another.

    Attributes:
        workload: a key of `WORKLOADS`.
        size: length and reusable share.
        requests: shifted requests that radix_rope answers.
        stock_requests: how many of them, spread evenly, stock SGLang and other servers answer.
            Their prefill is long, so it takes most of a run and varies little.
        radix_cache_requests: the same for stock SGLang with its second tree; 0 leaves it out of
            the cell. Nothing but its speed at prefix hits differs from the default tree.
        controls: unshifted requests for every shifted one, answered by all.
    """

    workload: str
    size: Size
    requests: int
    stock_requests: int
    radix_cache_requests: int
    controls: int


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One workload at one size under load. Stock SGLang's second tree is left out.

    Attributes:
        workload: a key of `WORKLOADS`.
        size: length and reusable share.
        rates: arrivals per second.
        requests: requests a burst.
        bursts: how often each server is asked at each rate, in turns, each time something new.
        output_tokens: tokens each request generates.
    """

    workload: str
    size: Size
    rates: tuple[float, ...]
    requests: int
    bursts: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Preset:
    """What one run measures: one request at a time, then under load."""

    cells: tuple[CellPlan, ...]
    loads: tuple[LoadPlan, ...]


def _cells(
    workloads: Iterable[str], *sizes: Size, asked: tuple[int, int, int], controls: int
) -> tuple[CellPlan, ...]:
    """asked: requests to radix_rope, to stock SGLang, and to stock SGLang with `RadixCache`."""
    keys = tuple(workloads)
    return tuple(CellPlan(key, size, *asked, controls) for size in sizes for key in keys)


_OTHERS = tuple(key for key in WORKLOADS if key not in CLAIMED)
_TINY, _SMALL = Size(512, 75), Size(1024, 95)

PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        cells=_cells(WORKLOADS, _TINY, asked=(1, 1, 1), controls=1),
        loads=(LoadPlan("shared_prefix", _TINY, (INFINITE,), 2, 2, 2),),
    ),
    "short": Preset(
        cells=_cells(CLAIMED, _SMALL, asked=(2, 2, 1), controls=2)
        + _cells(_OTHERS, Size(1024, 90, pieces=4), asked=(2, 2, 0), controls=2),
        loads=(LoadPlan("shared_prefix", _SMALL, (0.5, 2.0, INFINITE), 6, 1, 4),),
    ),
    "claims": Preset(
        cells=_cells(CLAIMED, _SMALL, asked=(6, 4, 3), controls=3)
        + _cells(CLAIMED, Size(4096, 95, pieces=4), Size(4096, 99), asked=(6, 2, 0), controls=1),
        loads=tuple(LoadPlan(key, _SMALL, (INFINITE,), 4, 2, 4) for key in CLAIMED),
    ),
    "gpu": Preset(
        cells=_cells(
            WORKLOADS,
            Size(8192, 95, pieces=8),
            Size(32768, 95, pieces=16),
            asked=(8, 8, 8),
            controls=2,
        )
        + _cells(CLAIMED, Size(32768, 99), asked=(8, 8, 8), controls=2),
        loads=tuple(
            LoadPlan(key, Size(8192, 95, pieces=8), (1.0, 4.0, 16.0, 64.0, INFINITE), 32, 1, 64)
            for key in CLAIMED
        ),
    ),
}
"""By name on the command line."""
