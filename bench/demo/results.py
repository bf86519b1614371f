"""From the records of three engine runs to the rows of the table and the thresholds.

Pure arithmetic on records. May not measure, print or draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from bench.demo.prompts import MOVED, SCENARIOS
from bench.demo.records import Answer, EngineRun, Timing
from radix_rope.quality.scoring import answer_kl_nats, is_correct
from radix_rope.quality.texts import FactSheet

BOUNDED = ("truncated", "report", "timestamp")
"""Scenarios that must reach the speed and the error below; the others are reported as they are."""

MIN_RATIO = 10.0
MAX_MEAN_KL_NATS = 0.05
MAX_LOST_SHARE = 0.05
MIN_ROTATION_FACTOR = 5.0


@dataclass(frozen=True, slots=True)
class Ttft:
    """Times to first token of one scenario on one engine, in ms."""

    median_ms: float
    min_ms: float
    max_ms: float
    all_ms: list[float]


@dataclass(frozen=True, slots=True)
class Row:
    """One scenario of the table.

    Token counts are those of the first repetition; its question and those of the others differ by
    a few tokens. `kl_nats` is the mean over the questions, `unrotated_kl_nats` the same without
    rotation, None where no offset moved. `correct` counts are out of `questions`.
    """

    scenario: str
    title: str
    prompt_tokens: int
    exact_tokens: int
    shifted_tokens: int
    computed_tokens: int
    stock_exact_tokens: int
    stock: Ttft
    ours: Ttft
    ratio: float
    kl_nats: float
    worst_kl_nats: float
    unrotated_kl_nats: float | None
    questions: int
    stock_correct: int
    our_correct: int
    unrotated_correct: int | None
    question: str
    stock_answer: str
    our_answer: str
    unrotated_answer: str | None


@dataclass(frozen=True, slots=True)
class Scored:
    """One question in one scenario; `unrotated_*` are None where no offset moved."""

    scenario: str
    sheet: str
    question: str
    gold: str
    stock_answer: str
    our_answer: str
    unrotated_answer: str | None
    kl_nats: float
    unrotated_kl_nats: float | None

    @property
    def stock_correct(self) -> bool:
        """Whether stock's answer holds the fact."""
        return is_correct(self.stock_answer, self.gold)

    @property
    def our_correct(self) -> bool:
        """Whether our answer holds the fact."""
        return is_correct(self.our_answer, self.gold)

    @property
    def unrotated_correct(self) -> bool:
        """Whether the answer without rotation holds the fact; False where it was not asked."""
        return self.unrotated_answer is not None and is_correct(self.unrotated_answer, self.gold)

    @property
    def lost(self) -> bool:
        """Whether stock answered correctly and we did not."""
        return self.stock_correct and not self.our_correct


@dataclass(frozen=True, slots=True)
class Threshold:
    """Something the demo promises, and whether this run kept it."""

    promise: str
    measured: str
    passed: bool


@dataclass(frozen=True, slots=True)
class Results:
    """Everything the report shows."""

    rows: list[Row]
    questions: list[Scored]
    thresholds: list[Threshold]


def summarise(
    stock: EngineRun, ours: EngineRun, unrotated: EngineRun, sheets: Sequence[FactSheet]
) -> Results:
    """Compare the runs; `stock` and `ours` hold every scenario, `unrotated` those of `MOVED`."""
    by_key = {answer.key: answer for answer in ours.answers}
    unrotated_by_key = {answer.key: answer for answer in unrotated.answers}
    by_name = {sheet.name: sheet for sheet in sheets}
    questions = [
        _score(answer, by_key[answer.key], unrotated_by_key.get(answer.key), by_name)
        for answer in stock.answers
    ]
    rows = [
        _row(
            key,
            [timing for timing in stock.timings if timing.scenario == key],
            [timing for timing in ours.timings if timing.scenario == key],
            [scored for scored in questions if scored.scenario == key],
        )
        for key in SCENARIOS
    ]
    return Results(rows, questions, thresholds(rows, questions))


