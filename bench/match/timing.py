"""Clocks: median and spread of calls that find the processor's caches cold."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

T = TypeVar("T")

_COLD = np.zeros(1 << 23, dtype=np.int64)  # 64 MiB, more than any cache here


@dataclass(frozen=True)
class Timing:
    """Milliseconds over the repetitions: wall clock, and CPU of the calling thread."""

    median_ms: float
    low_ms: float  # 10th percentile
    high_ms: float  # 90th percentile
    cpu_ms: float

    @classmethod
    def of(cls, wall_s: Sequence[float], cpu_s: Sequence[float]) -> Timing:
        """Summarise seconds."""
        low, median, high = np.percentile(np.array(wall_s) * 1e3, [10, 50, 90]).tolist()
        return cls(median, low, high, float(np.median(cpu_s)) * 1e3)

    def __str__(self) -> str:
        """Median and spread."""
        return f"{self.median_ms:.3f} [{self.low_ms:.3f}, {self.high_ms:.3f}]"


@dataclass
class Clock:
    """Collects timings of one kind of call."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def __call__(self, call: Callable[[], T]) -> T:
        """Run and time one call, from cold caches."""
        _COLD.sum()
        cpu, wall = time.thread_time(), time.perf_counter()
        result = call()
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(time.thread_time() - cpu)
        return result

    @property
    def timing(self) -> Timing:
        """What was measured."""
        return Timing.of(self.wall_s, self.cpu_s)


def on_top(ours: Clock, stock: Clock) -> Timing:
    """What ours took longer than stock, call by call."""
    wall = [a - b for a, b in zip(ours.wall_s, stock.wall_s, strict=True)]
    cpu = [a - b for a, b in zip(ours.cpu_s, stock.cpu_s, strict=True)]
    return Timing.of(wall, cpu)
