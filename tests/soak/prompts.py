"""The prompts of the soak: exact ones with known answers, and makers of all the others.

May not know engines beyond asking stock SGLang for the answers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.integration.engines import EngineUnderTest

Tokens = list[int]

# Between the first and second choice, nats. Other batches and other splits change a logit by
# less than 1e-3 in float32, so an answer with this margin is the same in all of them.
MARGIN = 0.2
ANSWER_TOKENS = 4

# So many of the documents are shared, as many as a small pool can hold for a while.
SHARED = 4


@dataclass(frozen=True)
class Known:
    """A prompt and the tokens a plain prefill answers it with."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def pool_of(documents: list[Tokens], size: int, seed: int) -> list[Tokens]:
    """Prompts to ask exactly: documents from their start, at an offset, and pieces of several."""
    rng = np.random.default_rng(seed)
    prompts = []
    for i in range(size):
        one, two = (documents[int(k)] for k in rng.integers(0, SHARED, 2))
        own = documents[SHARED + i % (len(documents) - SHARED)]
        begin, cut = int(rng.integers(0, 200)), int(rng.integers(80, 300))
        head = own[begin : begin + 5 + i % 40]
        prompts.append(
            [
                one[:cut] + head,
                head + one[: cut // 2] + two[begin:],
                head + own[::-1][: cut // 2] + head,
            ][i % 3]
        )
    return prompts


def known_answers(stock: EngineUnderTest, prompts: list[Tokens]) -> list[Known]:
    """What stock SGLang answers, for the prompts where no near-tie decides it."""
    known = []
    for begin in range(0, len(prompts), 8):
        part = prompts[begin : begin + 8]
        stock.flush()
        answers = stock.generate(part, ANSWER_TOKENS, return_logprob=True, top_logprobs_num=2)
        for prompt, answer in zip(part, answers, strict=True):
            tops = answer["meta_info"]["output_top_logprobs"]
            if min(first[0] - second[0] for first, second in tops) > MARGIN:
                known.append(Known(tuple(prompt), tuple(answer["output_ids"])))
    return known


def mixed(documents: list[Tokens], rng: np.random.Generator) -> Tokens:
    """Pieces of shared documents at random offsets, behind a head of their own."""
    own = documents[SHARED + int(rng.integers(len(documents) - SHARED))]
    prompt = own[: int(rng.integers(1, 50))]
    for _ in range(int(rng.integers(1, 3))):
        document, begin = documents[int(rng.integers(SHARED))], int(rng.integers(0, 180))
        prompt = prompt + document[begin : begin + int(rng.integers(70, 220))]
    return prompt


def unique(rng: np.random.Generator) -> Tokens:
    """A prompt that shares nothing with any other."""
    return [int(token) for token in rng.integers(100, 40000, int(rng.integers(20, 250)))]
