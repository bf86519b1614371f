"""Shifted reuse under chunks, pages, mixed batches, small pools and aborts."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from tests.integration.engines import EngineUnderTest, shifted

pytestmark = pytest.mark.engine

Documents = list[list[int]]


@pytest.fixture
def ours(engines: Callable[[str], EngineUnderTest]) -> EngineUnderTest:
    engine = engines("chunked")
    engine.flush()
    engine.probe("set_plan_options", recompute_all=False, recompute_tokens=16)
    return engine


def test_run_across_a_chunk_boundary(ours: EngineUnderTest, documents: Documents) -> None:
    ours.probe("set_plan_options", recompute_tokens=12)
    # 18 whole pages of it are cached.
    ours.one(documents[0])
    ours.probe("watch_prefills")
    prompt = documents[2][:242] + documents[0] + documents[3][:100]
    moved = ours.one(prompt, 6)
    # 242 tokens and the run's head make 254 of 256. Two more are behind the run, which ends at
    # 530, but a chunk ends with a page, at 528, and its last token is computed.
    run = 527 - 254
    assert ours.probe("prefills") == [[(642, 0, 528, run)], [(642, 528, 642, 0)]]
    assert shifted(moved) == run
    copied = [
        (begin, end)
        for begin, end, provenance in ours.probe("cached_kv", tokens=prompt)["nodes"]
        if provenance.copied
    ]
    # A page is called copied where any of it is.
    assert copied[0][0] == 240 and copied[-1][1] == 528
    ours.assert_nothing_lost()


def test_rows_pages_chunks_and_mixed_batches_keep_the_logits(
    ours: EngineUnderTest, engines: Callable[[str], EngineUnderTest], documents: Documents
) -> None:
    ours.probe("set_plan_options", recompute_all=True, recompute_tokens=0)
    stock = engines("stock")
    stock.flush()
    prompts = [
        documents[5 + i][: 20 + 7 * i]
        + documents[i % 3]
        + documents[9][:30]
        + documents[(i + 1) % 3]
        for i in range(4)
    ]
    for engine in (ours, stock):
        engine.generate([documents[0], documents[1], documents[2]])
    theirs = [stock.one(p, 8, return_logprob=True) for p in prompts]
    mine = [ours.one(p, 8, return_logprob=True) for p in prompts]
    for a, b in zip(mine, theirs, strict=True):
        assert a["output_ids"] == b["output_ids"]
        np.testing.assert_allclose(
            [e[0] for e in a["meta_info"]["output_token_logprobs"]],
            [e[0] for e in b["meta_info"]["output_token_logprobs"]],
            rtol=0,
            atol=3e-4,
        )
    # Together: decoding requests ride along in the others' prefill.
    ours.flush()
    ours.generate([documents[0], documents[1], documents[2]])
    together = ours.generate(prompts, 8)
    assert [r["output_ids"] for r in together] == [r["output_ids"] for r in theirs]


def test_pool_too_small_for_all_donors_loses_no_slot(
    ours: EngineUnderTest, documents: Documents
) -> None:
    # 4,096 slots; 24 requests of about 640 tokens each over 6 shared documents.
    rng = np.random.default_rng(7)
    prompts = []
    for i in range(24):
        a, b = rng.integers(0, 6, size=2)
        prompts.append(
            documents[10 + i % 8][: int(rng.integers(5, 60))] + documents[a] + documents[b]
        )
    results = ours.generate(prompts, 12)
    assert all(len(r["output_ids"]) == 12 for r in results)
    assert sum(shifted(r) for r in results) > 1000
    ours.assert_nothing_lost()


def test_retracted_requests_come_back_and_lose_nothing(
    ours: EngineUnderTest, documents: Documents
) -> None:
    ours.generate([documents[0], documents[1]])
    prompts = [
        documents[12 + i][: 9 + 5 * i] + documents[i % 2] + documents[2 + i][:70] for i in range(6)
    ]
    ours.probe("set_test_retract", on=True)
    try:
        results = ours.generate(prompts, 24)
    finally:
        ours.probe("set_test_retract", on=False)
    assert sum(r["meta_info"]["num_retractions"] for r in results) > 0
    for result, prompt in zip(results, prompts, strict=True):
        assert len(result["output_ids"]) == 24
        # Counted once, at the first admission: never more than the prompt.
        assert 200 < shifted(result) < len(prompt)
    ours.assert_nothing_lost()


def test_aborted_requests_release_their_donors(ours: EngineUnderTest, documents: Documents) -> None:
    ours.generate([documents[0], documents[1]])
    engine = ours.engine

    async def load() -> None:
        async def one(i: int) -> None:
            prompt = documents[12 + i % 5][: 10 + i] + documents[i % 2] + documents[3][:50]
            stream = await engine.async_generate(
                input_ids=prompt,
                sampling_params={"temperature": 0, "max_new_tokens": 200, "ignore_eos": True},
                stream=True,
                rid=f"abort-{i}",
            )
            async for _ in stream:
                engine.tokenizer_manager.abort_request(rid=f"abort-{i}")

        await asyncio.wait_for(asyncio.gather(*(one(i) for i in range(8))), timeout=120)

    engine.loop.run_until_complete(load())
    after = ours.one(documents[0] + documents[4][:30])
    assert len(after["output_ids"]) == 4
    ours.assert_nothing_lost()


def test_bfloat16_pool(engines: Callable[[str], EngineUnderTest], documents: Documents) -> None:
    engine = engines("bf16")
    engine.flush()
    prompt = documents[1][:37] + documents[0]
    engine.one(documents[0])
    assert shifted(engine.one(prompt)) > 0
    moved = engine.probe("cached_kv", tokens=prompt)
    engine.flush()
    engine.one(prompt)
    computed = engine.probe("cached_kv", tokens=prompt)
    for begin, end, provenance in moved["nodes"]:
        if provenance.copied:
            k, expected = moved["k"][0, begin:end], computed["k"][0, begin:end]
            # Both sides were rounded to bf16 (2^-9 relative) after RoPE, ours twice.
            scale = np.abs(expected).max()
            assert np.abs(k - expected).max() <= scale * 2**-7
            np.testing.assert_array_equal(moved["v"][0, begin:end], computed["v"][0, begin:end])
    engine.assert_nothing_lost()
