"""The promise of mode `exact`, on real engines: bit for bit what stock SGLang gives.

Random requests of both modes, sent together and partly aborted, on an engine that evicts, cuts
prompts into chunks, has pages and retracts. Stock SGLang is given the exact ones alone, in the same
order.
The arithmetic of both is made independent of batch and prefix (`compute_row_by_row`), so that
only the KV that a request reads can make a difference.
"""

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from tests.integration.engines import EngineUnderTest, shifted

pytestmark = [pytest.mark.engine, pytest.mark.long]


@dataclass(frozen=True)
class Sent:
    """One request of a random mix."""

    rid: str
    prompt: list[int]
    exact: bool
    aborted: bool
    new_tokens: int = 3


@pytest.fixture(scope="module")
def pair(
    engines: Callable[[str], EngineUnderTest],
) -> Iterator[tuple[EngineUnderTest, EngineUnderTest]]:
    ours, stock = engines("chunked"), engines("stock")
    for engine in (ours, stock):
        engine.flush()
        engine.probe("compute_row_by_row", on=True)
    yield ours, stock
    for engine in (ours, stock):
        engine.probe("compute_row_by_row", on=False)
        engine.flush()


def random_mix(
    documents: list[list[int]], seed: int, requests: int, new_tokens: int = 3
) -> list[Sent]:
    """Prompts made of few blocks, so that prefixes, moved runs and repeats all occur."""
    choose = random.Random(seed)
    blocks = [document[:100] for document in documents[:5]]
    heads = [document[100 : 100 + 7 * i] for i, document in enumerate(documents[:4])]
    mix: list[Sent] = []
    for number in range(requests):
        if mix and choose.random() < 0.15:
            prompt = list(choose.choice(mix).prompt)
        else:
            some = choose.sample(blocks, choose.randint(1, 3))
            prompt = [*choose.choice(heads), *(token for block in some for token in block)]
        prompt = prompt + documents[6 + number % 8][: choose.choice([0, 3, 40])]
        exact = choose.random() < 0.6
        aborted = choose.random() < (0.15 if exact else 0.3)
        more = 40 if aborted else new_tokens
        mix.append(Sent(f"{seed}-{number}", prompt, exact, aborted, more))
    return mix


def send(engine: EngineUnderTest, mix: list[Sent], together: int) -> dict[str, Any]:
    """Send in groups; an aborted request ends somewhere between the queue and its last token."""

    async def one(sent: Sent) -> tuple[str, Any]:
        mode = {"radix_rope": {"mode": "exact" if sent.exact else "shifted"}}
        request = GenerateReqInput(
            rid=sent.rid,
            input_ids=sent.prompt,
            sampling_params={
                "temperature": 0,
                "max_new_tokens": sent.new_tokens,
                "ignore_eos": True,
                "custom_params": mode,
            },
            return_logprob=True,
        )
        return sent.rid, await anext(
            engine.engine.tokenizer_manager.generate_request(request, None)
        )

    async def group(some: list[Sent]) -> list[Any]:
        tasks = [asyncio.ensure_future(one(sent)) for sent in some]
        for position, sent in enumerate(some):
            if sent.aborted:
                await asyncio.sleep(0.05 * position)
                engine.engine.tokenizer_manager.abort_request(sent.rid)
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    results: list[Any] = []
    for first in range(0, len(mix), together):
        results += engine.engine.loop.run_until_complete(group(mix[first : first + together]))
    answered = dict(result for result in results if not isinstance(result, BaseException))
    return {
        rid: result
        for rid, result in answered.items()
        if result["meta_info"]["finish_reason"]["type"] != "abort"
    }


def test_exact_requests_equal_stock_given_only_them(
    pair: tuple[EngineUnderTest, EngineUnderTest], documents: list[list[int]]
) -> None:
    ours, stock = pair
    calm = [sent for seed in (1, 2) for sent in random_mix(documents, seed, 18)]
    # Longer answers, so that requests are retracted while they decode.
    retracting = random_mix(documents, 3, 18, new_tokens=16)
    mine = send(ours, calm, together=6)
    ours.probe("set_test_retract", on=True)
    try:
        mine |= send(ours, retracting, together=6)
    finally:
        ours.probe("set_test_retract", on=False)
    mix = calm + retracting
    exact = [sent for sent in mix if sent.exact and not sent.aborted]
    assert len(exact) < sum(sent.exact for sent in mix), "no exact request was aborted"
    theirs = send(stock, exact, together=1)
    # Much was reused, and more was computed than the pool can hold.
    assert sum(shifted(result) for result in mine.values()) > 1000
    computed = sum(
        len(sent.prompt) - mine[sent.rid]["meta_info"]["cached_tokens"]
        for sent in mix
        if sent.rid in mine
    )
    assert computed > ours.probe("accounting")["total"]
    retractions = {sent.rid: mine[sent.rid]["meta_info"]["num_retractions"] for sent in exact}
    assert sum(retractions.values()) > 0, "no exact request was retracted"
    for sent in exact:
        a, b = mine[sent.rid]["meta_info"], theirs[sent.rid]["meta_info"]
        assert len(a["output_token_logprobs"]) == sent.new_tokens
        assert a["output_token_logprobs"] == b["output_token_logprobs"], sent.rid
        assert shifted(mine[sent.rid]) == 0
    print(f"retractions of exact requests: {sum(retractions.values())}")
    ours.assert_nothing_lost()
