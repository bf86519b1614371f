"""Repair policies on the real engine: what is computed, in which pass, and how close it comes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from radix_rope.quality.texts import document, fact_sheet
from tests.integration.engines import EngineUnderTest, exact, shifted

pytestmark = pytest.mark.engine

Documents = list[list[int]]
Encode = Callable[[str], list[int]]

EXACT = {"mode": "exact"}


@pytest.fixture
def ours(engines: Callable[[str], EngineUnderTest]) -> EngineUnderTest:
    engine = engines("shifted")
    engine.flush()
    engine.probe(
        "set_plan_options",
        recompute_all=False, min_run_tokens=64, recompute_tokens=16, repair="head",
    )  # fmt: skip
    return engine


def params(options: dict[str, Any]) -> dict[str, Any]:
    return {"custom_params": {"radix_rope": options}}


def attention(percent: int = 15) -> dict[str, Any]:
    return {"repair": "attention", "attention_percent": percent}


def recomputed(result: dict[str, Any]) -> int:
    details = result["meta_info"]["cached_tokens_details"]
    return 0 if details is None else int(details.get("recomputed", 0))


def output_logprobs(result: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in result["meta_info"]["output_token_logprobs"]]


def input_logprobs(result: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in result["meta_info"]["input_token_logprobs"][1:]]


class Case:
    """Two documents cached apart, then joined behind another beginning, and asked about."""

    def __init__(self, engine: EngineUnderTest, documents: Documents, encode: Encode) -> None:
        self.engine = engine
        self.donors = [documents[0], documents[1]]
        self.head = encode("A line that was not there before. ")
        self.question = encode(
            " Of all the arguments above, the ones that an option takes are described by"
        )
        self.prompt = self.head + documents[0] + documents[1] + self.question
        # The first token of each document stood at position 0.
        self.run_tokens = 600 - 2

    def ask(self, options: dict[str, Any], max_new_tokens: int = 4, **args: Any) -> dict[str, Any]:
        """The prompt's answer, from a cache that holds the donors and nothing else."""
        self.engine.flush()
        if options != EXACT:
            for donor in self.donors:
                self.engine.one(donor, 1)
        args = {"return_logprob": True, "top_logprobs_num": 5, **args}
        return self.engine.one(self.prompt, max_new_tokens, sampling=params(options), **args)


@pytest.fixture
def case(ours: EngineUnderTest, documents: Documents, encode: Encode) -> Case:
    return Case(ours, documents, encode)


def test_all_run_tokens_repaired_is_a_full_prefill(case: Case) -> None:
    case.donors = [case.donors[0] + case.donors[1]]  # one run: no gap was computed beside it
    want = case.ask(EXACT, 8)
    got = case.ask(attention(100), 8)
    assert (shifted(got), exact(got)) == (600 - 1, 0)
    assert recomputed(got) == 600 - 1 + len(case.question)
    assert got["output_ids"] == want["output_ids"]
    np.testing.assert_allclose(output_logprobs(got), output_logprobs(want), rtol=0, atol=3e-4)
    mine = case.engine.probe("cached_kv", tokens=case.prompt)
    unrepaired = case.ask({"repair": "none"}, 8)
    far = np.abs(np.array(output_logprobs(unrepaired)) - output_logprobs(want)).max()
    assert far > 1e-2, "this example needs no repair"
    case.ask(EXACT, 8)
    theirs = case.engine.probe("cached_kv", tokens=case.prompt)
    for part in ("k", "v"):
        np.testing.assert_allclose(mine[part], theirs[part], rtol=0, atol=5e-3)
    case.engine.assert_nothing_lost()


