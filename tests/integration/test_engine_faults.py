"""What fails inside radix_rope costs reuse, never an answer or the server.

That donors cannot be evicted between plan and copy is shown in `test_locks`.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.engines import EngineUnderTest, shifted

pytestmark = pytest.mark.engine

Documents = list[list[int]]

# Of a second pass, which only repair by attention has.
SECOND_PASS = ("scores", "picks", "second forward")


def repair(stage: str) -> dict[str, Any] | None:
    """Sampling parameters of requests that come to this stage."""
    if stage not in SECOND_PASS:
        return None
    return {"custom_params": {"radix_rope": {"repair": "attention", "attention_percent": 30}}}


def recomputed(result: dict[str, Any]) -> int:
    return int((result["meta_info"]["cached_tokens_details"] or {}).get("recomputed", 0))


@pytest.fixture
def ours(engines: Callable[[str], EngineUnderTest]) -> EngineUnderTest:
    engine = engines("shifted")
    engine.flush()
    return engine


@pytest.fixture(scope="module")
def prompts(documents: Documents) -> Documents:
    return [
        documents[8 + i][: 5 + 7 * i] + documents[i % 2] + documents[3][: 40 * i] for i in range(3)
    ]


@pytest.fixture(scope="module")
def plain(engines: Callable[[str], EngineUnderTest], prompts: Documents) -> Documents:
    """What a cold cache answers."""
    engine = engines("shifted")
    answers = []
    for prompt in prompts:
        engine.flush()
        answers.append(list(engine.one(prompt, 5)["output_ids"]))
    return answers


@pytest.mark.parametrize(
    ("stage", "counted"),
    [
        ("match", "plan"),
        ("plan", "plan"),
        ("lock", "plan"),
        ("copy", "copy"),
        ("forward", "forward"),
        *((stage, "forward") for stage in SECOND_PASS),
    ],
)
def test_a_fault_is_served_whole_and_exact(
    ours: EngineUnderTest,
    documents: Documents,
    prompts: Documents,
    plain: Documents,
    stage: str,
    counted: str,
) -> None:
    ours.generate(documents[:2])
    ours.probe("arm_fault", stage=stage, times=1)
    try:
        failed = ours.one(prompts[1], 5, sampling=repair(stage))
        labels = ours.probe("cached_kv", tokens=prompts[1])["nodes"]
        after = ours.one(prompts[2], 1, sampling=repair(stage))
    finally:
        found = ours.probe("disarm_fault")
    assert found == {"raised": 1, "fallbacks": {counted: 1}, "tracebacks": 1}
    assert failed["output_ids"] == plain[1]
    assert failed["meta_info"]["cached_tokens"] == shifted(failed) == recomputed(failed) == 0
    assert labels[-1][1] >= len(prompts[1]) - 1
    assert all(provenance.exact for _, _, provenance in labels)
    # The next request is served from moved KV again.
    assert shifted(after) > 200
    assert (recomputed(after) > 0) == (stage in SECOND_PASS)
    ours.assert_nothing_lost()


@pytest.mark.parametrize("stage", ["plan", "copy", "forward", "second forward"])
def test_faults_of_every_batch_under_load(
    ours: EngineUnderTest, documents: Documents, prompts: Documents, plain: Documents, stage: str
) -> None:
    ours.generate([*documents[:2], documents[3]])
    ours.probe("arm_fault", stage=stage, times=1000)
    try:
        # One alone, then some together.
        results = [
            *ours.generate(prompts[:1], 5, sampling=repair(stage)),
            *ours.generate(prompts[1:], 5, sampling=repair(stage)),
        ]
    finally:
        found = ours.probe("disarm_fault")
    counted = "forward" if stage in SECOND_PASS else stage
    assert found["raised"] == found["fallbacks"][counted] >= 2
    # Logged at the 1st, 2nd, 4th, ... only.
    assert found["tracebacks"] == found["raised"].bit_length()
    assert [result["output_ids"] for result in results] == plain
    assert sum(shifted(result) for result in results) == 0
    ours.assert_nothing_lost()


def test_a_client_that_goes_away_in_the_middle(ours: EngineUnderTest, documents: Documents) -> None:
    ours.generate(documents[:2])
    engine = ours.engine

    async def leave(i: int) -> int:
        prompt = documents[9 + i][: 20 + i] + documents[i % 2] + documents[5][:50]
        stream = await engine.async_generate(
            input_ids=prompt,
            sampling_params={"temperature": 0, "max_new_tokens": 400, "ignore_eos": True},
            stream=True,
            rid=f"gone-{i}",
        )
        async for answer in stream:
            engine.tokenizer_manager.abort_request(rid=f"gone-{i}")
            return int(answer["meta_info"]["cached_tokens"])
        raise AssertionError("no answer at all")

    async def all_of_them() -> list[int]:
        return await asyncio.wait_for(asyncio.gather(*(leave(i) for i in range(4))), 120)

    assert min(engine.loop.run_until_complete(all_of_them())) > 200
    ours.assert_nothing_lost()
