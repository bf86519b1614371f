"""The prompts of the soak: exact ones and chats with known answers, and makers of all the others.

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
CHAT_TURNS = 8

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


@dataclass(frozen=True)
class Turn:
    """A turn of a chat: all of its prompt, and its answer, where no near-tie decides it."""

    prompt: tuple[int, ...]
    known: Known | None


def known_answers(stock: EngineUnderTest, prompts: list[Tokens]) -> list[Known]:
    """What stock SGLang answers, for the prompts where no near-tie decides it."""
    known = []
    for begin in range(0, len(prompts), 8):
        part = prompts[begin : begin + 8]
        stock.flush()
        known += [answer for _, answer in _ask(stock, part) if answer is not None]
    return known


def chats_of(
    stock: EngineUnderTest, documents: list[Tokens], size: int, seed: int
) -> list[list[Turn]]:
    """Conversations with stock SGLang: each prompt is the one before, its answer, and some more."""
    rng = np.random.default_rng((seed, 1))
    stock.flush()
    chats: list[list[Turn]] = [[] for _ in range(size)]
    prompts: list[Tokens] = [[] for _ in range(size)]
    for _ in range(CHAT_TURNS):
        for number, prompt in enumerate(prompts):
            own = documents[SHARED + number % (len(documents) - SHARED)]
            begin = int(rng.integers(0, 210))
            prompts[number] = [*prompt, *own[begin : begin + int(rng.integers(30, 90))]]
        answers = _ask(stock, prompts)
        for number, (tokens, known) in enumerate(answers):
            chats[number].append(Turn(tuple(prompts[number]), known))
            prompts[number] = [*prompts[number], *tokens]
    return chats


def _ask(stock: EngineUnderTest, prompts: list[Tokens]) -> list[tuple[Tokens, Known | None]]:
    """The answers, and which of them no near-tie decides."""
    answers = stock.generate(prompts, ANSWER_TOKENS, return_logprob=True, top_logprobs_num=2)
    found: list[tuple[Tokens, Known | None]] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens, tops = list(answer["output_ids"]), answer["meta_info"]["output_top_logprobs"]
        certain = min(first[0] - second[0] for first, second in tops) > MARGIN
        found.append((tokens, Known(tuple(prompt), tuple(tokens)) if certain else None))
    return found


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
