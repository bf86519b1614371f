"""From samples to numbers: medians with their range, ratios to stock, and the promises.

Pure computation. May not know how anything was measured or how it is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from bench.serving.records import BASELINE, EXACT_ONLY, OURS, Cell, Load, Sample
from bench.serving.workloads import CLAIMED

MIN_TTFT_RATIO = {(1024, 95): 8.0, (4096, 95): 12.0, (4096, 99): 25.0}
"""Promised ratio of median TTFT to stock by prompt tokens and reusable percent."""
TREES = {BASELINE: "stock's default tree", EXACT_ONLY: "stock's RadixCache"}
MIN_LOAD_RATIO = 3.0
MIN_LIMIT = 0.7
UNSHIFTED = (0.98, 1.02)


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the smallest and the largest of what it was taken over."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Shares:
    """Median prompt tokens of one server by where their KV came from."""

    exact_tokens: float
    shifted_tokens: float
    computed_tokens: float


@dataclass(frozen=True, slots=True)
class Check:
    """One promise, what was measured, and whether it was kept."""

    promise: str
    measured: str
    passed: bool


def spread(values: Iterable[float]) -> Spread | None:
    """Median and range; None of nothing."""
    found = sorted(values)
    return Spread(median(found), found[0], found[-1]) if found else None


def ttft(cell: Cell, server: str, *, shifted: bool) -> Spread | None:
    """Time to first token in ms."""
    return spread(s.answer.ttft_ms for s in _of(cell, server, shifted))


def prompt_tokens(cell: Cell) -> int:
    """Median length of the shifted prompts, by the server's count."""
    return round(median(s.answer.prompt_tokens for s in cell.samples if s.shifted))


def shares(cell: Cell, server: str, *, shifted: bool = True) -> Shares | None:
    """Where prompt tokens came from; None where the server does not report it."""
    answers = [s.answer for s in _of(cell, server, shifted)]
    exact = [a.exact_tokens for a in answers if a.exact_tokens is not None]
    moved = [a.shifted_tokens for a in answers if a.shifted_tokens is not None]
    computed = [a.computed_tokens for a in answers if a.computed_tokens is not None]
    if not (exact and moved and computed):
        return None
    return Shares(median(exact), median(moved), median(computed))


def ttft_ratio(
    cells: Sequence[Cell], over: str, under: str, *, over_shifted: bool, under_shifted: bool
) -> Spread | None:
    """Ratio of the medians of TTFT, `over` to `under`, with the range of the ratios by request.

    Ratios by request compare answers to the same request, measured one after the other; where one
    server was asked fewer of them, every answer of one with every answer of the other.
    over several cells the median is that of all such ratios.
    """
    pairs: list[float] = []
    medians: list[float] = []
    for cell in cells:
        first, second = _of(cell, over, over_shifted), _of(cell, under, under_shifted)
        if not (first and second):
            continue
        medians.append(_median_ms(first) / _median_ms(second))
        if over_shifted == under_shifted:
            asked = [{(s.request, s.repeat) for s in side} for side in (first, second)]
            alike = asked[0] == asked[1]
            pairs += [
                a.answer.ttft_ms / b.answer.ttft_ms
                for a in first
                for b in second
                if not alike or (a.request, a.repeat) == (b.request, b.repeat)
            ]
        else:
            pairs += [
                a.answer.ttft_ms / b.answer.ttft_ms
                for a in first
                for b in second
                if a.request == b.request
            ]
    if not medians:
        return None
    middle = medians[0] if len(medians) == 1 else median(pairs)
    return Spread(middle, min(pairs, default=middle), max(pairs, default=middle))


def speed_up(cell: Cell, rival: str = BASELINE) -> Spread | None:
    """How many times longer `rival` takes to the first token of a shifted request."""
    return ttft_ratio([cell], rival, OURS, over_shifted=True, under_shifted=True)


def unshifted_ratio(cells: Sequence[Cell], rival: str = BASELINE) -> Spread | None:
    """TTFT of `rival` to ours where nothing is shifted: 1 means that radix_rope costs nothing."""
    return ttft_ratio(cells, rival, OURS, over_shifted=False, under_shifted=False)


def limit_ratio(cells: Sequence[Cell]) -> Spread | None:
    """How close to the limit a shifted request comes: 1 is a plain prefill of its computed tokens.

    The plain prefill is stock SGLang on the control: as many computed tokens behind an exact
    prefix hit that makes the prompt as long.
    """
    return ttft_ratio(cells, BASELINE, OURS, over_shifted=False, under_shifted=True)


