"""What the hit rates must show on any machine. Decides, and formats nothing but sentences."""

from __future__ import annotations

from bench.hit_rate.measure import Counted, law_rate
from bench.hit_rate.report import Results, Side

ALLOWED = 0.01
"""Largest deviation from the law, as a share of the prompt tokens."""


def verdicts(results: Results) -> list[tuple[bool, str]]:
    """Every promise: whether it was kept, and the promise with what was measured."""
    deviation = _largest_deviation(results)
    stock, ours = (_case(side, "model") for side in (results.stock, results.ours))
    return [
        (
            deviation <= ALLOWED,
            f"at most {100 * ALLOWED:.0f} percentage point away from the append-only law, on "
            f"either server: {100 * deviation:.2f}",
        ),
        (
            # Stock separates models by namespace; more than it keeps can only be the other's KV.
            ours.tokens.shifted == 0 and ours.tokens.read == stock.tokens.read,
            f"{ours.title}: nothing of the first is reused, so as many exact tokens as stock and "
            f"none shifted: {ours.tokens.read:,} against {stock.tokens.read:,}, and "
            f"{ours.tokens.shifted:,} shifted",
        ),
    ]


def _largest_deviation(results: Results) -> float:
    """Between law and measurement, on either server; a share of the prompt tokens, 0 to 1."""
    return max(
        abs(law.tokens.hit_rate - law_rate(law))
        for side in (results.stock, results.ours)
        for law in side.laws
    )


def _case(side: Side, key: str) -> Counted:
    return next(case for case in side.cases if case.key == key)
