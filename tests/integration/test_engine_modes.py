"""Per-request options on the real engine: exact stays exact, and bad ones are refused alone."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from tests.integration.engines import EngineUnderTest, exact, shifted

pytestmark = pytest.mark.engine

Documents = list[list[int]]


@pytest.fixture
def ours(engines: Callable[[str], EngineUnderTest]) -> EngineUnderTest:
    engine = engines("shifted")
    engine.flush()
    engine.probe("set_plan_options", recompute_all=False, min_run_tokens=64, recompute_tokens=16)
    return engine


@pytest.fixture
def stock(engines: Callable[[str], EngineUnderTest]) -> EngineUnderTest:
    engine = engines("stock")
    engine.flush()
    return engine


def asking(**options: Any) -> dict[str, Any]:
    return {"custom_params": {"radix_rope": options}}


def logprobs(result: dict[str, Any]) -> list[tuple[float, int]]:
    return [entry[:2] for entry in result["meta_info"]["output_token_logprobs"]]


def test_exact_requests_neither_move_kv_nor_read_approximate_kv(
    ours: EngineUnderTest, stock: EngineUnderTest, documents: Documents
) -> None:
    head, tail = documents[1][:20], documents[2][:20]
    prompt = head + documents[0] + tail
    ours.one(documents[0])
    assert shifted(ours.one(prompt, sampling=asking(mode="shifted"))) == 300 - 16
    mine = ours.one(prompt, 6, return_logprob=True, sampling=asking(mode="exact"))
    # The head and what was computed before the run is exact and may be a prefix hit.
    assert (exact(mine), shifted(mine)) == (20 + 16, 0)
    # Stock with the same cached prefix gives the same bits.
    stock.one(prompt[: 20 + 16])
    theirs = stock.one(prompt, 6, return_logprob=True)
    assert theirs["meta_info"]["cached_tokens"] == 20 + 16
    assert logprobs(mine) == logprobs(theirs)
    ours.assert_nothing_lost()


def test_an_exact_request_heals_what_it_computes(
    ours: EngineUnderTest, documents: Documents
) -> None:
    prompt = documents[1][:20] + documents[0] + documents[2][:20]
    ours.one(documents[0])
    ours.one(prompt)
    before = ours.probe("cached_kv", tokens=prompt)
    assert [p.exact for _, _, p in before["nodes"]].count(False) >= 2
    ours.one(prompt, sampling=asking(mode="exact"))
    after = ours.probe("cached_kv", tokens=prompt)
    assert all(provenance.exact for _, _, provenance in after["nodes"])
    assert np.abs(before["k"][-1] - after["k"][-1]).max() > 1e-3
    # What is exact now is a full prefix hit, and reported as such.
    again = ours.one(prompt, sampling=asking(mode="exact"))
    assert (exact(again), shifted(again)) == (len(prompt) - 1, 0)
    ours.assert_nothing_lost()


def test_a_request_sets_its_own_plan_options(ours: EngineUnderTest, documents: Documents) -> None:
    ours.one(documents[0])

    def reused(index: int, **options: Any) -> int:
        prompt = documents[index][:20] + documents[0] + documents[index][20:40]
        return shifted(ours.one(prompt, sampling=asking(**options)))

    assert reused(3, recompute_tokens=40) == 260
    assert reused(4, min_run_tokens=301) == 0
    assert reused(5, mode="shifted") == 284


def test_generations_are_counted_on_the_nodes_and_bounded(
    ours: EngineUnderTest, documents: Documents
) -> None:
    limit = 3  # the first that may not be, with donors of at most one generation
    ours.probe("set_plan_options", max_generations=limit - 2)
    try:
        ours.one(documents[0])
        previous = documents[0]
        reused = []
        for generation in range(1, limit + 1):
            prompt = documents[generation][:20] + documents[0] + documents[generation][20:40]
            reused.append(shifted(ours.one(prompt)) > 0)
            nodes = [p for _, _, p in ours.probe("cached_kv", tokens=prompt)["nodes"]]
            expected = {generation} if generation < limit else set()
            assert {p.generations for p in nodes if not p.exact} == expected
            # Only the copy is left to copy from.
            ours.probe("forget", tokens=previous)
            previous = prompt
        assert reused == [True] * (limit - 1) + [False]
    finally:
        ours.probe("set_plan_options", max_generations=8)
    ours.assert_nothing_lost()


def test_both_modes_in_one_batch(ours: EngineUnderTest, documents: Documents) -> None:
    ours.one(documents[0])
    prompts = [documents[6 + i][:20] + documents[0] for i in range(4)]
    modes = ["exact", "shifted", "exact", "shifted"]
    results = ours.generate(prompts, 4, sampling=[asking(mode=mode) for mode in modes])
    assert [shifted(r) > 0 for r in results] == [False, True, False, True]
    ours.assert_nothing_lost()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "wrong"}, "one of shifted, exact"),
        ({"recompute": 3}, "no option 'recompute'"),
        ({"recompute_tokens": -5}, "integer from 0"),
    ],
)
def test_a_wrong_option_is_told_to_its_client_alone(
    ours: EngineUnderTest, documents: Documents, options: dict[str, Any], said: str
) -> None:
    def send(prompt: list[int], sampling: dict[str, Any]) -> Any:
        request = GenerateReqInput(
            input_ids=prompt, sampling_params={"max_new_tokens": 4, "ignore_eos": True, **sampling}
        )
        return anext(ours.engine.tokenizer_manager.generate_request(request, None))

    async def both() -> list[Any]:
        return await asyncio.gather(
            send(documents[7], asking(**options)),
            send(documents[8], asking(mode="exact")),
            return_exceptions=True,
        )

    refused, served = ours.engine.loop.run_until_complete(both())
    # SGLang's word for what its HTTP servers answer with status 400.
    assert isinstance(refused, ValueError) and said in str(refused)
    assert served["meta_info"]["finish_reason"]["type"] == "length"
    ours.assert_nothing_lost()
