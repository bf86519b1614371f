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

    radix_cache: whether stock SGLang's second tree is measured too. Nothing but its speed at
        prefix hits differs from the default tree, and a long prefill costs it as much.
    """

    workload: str
    size: Size
    radix_cache: bool = True


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One workload at one size under load: arrivals per second, one burst for each rate.

    Stock SGLang's second tree is left out.
    """

    workload: str
    size: Size
    rates: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Preset:
    """What one run measures.

    Attributes:
        cells: measured one request at a time.
        requests: shifted requests a cell and server.
        extra_requests: the same for servers beside the baseline and radix_rope.
        controls: unshifted requests for every shifted one.
        loads: measured under load.
        load_requests: requests a burst.
        load_output_tokens: tokens each of them generates.
    """

    cells: tuple[CellPlan, ...]
    requests: int
    extra_requests: int
    controls: int
    loads: tuple[LoadPlan, ...]
    load_requests: int
    load_output_tokens: int


def _cells(
    workloads: Iterable[str], *sizes: Size, radix_cache: bool = True
) -> tuple[CellPlan, ...]:
    keys = tuple(workloads)
    return tuple(CellPlan(key, size, radix_cache) for size in sizes for key in keys)


_OTHERS = tuple(key for key in WORKLOADS if key not in CLAIMED)
_SMALL = Size(1024, 95)

PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        cells=_cells(WORKLOADS, Size(512, 75)),
        requests=1,
        extra_requests=1,
        controls=1,
        loads=(LoadPlan("shared_prefix", Size(512, 75), (INFINITE,)),),
        load_requests=3,
        load_output_tokens=2,
    ),
    "short": Preset(
        cells=_cells(CLAIMED, _SMALL)
        + _cells(_OTHERS, Size(1024, 90, pieces=4), radix_cache=False),
        requests=2,
        extra_requests=1,
        controls=2,
        loads=(LoadPlan("shared_prefix", _SMALL, (0.5, 2.0, INFINITE)),),
        load_requests=6,
        load_output_tokens=4,
    ),
    "claims": Preset(
        cells=_cells(CLAIMED, _SMALL)
        + _cells(CLAIMED, Size(4096, 95, pieces=4), Size(4096, 99), radix_cache=False),
        requests=3,
        extra_requests=1,
        controls=3,
        loads=tuple(LoadPlan(key, _SMALL, (INFINITE,)) for key in CLAIMED),
        load_requests=8,
        load_output_tokens=4,
    ),
    "gpu": Preset(
        cells=_cells(WORKLOADS, Size(8192, 95, pieces=8), Size(32768, 95, pieces=16))
        + _cells(CLAIMED, Size(32768, 99)),
        requests=8,
        extra_requests=8,
        controls=2,
        loads=tuple(
            LoadPlan(key, Size(8192, 95, pieces=8), (1.0, 4.0, 16.0, 64.0, INFINITE))
            for key in CLAIMED
        ),
        load_requests=128,
        load_output_tokens=64,
    ),
}
"""By name on the command line."""
