"""What joins a prefill on the real engine: reuse is not charged, shared content computed once."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.integration.engines import EngineUnderTest, shifted

pytestmark = pytest.mark.engine

Documents = list[list[int]]
CHUNK = 256


@pytest.fixture
def ours(engines: Callable[[str], EngineUnderTest]) -> Iterator[EngineUnderTest]:
    engine = engines("features")
    engine.flush()
    engine.probe("watch_prefills")
    yield engine
    engine.probe("set_schedule", chunk_tokens=CHUNK, preempts=True)


def logprobs(result: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in result["meta_info"]["output_token_logprobs"]]


def answer_behind(
    engine: EngineUnderTest, donors: Documents, prompt: list[int], chunk_tokens: int
) -> tuple[dict[str, Any], list[Any]]:
    """The answer to a prompt cut at `chunk_tokens`, donors computed in one piece each; batches."""
    engine.flush()
    engine.probe("set_schedule", chunk_tokens=4096)
    engine.generate(donors)
    engine.probe("set_schedule", chunk_tokens=chunk_tokens)
    engine.probe("watch_prefills")
    result = engine.one(prompt, 6, return_logprob=True)
    return result, engine.probe("prefills")


def test_a_long_reused_prompt_is_not_cut_by_its_length(
    ours: EngineUnderTest, documents: Documents
) -> None:
    shared = [token for document in documents[:4] for token in document]
    prompt = [*documents[5][:40], *shared, *documents[6][:20]]
    assert len(prompt) > 4 * CHUNK
    in_chunks, batches = answer_behind(ours, documents[:4], prompt, CHUNK)
    whole, _ = answer_behind(ours, documents[:4], prompt, 4096)
    reused = shifted(in_chunks)
    assert batches == [[(len(prompt), 0, len(prompt), reused)]]
    assert len(prompt) - CHUNK < reused == shifted(whole)
    # The very same forward.
    assert in_chunks["output_ids"] == whole["output_ids"]
    assert logprobs(in_chunks) == logprobs(whole)
    ours.assert_nothing_lost()


def test_a_prompt_is_cut_where_its_computed_tokens_reach_the_budget(
    ours: EngineUnderTest, documents: Documents
) -> None:
    prompt = [
        *documents[5], *documents[0], *documents[6][:220], *documents[1], *documents[7][:30],
    ]  # fmt: skip
    in_chunks, batches = answer_behind(ours, documents[:2], prompt, CHUNK)
    whole, once = answer_behind(ours, documents[:2], prompt, 4096)
    assert len(once) == 1
    assert [len(batch) for batch in batches] == [1, 1, 1]
    ranges = [(begin, end) for ((_, begin, end, _),) in batches]
    computed = [end - begin - reused for ((_, begin, end, reused),) in batches]
    assert computed[:2] == [CHUNK, CHUNK] and computed[2] <= CHUNK
    # The second chunk holds all of the first document, and ends in what stands behind it.
    assert ranges[0] == (0, CHUNK) and 600 < ranges[1][1] < 820
    assert shifted(in_chunks) == shifted(whole)
    assert in_chunks["output_ids"] == whole["output_ids"]
    np.testing.assert_allclose(logprobs(in_chunks), logprobs(whole), rtol=0, atol=3e-4)
    ours.assert_nothing_lost()


def test_tokens_whose_log_probabilities_are_wanted_are_charged(
    ours: EngineUnderTest, documents: Documents
) -> None:
    prompt = [*documents[5][:250], *documents[0], *documents[1], *documents[7][:30]]
    ours.generate(documents[:2])
    ours.probe("watch_prefills")
    # From inside the first run on, 530 tokens, all is computed; before it, 250 and a head.
    result = ours.one(prompt, 4, return_logprob=True, logprob_start_len=350)
    batches = ours.probe("prefills")
    computed = [sum(end - begin - reused for _, begin, end, reused in batch) for batch in batches]
    assert computed[:3] == [CHUNK, CHUNK, CHUNK] and len(computed) == 4
    assert 50 < shifted(result) <= 100
    assert len(result["meta_info"]["input_token_logprobs"]) == len(prompt) - 350
    ours.assert_nothing_lost()


def arrive_together(engine: EngineUnderTest, prompts: Documents, **args: Any) -> tuple[Any, Any]:
    """Answers to prompts that wait in the queue at once, in this order; prefill batches."""
    engine.probe("hold_until", requests=len(prompts))
    engine.probe("watch_prefills")
    results = engine.generate(prompts, 6, **args)
    return results, engine.probe("prefills")


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", [600, 240, 690]),
        ("lpm", [690, 600, 240]),
        ("shortest-prefill-first", [690, 240, 600]),
        # Who came together goes by name, until a first chunk has let the others age: then by
        # what is left to compute.
        ("hrrn", [600, 690, 240]),
    ],
)
def test_policies_order_by_shifted_hits(
    ours: EngineUnderTest, documents: Documents, policy: str, order: list[int]
) -> None:
    ours.generate([documents[0], documents[1]])
    ours.probe("set_schedule", policy=policy)
    prompts = [
        [*documents[7], *documents[6]],
        documents[8][:240],
        [*documents[9][:60], *documents[0], *documents[1], *documents[10][:30]],
    ]
    rids = [f"{policy}-{name}" for name in ("a", "b", "c")]
    results, batches = arrive_together(ours, prompts, rid=rids)
    first = [length for batch in batches for length, begin, _, _ in batch if begin == 0]
    assert first == order
    assert [shifted(result) > 500 for result in results] == [False, False, True]
    ours.assert_nothing_lost()


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_what_comes_together_is_computed_once(
    ours: EngineUnderTest, documents: Documents, policy: str
) -> None:
    ours.probe("set_schedule", chunk_tokens=4096, policy=policy)
    prompts = [
        [*documents[5 + i][: 20 + 10 * i], *documents[0], *documents[1], *documents[9][:15]]
        for i in range(4)
    ]
    results, batches = arrive_together(ours, prompts)
    # One computes it; the others find it in the tree, all but a head and the last token.
    by_reuse = sorted(shifted(result) for result in results)
    assert by_reuse[0] == 0 and by_reuse[1] >= 600 - 16
    assert [len(batch) for batch in batches] == [1, 3]
    # The same answers as one after the other.
    ours.flush()
    first = batches[0][0][0]
    prompts.sort(key=lambda prompt: len(prompt) != first)
    results.sort(key=lambda result: shifted(result) != 0)
    for prompt, together in zip(prompts[:1], results[:1], strict=True):
        assert ours.one(prompt, 6)["output_ids"] == together["output_ids"]
    ours.assert_nothing_lost()


def test_sharing_starves_nobody(ours: EngineUnderTest, documents: Documents) -> None:
    # Every prompt shares a document with the one before and the one after.
    prompts = [
        [*documents[10 + i][:17], *documents[i], *documents[i + 1], *documents[10 + i][200:209]]
        for i in range(8)
    ]
    results, batches = arrive_together(ours, prompts)
    assert all(len(result["output_ids"]) == 6 for result in results)
    first = {length: n for n, b in enumerate(batches) for length, begin, _, _ in b if begin == 0}
    assert len(batches) <= 24 and first
    # Seven documents are shared; each is computed once, but for heads.
    assert sum(shifted(result) for result in results) >= 7 * (300 - 16) - 100
    computed = sum(end - begin - reused for b in batches for _, begin, end, reused in b)
    assert computed <= sum(map(len, prompts)) - 7 * (300 - 16) + 100
    ours.assert_nothing_lost()


def test_one_that_does_not_fit_does_not_shut_out_one_that_waits(
    ours: EngineUnderTest, documents: Documents
) -> None:
    # With preemption, SGLang looks at everybody in every pass.
    ours.probe("set_schedule", chunk_tokens=640, preempts=False)
    shared = [*documents[0], *documents[1]]
    decodes, large = documents[2], [token for document in documents[7:] for token in document]
    first, waits = [*documents[5][:20], *shared], [*documents[6][:30], *shared]
    lengths = [{"max_new_tokens": n} for n in (64, 64, 4, 4)]
    ours.probe("hold_until", requests=4)
    ours.probe("watch_prefills")
    # The last one does not fit while others run.
    results = ours.generate([decodes, first, waits, large[:5200]], sampling=lengths)
    batches = [[length for length, *_ in batch] for batch in ours.probe("prefills")]
    between = ours.probe("decodes")
    assert batches[:3] == [[300, 620], [620], [630]]
    assert sum(between[:3]) < 8 and sum(between) > 60
    assert shifted(results[2]) >= 600 - 16
    ours.assert_nothing_lost()