def load_metric(
    loads: Sequence[Load], workload: str, rate: float, server: str, metric: str
) -> Spread | None:
    """One of SGLang's metrics over the bursts of one server."""
    found = _bursts(loads, workload, rate, server)
    return spread(load.metrics[metric] for load in found.values())


def load_ratio(loads: Sequence[Load], workload: str, rate: float) -> Spread | None:
    """Requests per second, ours to stock: ratio of the medians, and the range by burst."""
    ours, stock = (_bursts(loads, workload, rate, server) for server in (OURS, BASELINE))
    if not (ours and stock):
        return None
    speeds = [
        [load.metrics["request_throughput"] for load in found.values()] for found in (ours, stock)
    ]
    pairs = [
        load.metrics["request_throughput"] / stock[burst].metrics["request_throughput"]
        for burst, load in ours.items()
        if burst in stock
    ]
    middle = median(speeds[0]) / median(speeds[1])
    return Spread(middle, min(pairs, default=middle), max(pairs, default=middle))


def _bursts(loads: Sequence[Load], workload: str, rate: float, server: str) -> dict[int, Load]:
    return {
        load.burst: load
        for load in loads
        if (load.workload, load.rate, load.server) == (workload, rate, server)
    }


def checks(cells: Sequence[Cell], loads: Sequence[Load]) -> list[Check]:
    """The promises that this run says something about."""
    found = [*_ttft_checks(cells), *_load_checks(loads)]
    for tokens in sorted({cell.prompt_tokens for cell in cells}):
        group = [cell for cell in cells if cell.prompt_tokens == tokens]
        low, high = UNSHIFTED
        for rival in (BASELINE, EXACT_ONLY):
            if same := unshifted_ratio(group, rival):
                found.append(
                    Check(
                        f"unshifted, {tokens:,} tokens, all rows together: TTFT of "
                        f"{TREES[rival]} to ours from {low} to {high}",
                        f"{same.median:.3f} ({same.low:.2f}-{same.high:.2f})",
                        low <= same.median <= high,
                    )
                )
        limits = [near for near in map(limit_ratio, ([cell] for cell in group)) if near]
        if limits:
            worst = min(limits, key=lambda near: near.median)
            found.append(
                Check(
                    f"{tokens:,} tokens, in every row: plain prefill of the computed tokens takes "
                    f"at least {MIN_LIMIT} of our TTFT",
                    f"least {worst.median:.2f} ({worst.low:.2f}-{worst.high:.2f})",
                    worst.median >= MIN_LIMIT,
                )
            )
    counted = [
        sample
        for cell in cells
        for sample in cell.samples
        if sample.answer.computed_tokens is not None
        and (sample.server == OURS or not sample.shifted)
    ]
    if counted:
        right = [s for s in counted if s.answer.computed_tokens == s.expected_computed_tokens]
        found.append(
            Check(
                "all of ours and every unshifted request computed the tokens they were made for",
                f"{len(right)} of {len(counted)}",
                len(right) == len(counted),
            )
        )
    return found


def _ttft_checks(cells: Sequence[Cell]) -> Iterable[Check]:
    for cell in cells:
        wanted = MIN_TTFT_RATIO.get((cell.prompt_tokens, round(cell.reusable_percent)))
        if wanted is None or cell.workload not in CLAIMED:
            continue
        for rival in (BASELINE, EXACT_ONLY):
            if ratio := speed_up(cell, rival):
                yield Check(
                    f"{cell.title}, {cell.prompt_tokens:,} tokens, {cell.reusable_percent:g}% "
                    f"reusable: time to first token at least {wanted:g} times lower than "
                    f"{TREES[rival]}",
                    f"{ratio.median:.1f} times ({ratio.low:.1f}-{ratio.high:.1f})",
                    ratio.median >= wanted,
                )


def _load_checks(loads: Sequence[Load]) -> Iterable[Check]:
    for workload in dict.fromkeys(load.workload for load in loads):
        ratio = load_ratio(loads, workload, float("inf"))
        if ratio is not None:
            title = next(load.title for load in loads if load.workload == workload)
            yield Check(
                f"{title}: requests per second at saturation at least {MIN_LOAD_RATIO:g} times "
                "stock",
                f"{ratio.median:.1f} times ({ratio.low:.1f}-{ratio.high:.1f})",
                ratio.median >= MIN_LOAD_RATIO,
            )


def _of(cell: Cell, server: str, shifted: bool) -> list[Sample]:
    return [s for s in cell.samples if s.server == server and s.shifted == shifted]


def _median_ms(samples: Sequence[Sample]) -> float:
    return median(s.answer.ttft_ms for s in samples)
