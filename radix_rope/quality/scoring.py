"""Scores of answers: is the fact in it, how far are two next-token distributions apart.

Pure functions of texts and log probabilities. May not know the engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

TOP_TOKENS = 20
"""Tokens of the reference's distribution that are compared one by one."""

_SMALLEST = 1e-12


def is_correct(answer: str, gold: str) -> bool:
    """Whether the known answer occurs in the answer, upper and lower case being equal."""
    return gold.casefold() in answer.casefold()


def kl_nats(reference_logprobs: Sequence[float], our_logprobs: Sequence[float]) -> float:
    """KL divergence, in nats, of our next-token distribution from a full prefill's.

    With `p_i` and `q_i` the probabilities that the reference and we give to the reference's top
    tokens at one position, and everything else lumped into one bucket on each side:

        sum_i p_i ln(p_i / q_i) + P ln(P / Q),   P = 1 - sum_i p_i,  Q = 1 - sum_i q_i

    Lumping never raises a divergence, so this is a lower bound of the one over the whole
    vocabulary. P and Q below 1e-12 count as 1e-12: rounding can make them negative.

    Both arguments: natural logarithms for the same tokens in the same order.

    Raises:
        ValueError: the two differ in length or are empty.
    """
    if len(reference_logprobs) != len(our_logprobs) or not reference_logprobs:
        raise ValueError(
            f"cannot compare {len(reference_logprobs)} with {len(our_logprobs)} log probabilities; "
            "give one of each side for every token of the reference's top"
        )
    kl = sum(math.exp(p) * (p - q) for p, q in zip(reference_logprobs, our_logprobs, strict=True))
    rest_reference = max(_SMALLEST, 1.0 - sum(map(math.exp, reference_logprobs)))
    rest_ours = max(_SMALLEST, 1.0 - sum(map(math.exp, our_logprobs)))
    return max(0.0, kl + rest_reference * math.log(rest_reference / rest_ours))


def answer_kl_nats(reference: Sequence[Sequence[float]], ours: Sequence[Sequence[float]]) -> float:
    """Mean of `kl_nats` over the tokens of one known answer."""
    return fmean(kl_nats(p, q) for p, q in zip(reference, ours, strict=True))