def thresholds(rows: Sequence[Row], questions: Sequence[Scored]) -> list[Threshold]:
    """Check the promises of the demo."""
    by_key = {row.scenario: row for row in rows}
    checks = [
        Threshold(
            f"{by_key[key].title}: time to first token at least {MIN_RATIO:g} times lower",
            f"{by_key[key].ratio:.1f} times",
            by_key[key].ratio >= MIN_RATIO,
        )
        for key in BOUNDED
    ]
    stock_correct = sum(scored.stock_correct for scored in questions)
    our_correct = sum(scored.our_correct for scored in questions)
    lost = sum(scored.lost for scored in questions)
    checks.append(
        Threshold(
            f"at most {MAX_LOST_SHARE:.0%} fewer correct answers than stock",
            f"{our_correct} against {stock_correct} of {len(questions)}; {lost} lost",
            our_correct >= (1 - MAX_LOST_SHARE) * stock_correct,
        )
    )
    kl = fmean(by_key[key].kl_nats for key in BOUNDED)
    checks.append(
        Threshold(
            f"mean KL at most {MAX_MEAN_KL_NATS:g} nats over {', '.join(BOUNDED)}",
            f"{kl:.4f} nats",
            kl <= MAX_MEAN_KL_NATS,
        )
    )
    moved = [by_key[key] for key in MOVED]
    rotated = fmean(row.kl_nats for row in moved)
    unrotated = fmean(row.unrotated_kl_nats or 0.0 for row in moved)
    checks.append(
        Threshold(
            f"where the offset moved, mean KL at least {MIN_ROTATION_FACTOR:g} times larger "
            "without rotation",
            f"{unrotated:.3f} against {rotated:.3f} nats",
            unrotated >= MIN_ROTATION_FACTOR * rotated,
        )
    )
    return checks


def _score(
    stock: Answer, ours: Answer, unrotated: Answer | None, sheets: dict[str, FactSheet]
) -> Scored:
    scenario, sheet, number = stock.key
    asked = sheets[sheet].questions[number]
    return Scored(
        scenario=scenario,
        sheet=sheet,
        question=asked.question,
        gold=asked.gold,
        stock_answer=_first_line(stock.text),
        our_answer=_first_line(ours.text),
        unrotated_answer=None if unrotated is None else _first_line(unrotated.text),
        kl_nats=_kl(stock, ours),
        unrotated_kl_nats=None if unrotated is None else _kl(stock, unrotated),
    )


def _kl(stock: Answer, other: Answer) -> float:
    if other.token_ids != stock.token_ids:
        raise ValueError(f"the runs have log probabilities of other tokens at {stock.key}")
    return answer_kl_nats(stock.logprobs, other.logprobs)


def _row(
    key: str,
    stock_timings: Sequence[Timing],
    our_timings: Sequence[Timing],
    questions: Sequence[Scored],
) -> Row:
    stock, ours = _ttft(stock_timings), _ttft(our_timings)
    first = our_timings[0]
    example = questions[0]
    unrotated = [q.unrotated_kl_nats for q in questions if q.unrotated_kl_nats is not None]
    return Row(
        scenario=key,
        title=SCENARIOS[key],
        prompt_tokens=first.prompt_tokens,
        exact_tokens=first.exact_tokens,
        shifted_tokens=first.shifted_tokens,
        computed_tokens=first.computed_tokens,
        stock_exact_tokens=stock_timings[0].exact_tokens,
        stock=stock,
        ours=ours,
        ratio=stock.median_ms / ours.median_ms,
        kl_nats=fmean(scored.kl_nats for scored in questions),
        worst_kl_nats=max(scored.kl_nats for scored in questions),
        unrotated_kl_nats=fmean(unrotated) if unrotated else None,
        questions=len(questions),
        stock_correct=sum(scored.stock_correct for scored in questions),
        our_correct=sum(scored.our_correct for scored in questions),
        unrotated_correct=sum(q.unrotated_correct for q in questions) if unrotated else None,
        question=example.question,
        stock_answer=example.stock_answer,
        our_answer=example.our_answer,
        unrotated_answer=example.unrotated_answer,
    )


def _ttft(timings: Sequence[Timing]) -> Ttft:
    times = [timing.ttft_ms for timing in timings]
    return Ttft(median(times), min(times), max(times), times)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
