"""Shifted reuse on the real engine: what is reused, reported, and bit-equal to what."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

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


def output_logprobs(result: dict[str, Any]) -> list[tuple[float, int]]:
    return [entry[:2] for entry in result["meta_info"]["output_token_logprobs"]]


def input_logprobs(result: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in result["meta_info"]["input_token_logprobs"][1:]]


def test_run_at_another_offset_is_reused_and_reported(
    ours: EngineUnderTest, documents: Documents, encode: Callable[[str], list[int]]
) -> None:
    head, question = encode("A line that was not there before. "), encode(" In short, this")
    cold = ours.one(documents[0] + documents[1])
    assert shifted(cold) == exact(cold) == cold["meta_info"]["cached_tokens"] == 0
    moved = ours.one(head + documents[0] + documents[1] + question)
    assert shifted(moved) == 600 - 16
    assert exact(moved) == 0
    assert moved["meta_info"]["cached_tokens"] == 600 - 16


def test_aligned_prefix_is_exact(ours: EngineUnderTest, documents: Documents) -> None:
    ours.one(documents[0])
    again = ours.one(documents[0] + documents[1][:40])
    assert exact(again) == 300
    assert shifted(again) == 0


def test_prefix_on_approximate_kv_is_never_reported_exact(
    ours: EngineUnderTest, documents: Documents, encode: Callable[[str], list[int]]
) -> None:
    head = encode("Another beginning. ")
    ours.one(documents[0])
    prompt = head + documents[0] + encode(" And then")
    first = ours.one(prompt)
    second = ours.one(prompt)
    assert shifted(first) == 300 - 16
    # The second is a full prefix hit, but from the first run on it is approximate.
    assert second["meta_info"]["cached_tokens"] == len(prompt) - 1
    assert exact(second) == len(head) + 16
    assert shifted(second) == len(prompt) - 1 - exact(second)


def test_same_offset_after_a_changed_head_needs_no_rotation(
    ours: EngineUnderTest, documents: Documents
) -> None:
    ours.one([*documents[1][:20], *documents[0]])
    moved = ours.one([*documents[2][:20], *documents[0], *documents[3][:20]])
    assert shifted(moved) == 300 - 16
    runs = ours.probe("plan_of", tokens=[*documents[4][:20], *documents[0], *documents[5][:20]])
    assert [delta for _, _, delta in runs] == [0]


@pytest.mark.parametrize("name", ["extra_key", "cache_salt"])
def test_namespaces_are_never_crossed(
    ours: EngineUnderTest, documents: Documents, name: str
) -> None:
    ours.one(documents[0], **{name: "tenant a"})
    head = documents[1][:20]
    other = ours.one(head + documents[0], **{name: "tenant b"})
    assert other["meta_info"]["cached_tokens"] == 0
    none = ours.one(documents[2][:20] + documents[0])
    assert none["meta_info"]["cached_tokens"] == 0
    same = ours.one(documents[3][:20] + documents[0], **{name: "tenant a"})
    assert shifted(same) > 0


@pytest.mark.parametrize("kind", ["shifted", "chunked"])
def test_a_tenant_learns_nothing_of_anothers_prompts_by_guessing(
    engines: Callable[[str], EngineUnderTest], documents: Documents, kind: str
) -> None:
    """Right guesses, in part and in full; chunks of 256 and pages of 16 in the second engine."""
    engine = engines(kind)
    engine.flush()
    engine.probe("set_plan_options", recompute_all=False, recompute_tokens=16)
    secret = documents[1][:24] + documents[0]
    owner = {"extra_key": "x", "cache_salt": "owner"}
    engine.one(secret, **owner)
    guesses = [
        secret,
        secret[:180],
        documents[2][:33] + secret,
        secret[100:] + secret[:100],
        documents[3] + secret + documents[4][:80],
        documents[5] + secret[:90] + documents[6][:50] + secret[90:],
    ]
    # Names that would be the owner's if a part of them were ignored or mixed up.
    strangers = [{}, {"extra_key": "x"}, {"cache_salt": "owner"}, {"extra_key": "owner"}]
    strangers += [{"extra_key": "owner", "cache_salt": "x"}]
    for guess, name in zip(guesses, [*strangers, {"cache_salt": "y"}], strict=True):
        answer = engine.one(guess, 1, **name)
        assert answer["meta_info"]["cached_tokens"] == shifted(answer) == 0, name
    # Meanwhile the owner finds it, which also keeps it from being evicted below.
    assert exact(engine.one(secret, 1, **owner)) > 300
    moved = engine.one(documents[7][:40] + secret, 1, **owner)
    assert shifted(moved) > 200
    # All at once, each with a name of its own, so that no guess finds another one.
    names = [f"stranger {number}" for number in range(len(guesses))]
    for answer in engine.generate(guesses, 1, cache_salt=names):
        assert answer["meta_info"]["cached_tokens"] == shifted(answer) == 0
    assert exact(engine.one(secret, 1, **owner)) > 300
    engine.assert_nothing_lost()


def test_layer_zero_keys_equal_those_computed_at_the_new_position(
    ours: EngineUnderTest, documents: Documents
) -> None:
    head = documents[1][:37]
    prompt = head + documents[0]
    ours.one(documents[0])
    # The last token of a request is always computed.
    assert shifted(ours.one(prompt)) == 300 - 16 - 1
    moved = ours.probe("cached_kv", tokens=prompt)
    ours.flush()
    ours.one(prompt)
    computed = ours.probe("cached_kv", tokens=prompt)
    copied = [(b, e) for b, e, provenance in moved["nodes"] if provenance.copied]
    assert copied
    for begin, end in copied:
        # Layer 0 sees token and position alone, so here reuse is exact to rounding.
        np.testing.assert_allclose(
            moved["k"][0, begin:end], computed["k"][0, begin:end], rtol=0, atol=2e-4
        )
        np.testing.assert_array_equal(moved["v"][0, begin:end], computed["v"][0, begin:end])
        # Above it, context differs: this is what the approximation is.
        assert np.abs(moved["k"][-1, begin:end] - computed["k"][-1, begin:end]).max() > 1e-3


def test_requests_without_runs_are_bit_identical_to_stock(
    ours: EngineUnderTest, stock: EngineUnderTest, documents: Documents
) -> None:
    chat: list[int] = []
    prompts = []
    for turn in range(4):
        chat = chat + documents[turn][:150]
        prompts.append(chat)
    prompts += [documents[10][:200], documents[11][:33], documents[12]]
    for prompt in prompts:
        mine = ours.one(prompt, 6, return_logprob=True)
        theirs = stock.one(prompt, 6, return_logprob=True)
        assert shifted(mine) == 0
        assert output_logprobs(mine) == output_logprobs(theirs)
        assert mine["meta_info"]["cached_tokens"] == theirs["meta_info"]["cached_tokens"]


def test_many_rows_give_the_logits_of_one_plain_prefill(
    ours: EngineUnderTest, stock: EngineUnderTest, documents: Documents
) -> None:
    ours.probe("set_plan_options", recompute_all=True, recompute_tokens=0)
    prompt = [
        *documents[5][:30], *documents[0], *documents[6][:30], *documents[1], *documents[7][:30],
        *documents[2][:100], *documents[8][:10],
    ]  # fmt: skip
    for engine in (ours, stock):
        engine.generate([documents[0], documents[1], documents[2]])
    mine = ours.one(prompt, 8, return_logprob=True)
    theirs = stock.one(prompt, 8, return_logprob=True)
    assert mine["meta_info"]["cached_tokens"] == 0
    a, b = output_logprobs(mine), output_logprobs(theirs)
    assert [token for _, token in a] == [token for _, token in b]
    np.testing.assert_allclose([x for x, _ in a], [x for x, _ in b], rtol=0, atol=2e-4)


def test_output_logprobs_behind_a_run_are_those_of_the_approximate_prompt(
    ours: EngineUnderTest, documents: Documents
) -> None:
    prompt = documents[5][:30] + documents[0] + documents[6][:20]

    def ask() -> tuple[list[tuple[float, int]], list[list[tuple[float, int]]], int, int]:
        result = ours.one(prompt, 6, return_logprob=True, top_logprobs_num=5)
        top = [[e[:2] for e in tops] for tops in result["meta_info"]["output_top_logprobs"]]
        return output_logprobs(result), top, shifted(result), exact(result)

    ours.one(documents[0])
    chosen, top, reused, _ = ask()
    assert reused == 300 - 16 and len(chosen) == len(top) == 6
    for (value, token), best in zip(chosen, top, strict=True):
        values = [v for v, _ in best]
        assert len(best) == 5 and values == sorted(values, reverse=True)
        assert np.isfinite(values).all() and max(values) <= 0 and np.exp(values).sum() <= 1 + 1e-5
        # Greedy: the chosen token is the first.
        assert (value, token) == tuple(best[0])
    # On the KV that the first left, without a run: the same prompt, one token computed.
    chosen_again, top_again, cached, from_exact = ask()
    assert (from_exact, cached) == (30 + 16, len(prompt) - 1 - 30 - 16)
    assert [t for _, t in chosen_again] == [t for _, t in chosen]
    for mine, theirs in zip(top_again, top, strict=True):
        np.testing.assert_allclose([v for v, _ in mine], [v for v, _ in theirs], rtol=0, atol=2e-4)
    # The same plan: the same bits.
    ours.flush()
    ours.one(documents[0])
    assert ask()[:3] == (chosen, top, reused)
    # And not those of the prompt computed whole.
    ours.flush()
    whole, _, reused, _ = ask()
    assert reused == 0
    assert abs(whole[0][0] - chosen[0][0]) > 1e-3
    ours.assert_nothing_lost()


def test_input_logprobs_inside_a_run_are_computed(
    ours: EngineUnderTest, stock: EngineUnderTest, documents: Documents
) -> None:
    prompt = documents[5][:30] + documents[0] + documents[6][:20]
    start = 200
    for engine in (ours, stock):
        engine.one(documents[0])
    mine = ours.one(prompt, 2, return_logprob=True, logprob_start_len=start, top_logprobs_num=3)
    theirs = stock.one(prompt, 2, return_logprob=True, logprob_start_len=start, top_logprobs_num=3)
    assert 0 < shifted(mine) <= start - 30 - 16
    a, b = input_logprobs(mine), input_logprobs(theirs)
    assert len(a) == len(b) == len(prompt) - start - 1
    # Same tokens asked for; values differ only by the approximation before them.
    assert [e[1] for e in mine["meta_info"]["input_token_logprobs"]] == prompt[start:]
    assert float(np.mean(np.abs(np.array(a) - np.array(b)))) < 0.1
    assert len(mine["meta_info"]["input_top_logprobs"]) == len(prompt) - start


def test_whole_prompt_logprobs_reuse_nothing(
    ours: EngineUnderTest, stock: EngineUnderTest, documents: Documents
) -> None:
    prompt = documents[5][:30] + documents[0]
    for engine in (ours, stock):
        engine.one(documents[0])
    mine = ours.one(prompt, 2, return_logprob=True, logprob_start_len=0)
    theirs = stock.one(prompt, 2, return_logprob=True, logprob_start_len=0)
    assert mine["meta_info"]["cached_tokens"] == 0
    assert input_logprobs(mine) == input_logprobs(theirs)


def test_several_requests_of_one_batch_each_reuse(
    ours: EngineUnderTest, documents: Documents
) -> None:
    ours.generate([documents[0] + documents[1], documents[2]])
    heads = [documents[6 + i][: 11 + 3 * i] for i in range(5)]
    prompts = [
        heads[0] + documents[0],
        heads[1] + documents[2] + heads[1] + documents[1],
        heads[2] + documents[9],
        documents[0] + documents[1] + heads[3],
        heads[4] + documents[2][50:250],
    ]
    alone = []
    for prompt in prompts:
        ours.flush()
        ours.generate([documents[0] + documents[1], documents[2]])
        alone.append(ours.one(prompt, 6))
    ours.flush()
    ours.generate([documents[0] + documents[1], documents[2]])
    together = ours.generate(prompts, 6)
    assert [shifted(r) for r in together] == [shifted(r) for r in alone]
    assert [shifted(r) for r in together] == [283, 567, 0, 0, 183]
    assert [r["output_ids"] for r in together] == [r["output_ids"] for r in alone]
    ours.assert_nothing_lost()
