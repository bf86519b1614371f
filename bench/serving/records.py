"""What a run measured, as plain data that becomes the JSON file."""

from __future__ import annotations

from dataclasses import dataclass

BASELINE = "stock"
"""Name of stock SGLang with its default tree, which ratios are taken to."""
OURS = "radix_rope"
"""Name of the server that runs radix_rope."""
EXACT_ONLY = "RadixCache"
"""Name of stock SGLang with the tree radix_rope is derived from."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's times and where its prompt came from.

    Attributes:
        exact_tokens, shifted_tokens: None where the server does not report them.
        recomputed_tokens: prompt tokens that a second pass (repair `attention`) computed once more.
    """

    ttft_ms: float
    prompt_tokens: int
    exact_tokens: int | None
    shifted_tokens: int | None
    recomputed_tokens: int = 0

    @property
    def computed_tokens(self) -> int | None:
        """Prompt tokens that went through the model, those of a second pass once more."""
        if self.exact_tokens is None or self.shifted_tokens is None:
            return None
        once = self.prompt_tokens - self.exact_tokens - self.shifted_tokens
        return once + self.recomputed_tokens


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed request.

    Attributes:
        server: who answered.
        shifted: whether it is of the shifted workload, or its unshifted control.
        request, repeat: which; samples of different servers with equal numbers are the same prompt.
        expected_computed_tokens: what radix_rope's planner computes of it.
        answer: times and counts.
    """

    server: str
    shifted: bool
    request: int
    repeat: int
    expected_computed_tokens: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload at one size, one request at a time."""

    workload: str
    title: str
    prompt_tokens: int
    reusable_percent: float
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """One burst of one workload at one size and rate on one server.

    burst: which; bursts of different servers with equal numbers are the same requests.
    metrics: SGLang's `BenchmarkMetrics` of the burst.
    """

    workload: str
    title: str
    prompt_tokens: int
    reusable_percent: float
    rate: float
    burst: int
    server: str
    metrics: dict[str, float]
    answers: tuple[Answer, ...]
