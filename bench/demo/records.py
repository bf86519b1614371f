"""What one engine run measures, as plain records; they cross process borders and go into the JSON.

May not know how they are measured nor what is concluded from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.demo.calibration import Calibration
from bench.demo.prompts import Asked, Scenario

QuestionKey = tuple[str, str, int]
"""Scenario key, sheet name, number of the question."""


@dataclass(frozen=True, slots=True)
class Job:
    """One engine to start and what to measure on it.

    Attributes:
        engine_options: for `sglang.Engine`.
        config: options of radix_rope as JSON; empty for stock.
        sheets: per sheet name its scenarios and its questions.
        repetitions: how often every scenario is timed; 0 measures answers alone, once a sheet.
        calibrations: cold prefills and prefix hits timed before everything else.
        rival: stop after calibration unless it is faster than this.
        support: token ids whose log probability is wanted, per gold token; empty asks for the
            top tokens of this engine instead.
        answer_tokens: length of the answers.
    """

    engine_options: dict[str, object]
    config: str
    sheets: dict[str, tuple[tuple[Scenario, ...], tuple[Asked, ...]]]
    repetitions: int
    calibrations: int = 0
    rival: Calibration | None = None
    support: dict[QuestionKey, list[list[int]]] = field(default_factory=dict)
    answer_tokens: int = 12


@dataclass(frozen=True, slots=True)
class Timing:
    """One timed request: how much of the prompt came from the cache, and the time to first token.

    `computed_tokens` is what is left of the prompt after exact and shifted hits.
    """

    scenario: str
    sheet: str
    prompt_tokens: int
    exact_tokens: int
    shifted_tokens: int
    ttft_ms: float

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that went through the model."""
        return self.prompt_tokens - self.exact_tokens - self.shifted_tokens


@dataclass(frozen=True, slots=True)
class Answer:
    """One scored question: the greedy answer, and log probabilities at the gold tokens.

    Attributes:
        key: which question.
        text: the greedy answer after the lead-in.
        token_ids: per gold token, the tokens whose log probabilities are in `logprobs`.
        logprobs: natural logarithms, in the order of `token_ids`.
        reused_tokens: prompt tokens from the cache, exact and shifted, when it was answered.
    """

    key: QuestionKey
    text: str
    token_ids: list[list[int]]
    logprobs: list[list[float]]
    reused_tokens: int


@dataclass(frozen=True, slots=True)
class EngineRun:
    """Everything one engine measured; `timings` and `answers` are empty when it only calibrated."""

    calibrations: list[Calibration]
    timings: list[Timing]
    answers: list[Answer]
