"""Counters of the content tree: what it holds and what matching cost.

Owns numbers for people and metrics. Nothing here may influence a decision: every rank of a tensor
parallel group must reach the same plan.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class MatchStats:
    """Sizes are current, counts are totals since the tree was made."""

    cached_tokens: int = 0
    segments: int = 0
    entries: int = 0
    """Windows in the index."""
    index_bytes: int = 0
    """Memory of the index, as `WindowIndex.nbytes` counts it; current after every change."""
    matches: int = 0
    windows_proposed: int = 0
    """Query windows whose fingerprint the index knows."""
    candidates_verified: int = 0
    """Donor windows compared token by token."""
    collisions: int = 0
    """Of these, windows whose tokens differed."""
    runs_found: int = 0
    comparisons: int = 0
    """Slices compared while verifying and extending."""
    budget_exhausted: int = 0
    """Matches that reached the bound of work per request."""
    refused: Counter[str] = field(default_factory=Counter)
    """Donors of equal content that were not used, by reason: `generations` and `roundings` (too
    many behind them), `too_short`; the integration adds its own reasons."""
    last_match_seconds: float = 0.0
    total_match_seconds: float = 0.0
