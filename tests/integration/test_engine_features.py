"""SGLang's features beside shifted reuse, on one engine with several of them switched on.

docs/support.md names these tests. The model is tiny and random: what is compared is
always this engine with itself, with and without something to reuse.
"""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.engines import EngineUnderTest, exact, shifted

pytestmark = pytest.mark.engine

Documents = list[list[int]]


@pytest.fixture
def ours(engines: Callable[[str], EngineUnderTest]) -> EngineUnderTest:
    engine = engines("features")
    engine.flush()
    engine.probe("set_plan_options", recompute_all=False, recompute_tokens=8)
    return engine


def moved_prompt(documents: Documents, i: int = 0) -> list[int]:
    """200 tokens of document 0 behind a head, and a question of 20."""
    return documents[5 + i][: 20 + i] + documents[0][:200] + documents[6 + i][:20]


REUSED = 200 - 8


async def stream(
    engine: EngineUnderTest,
    prompt: list[int],
    new_tokens: int,
    on_chunk: Callable[[int], None] = lambda _: None,
    **args: Any,
) -> dict[str, Any]:
    """Stream one greedy completion; `on_chunk` is called with the number of chunks so far."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    request = GenerateReqInput(input_ids=prompt, sampling_params=sampling, stream=True, **args)
    chunks: list[dict[str, Any]] = []
    async for chunk in engine.engine.tokenizer_manager.generate_request(request, None):
        chunks.append(chunk)
        on_chunk(len(chunks))
    return {**chunks[-1], "chunks": len(chunks)}


def together(engine: EngineUnderTest, *work: Any) -> list[Any]:
    async def wait() -> list[Any]:
        return list(await asyncio.wait_for(asyncio.gather(*work), timeout=120))

    result: list[Any] = engine.engine.loop.run_until_complete(wait())
    return result


def test_streaming(ours: EngineUnderTest, documents: Documents) -> None:
    prompt = moved_prompt(documents)
    ours.one(documents[0][:200])
    (streamed,) = together(ours, stream(ours, prompt, 12))
    assert shifted(streamed) == REUSED
    assert streamed["chunks"] > 3
    ours.flush()
    ours.one(documents[0][:200])
    whole = ours.one(prompt, 12)
    assert streamed["output_ids"] == whole["output_ids"]
    assert shifted(whole) == REUSED


def test_abort_at_each_stage(ours: EngineUnderTest, documents: Documents) -> None:
    ours.one(documents[0])
    stages = ["queued", "between chunks", "decoding"] * 3
    # A run of 300 tokens and behind it 450 of its own: two chunks.
    prompts = [
        documents[2 + i][: 10 + i] + documents[0] + documents[12 + i // 2][150 * (i % 2) :][:150]
        + documents[2 + i][:300]
        for i in range(len(stages))
    ]  # fmt: skip
    wanted = {f"stage-{i}": stage for i, stage in enumerate(stages)}
    ours.probe("abort_at", stages=wanted)
    try:
        *results, other = together(
            ours,
            *(
                stream(ours, prompt, 200, rid=rid)
                for rid, prompt in zip(wanted, prompts, strict=True)
            ),
            stream(ours, moved_prompt(documents, 2), 30, rid="not aborted"),
        )
    finally:
        seen = ours.probe("aborted")
    assert {rid: stage for rid, (stage, *_) in seen.items()} == wanted
    for (rid, stage), prompt, result in zip(wanted.items(), prompts, results, strict=True):
        _, prefilled, given = seen[rid]
        assert result["meta_info"]["finish_reason"]["type"] == "abort"
        if stage == "queued":
            assert prefilled == given == len(result["output_ids"]) == 0
        elif stage == "between chunks":
            assert 300 < prefilled < len(prompt)
            assert given == len(result["output_ids"]) == 0
        else:
            # A step may be on its way when the abort comes.
            assert 0 < given <= len(result["output_ids"]) <= given + 2
            assert shifted(result) == 300 - 8
    # Who was not aborted is not touched.
    assert len(other["output_ids"]) == 30 and shifted(other) == REUSED
    after = ours.one(moved_prompt(documents))
    assert shifted(after) == REUSED
    ours.assert_nothing_lost()


@pytest.mark.parametrize("kept", [True, False])
def test_priorities_and_preemption(ours: EngineUnderTest, documents: Documents, kept: bool) -> None:
    """Where what a preempted request had computed stays cached, and where it is evicted."""
    ours.one(documents[0][:200])
    ours.probe("watch_prefills")
    if not kept:
        ours.probe("forget_retracted")
    ended: list[str] = []

    async def load() -> list[dict[str, Any]]:
        async def low(i: int, started: asyncio.Event) -> dict[str, Any]:
            result = await stream(
                ours, moved_prompt(documents, i), 100, lambda _: started.set(), priority=0
            )
            ended.append("low")
            return result

        tasks = []
        for i in range(8):
            started = asyncio.Event()
            tasks.append(asyncio.create_task(low(i, started)))
            await started.wait()
        # All places are taken, so this one takes a lower one's.
        high = await stream(ours, moved_prompt(documents, 9), 4, priority=100)
        ended.append("high")
        return [high, *(await asyncio.gather(*tasks))]

    try:
        (results,) = together(ours, load())
    finally:
        if not kept:
            ours.probe("stop_forgetting")
    _, *low = results
    assert "high" in ended[:-1]
    assert sum(r["meta_info"]["num_retractions"] for r in low) > 0
    prefills = [prefill for batch in ours.probe("prefills") for prefill in batch]
    for result in results:
        # Counted at the first admission.
        assert shifted(result) == REUSED
        length = result["meta_info"]["prompt_tokens"]
        first, *again = [prefill for prefill in prefills if prefill[0] == length]
        assert first == (length, 0, length, REUSED)
        assert len(again) == result["meta_info"]["num_retractions"]
        for _, begin, end, reused in again:
            # It comes back with what it had answered, either behind its own KV or by a new plan.
            assert end > length
            assert (begin >= length and reused == 0) if kept else (begin, reused) == (0, REUSED)
    assert all(len(r["output_ids"]) == 100 for r in low)
    ours.assert_nothing_lost()


def test_hidden_states_are_all_computed(ours: EngineUnderTest, documents: Documents) -> None:
    prompt = moved_prompt(documents)
    cold = ours.one(prompt, 3, return_hidden_states=True)
    ours.flush()
    ours.one(documents[0][:200])
    result = ours.one(prompt, 3, return_hidden_states=True)
    assert shifted(result) == exact(result) == 0
    states = result["meta_info"]["hidden_states"]
    assert len(states[0]) == len(prompt)
    for mine, theirs in zip(states, cold["meta_info"]["hidden_states"], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    # The same prompt without them is reused.
    ours.flush()
    ours.one(documents[0][:200])
    assert shifted(ours.one(prompt, 3)) == REUSED


@pytest.mark.parametrize(
    ("constraint", "form"),
    [
        ({"regex": "[0-9]{3}-[a-f]{2}"}, re.compile("[0-9]{3}-[a-f]{2}")),
        (
            {
                "json_schema": json.dumps(
                    {
                        "type": "object",
                        "properties": {"answer": {"enum": ["yes", "no"]}},
                        "required": ["answer"],
                    }
                )
            },
            re.compile(r'\{\s*"answer"\s*:\s*"(yes|no)"\s*\}'),
        ),
    ],
)
def test_grammar_constrained_output(
    ours: EngineUnderTest, documents: Documents, constraint: dict[str, str], form: re.Pattern[str]
) -> None:
    prompt = moved_prompt(documents)
    sampling = {**constraint, "ignore_eos": False}
    cold = ours.one(prompt, 40, sampling=sampling)
    assert form.fullmatch(cold["text"].strip())
    # Rows alone change nothing ...
    ours.flush()
    ours.one(documents[0][:200])
    ours.probe("set_plan_options", recompute_all=True)
    assert ours.one(prompt, 40, sampling=sampling)["text"] == cold["text"]
    # ... and neither does reuse for what the grammar allows.
    ours.probe("set_plan_options", recompute_all=False)
    ours.flush()
    ours.one(documents[0][:200])
    moved = ours.one(prompt, 40, sampling=sampling)
    assert shifted(moved) == REUSED
    assert form.fullmatch(moved["text"].strip())


def test_parallel_sampling(ours: EngineUnderTest, documents: Documents) -> None:
    prompt = moved_prompt(documents)
    ours.one(documents[0][:200])
    results = ours.generate([prompt], 6, sampling={"n": 3})
    assert len(results) == 3
    # SGLang prefills the prompt once; its copies take that as a prefix.
    assert len({tuple(r["output_ids"]) for r in results}) == 1
    for result in results:
        assert result["meta_info"]["cached_tokens"] == exact(result) + shifted(result)
        assert exact(result) <= 20 + 8
        assert shifted(result) >= REUSED
    ours.assert_nothing_lost()


def test_beam_search_is_exact(ours: EngineUnderTest, documents: Documents) -> None:
    prompt = moved_prompt(documents)
    beams = {"beam_width": 2, "n": 2}
    cold = ours.generate([prompt], 5, sampling=beams)
    ours.flush()
    ours.one(documents[0][:200])
    warm = ours.generate([prompt], 5, sampling=beams)
    assert [r["output_ids"] for r in warm] == [r["output_ids"] for r in cold]
    assert all(shifted(r) == 0 for r in warm)
    ours.assert_nothing_lost()


def test_token_logprobs_and_scores(ours: EngineUnderTest, documents: Documents) -> None:
    query, items = documents[5][:20] + documents[0][:200], [documents[6][:20], documents[7][:9]]
    labels = [11, 222, 3333]

    def score() -> Any:
        ours.flush()
        ours.one(documents[0][:200])
        scores = ours.engine.score(query, items, labels, apply_softmax=True).scores
        paths = [ours.probe("cached_kv", tokens=query + item)["nodes"] for item in items]
        return np.array(scores), any(p.copied for path in paths for _, _, p in path)

    ours.probe("set_plan_options", recompute_all=True)
    computed, copied = score()
    assert not copied
    ours.probe("set_plan_options", recompute_all=False)
    reused, copied = score()
    assert copied
    ours.flush()
    cold = np.array(ours.engine.score(query, items, labels, apply_softmax=True).scores)
    np.testing.assert_allclose(computed, cold, rtol=0, atol=1e-4)
    assert reused.shape == cold.shape == (2, 3)
    np.testing.assert_allclose(reused.sum(axis=1), 1.0, atol=1e-5)


def test_embed_overrides_are_exact(ours: EngineUnderTest, documents: Documents) -> None:
    from sglang.srt.managers.embed_types import PositionalEmbeds

    prompt = moved_prompt(documents)

    def overridden() -> dict[str, Any]:
        where = [3, 100, len(prompt) - 2]
        values = torch.full((3, 128), 0.25)
        return ours.one(prompt, 4, positional_embed_overrides=[PositionalEmbeds(values, where)])

    cold = overridden()
    ours.flush()
    ours.one(documents[0][:200])
    warm = overridden()
    assert shifted(warm) == exact(warm) == 0
    assert warm["output_ids"] == cold["output_ids"]
    # What they computed is no donor and no prefix for anyone.
    assert shifted(ours.one(prompt)) == REUSED
    ours.assert_nothing_lost()


def test_input_embeds_are_refused_by_sglang(ours: EngineUnderTest) -> None:
    with pytest.raises(ValueError, match="--disable-radix-cache"):
        send_embeds(ours)


def send_embeds(engine: EngineUnderTest) -> Any:
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(
        input_embeds=[[0.1] * 128] * 8, sampling_params={"max_new_tokens": 1}
    )
    manager = engine.engine.tokenizer_manager
    return engine.engine.loop.run_until_complete(anext(manager.generate_request(request, None)))


def test_sessions(ours: EngineUnderTest, documents: Documents) -> None:
    ours.one(documents[0][:200])
    session = ours.engine.open_session(10000)
    try:
        first = ours.one(moved_prompt(documents), 6, session_params={"id": session, "rid": None})
        assert shifted(first) == REUSED
        follow = {"id": session, "rid": first["meta_info"]["id"]}
        second = ours.one(documents[7][:30], 6, session_params=follow)
        # The first turn is a prefix: exact to the run, approximate from there on.
        turn = len(moved_prompt(documents)) + 6
        assert second["meta_info"]["prompt_tokens"] == turn + 30
        assert exact(second) == 20 + 8
        assert shifted(second) >= turn - 1 - exact(second)
    finally:
        ours.engine.close_session(session)
    with pytest.raises(ValueError, match="--enable-streaming-session"):
        ours.engine.open_session(10000, streaming=True)
    ours.assert_nothing_lost()


def test_weight_updates_forget_all_kv(
    ours: EngineUnderTest,
    documents: Documents,
    model_folder: Path,
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    from tests.integration.tiny_llama import write_tiny_llama

    other = write_tiny_llama(tmp_path / "other", model_folder, seed=2)
    prompt = moved_prompt(documents)
    before = ours.one(prompt, 4)
    assert ours.probe("tree")
    try:
        success, message, *_ = ours.engine.update_weights_from_disk(str(other))
        assert success, message
        assert ours.probe("tree") == []
        after = ours.one(prompt, 4)
        assert after["meta_info"]["cached_tokens"] == 0
        assert after["output_ids"] != before["output_ids"]
        assert shifted(ours.one(moved_prompt(documents, 3))) == REUSED
        head = torch.zeros(49152, 128)
        ours.engine.begin_weight_update()
        success, message = ours.engine.update_weights_from_tensor([("lm_head.weight", head)])
        assert success, message
        ours.engine.end_weight_update()
        assert ours.probe("tree") == []
    finally:
        success, message, *_ = ours.engine.update_weights_from_disk(str(tiny_folder))
        assert success, message
    assert ours.probe("tree") == []
    assert ours.one(prompt, 4)["output_ids"] == before["output_ids"]
    ours.assert_nothing_lost()


def test_a_weight_update_may_keep_the_cache_until_the_flush(
    ours: EngineUnderTest, documents: Documents, tiny_folder: Path
) -> None:
    prompt = moved_prompt(documents)
    ours.one(documents[0][:200])
    tree = ours.probe("tree")
    assert tree
    try:
        ours.engine.begin_weight_update()
        success, message = ours.engine.update_weights_from_tensor(
            [("lm_head.weight", torch.zeros(49152, 128))], flush_cache=False
        )
        assert success, message
        ours.engine.end_weight_update()
        assert ours.probe("tree") == tree
        # As a prefix would be: with the new weights, on KV of the old ones.
        kept = ours.one(prompt, 4)
        assert shifted(kept) == REUSED
        assert set(kept["output_ids"]) == {0}
        assert exact(ours.one(documents[0][:200], 4)) == 199
        ours.flush()
        assert ours.probe("tree") == []
        assert shifted(ours.one(prompt, 4)) == 0
    finally:
        success, message, *_ = ours.engine.update_weights_from_disk(str(tiny_folder))
        assert success, message
    assert ours.probe("tree") == []
    assert set(ours.one(prompt, 4)["output_ids"]) != {0}
    ours.assert_nothing_lost()


def test_flush_forgets_index_and_tree(ours: EngineUnderTest, documents: Documents) -> None:
    ours.one(documents[0][:200])
    assert ours.probe("plan_of", tokens=moved_prompt(documents))
    ours.flush()
    assert ours.probe("tree") == []
    assert ours.probe("plan_of", tokens=moved_prompt(documents)) == []
    assert shifted(ours.one(moved_prompt(documents))) == 0
