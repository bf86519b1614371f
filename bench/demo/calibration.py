"""Which attention backend is the faster one for stock SGLang.

Pure comparison of times. May not know how they were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

TIE = 0.05
"""Cold prefills that differ by less than this share are a tie, and the prefix hit decides."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Time to first token of a long prompt: cold, and with all but the question in the cache."""

    cold_ms: float
    hit_ms: float

    def __str__(self) -> str:
        """Both times in words."""
        return f"{self.cold_ms:.0f} ms cold, {self.hit_ms:.0f} ms hit"


def typical(samples: Sequence[Calibration]) -> Calibration:
    """The medians."""
    return Calibration(
        median(sample.cold_ms for sample in samples), median(sample.hit_ms for sample in samples)
    )


def is_faster(one: Calibration, other: Calibration) -> bool:
    """Whether `one` belongs to the faster backend: by cold prefill, or in a tie by prefix hit."""
    if abs(one.cold_ms - other.cold_ms) < TIE * other.cold_ms:
        return one.hit_ms < other.hit_ms
    return one.cold_ms < other.cold_ms