def test_the_most_attended_tokens_repair_most(case: Case, encode: Encode) -> None:
    """Facts in a sheet behind a document it was not cached behind; error on the gold answers."""
    sheet = fact_sheet("harbour")
    case.donors = [encode(document("handbook")), encode("\n\n" + sheet.text)]
    context = case.head + case.donors[0] + case.donors[1]
    run_tokens = sum(map(len, case.donors)) - 2
    error: dict[str, list[float]] = {"none": [], "attention": []}
    for asked in sheet.questions[:3]:
        answer = encode(" " + asked.gold)
        case.question = encode(f"\n\nQuestion: {asked.question}\nAnswer: {asked.lead_in}") + answer
        case.prompt = context + case.question
        more = {"logprob_start_len": len(case.prompt) - len(answer) - 1}
        want = input_logprobs(case.ask(EXACT, 1, **more))
        assert len(want) == len(answer)
        for name, options in (("none", {"repair": "none"}), ("attention", attention(15))):
            got = case.ask(options, 1, **more)
            assert shifted(got) == run_tokens
            second = recomputed(got) - len(case.question)
            if name == "attention":
                # At most 31 rows here, so picks come in blocks, which do not fill up the share.
                assert 0.1 * run_tokens < second <= -(-run_tokens * 15 // 100)
            else:
                assert recomputed(got) == 0
            assert len(got["meta_info"]["input_top_logprobs"]) == len(answer) + 1
            error[name].append(float(np.mean(np.abs(np.array(input_logprobs(got)) - want))))
    print(error)
    assert np.mean(error["attention"]) < 0.6 * np.mean(error["none"])


def test_long_questions_and_whole_prompts_use_heads(case: Case, documents: Documents) -> None:
    got = case.ask(attention(), logprob_start_len=len(case.prompt) - 300)
    assert recomputed(got) == 0
    # 15 tokens of the second document are too few for a run.
    assert shifted(got) == 300 - 16
    case.question = documents[9][:257]
    case.prompt = case.prompt[: len(case.head) + 600] + case.question
    got = case.ask(attention())
    assert (shifted(got), recomputed(got)) == (600 - 2 * 16, 0)


def test_recompute_all_has_no_second_pass(case: Case) -> None:
    want = case.ask(EXACT)
    case.engine.probe("set_plan_options", recompute_all=True)
    got = case.ask(attention())
    assert (shifted(got), recomputed(got)) == (0, 0)
    np.testing.assert_allclose(output_logprobs(got), output_logprobs(want), rtol=0, atol=3e-4)


def test_requests_of_one_batch_do_not_see_each_others_second_pass(
    case: Case, documents: Documents
) -> None:
    ours = case.engine
    tail = documents[8][:25]
    requests: list[tuple[list[int], dict[str, Any], int]] = [
        # All tokens of a run fit one row: others get theirs in whatever company.
        (case.prompt, attention(100), len(case.prompt) - 5),
        (documents[3][:40] + documents[1] + tail, {"repair": "none"}, 100),
        (documents[2][:150], EXACT, 0),
        (documents[4][:50] + documents[0] + tail, attention(100), -1),
        (documents[5][:60] + documents[1][:200] + tail, {"repair": "head"}, -1),
        (documents[6][:90], attention(15), 30),
    ]

    def ask(chosen: list[tuple[list[int], dict[str, Any], int]]) -> list[dict[str, Any]]:
        ours.flush()
        ours.generate(case.donors, 1)
        return ours.generate(
            [prompt for prompt, _, _ in chosen],
            5,
            sampling=[params(options) for _, options, _ in chosen],
            return_logprob=True,
            logprob_start_len=[start for _, _, start in chosen],
            top_logprobs_num=3,
        )

    together = ask(requests)
    ours.assert_nothing_lost()
    assert [recomputed(r) > 0 for r in together] == [True, False, False, True, False, False]
    for request, got in zip(requests, together, strict=True):
        (want,) = ask([request])
        assert shifted(got) == shifted(want)
        assert recomputed(got) == recomputed(want)
        assert got["output_ids"] == want["output_ids"]
        for name in ("input_token_logprobs", "output_token_logprobs"):
            a, b = got["meta_info"][name], want["meta_info"][name]
            assert [entry[1] for entry in a] == [entry[1] for entry in b]
            values = [[e[0] for e in side if e[0] is not None] for side in (a, b)]
            np.testing.assert_allclose(*values, rtol=0, atol=3e-4)
        a, b = (r["meta_info"]["input_top_logprobs"] for r in (got, want))
        assert len(a) == len(b)


def test_a_second_pass_is_no_longer_than_a_chunk(
    engines: Callable[[str], EngineUnderTest], documents: Documents, encode: Encode
) -> None:
    """Pages of 16, chunks of 256, decoding requests mixed in."""
    engine = engines("chunked")
    engine.flush()
    case = Case(engine, documents, encode)
    got = case.ask(attention(100))
    assert shifted(got) > 400
    # The prompt is one chunk, and its second pass is no longer than one, though all of the runs
    # was asked for.
    assert 200 < recomputed(got) <= 256
    engine.generate(case.donors, 1)
    prompts = [documents[i][: 20 + 7 * i] + documents[i % 2] + case.question for i in range(2, 8)]
    mixed = engine.generate(prompts, 12, sampling=params(attention(30)))
    assert any(recomputed(result) > 0 for result in mixed)
    engine.assert_nothing_lost()
