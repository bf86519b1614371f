"""Two tensor-parallel ranks plan and answer alike; two data-parallel ranks keep apart."""

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.engines import EngineUnderTest, shifted
from tests.integration.test_engine_hostile import requests, serve

pytestmark = pytest.mark.engine

Documents = list[list[int]]

# The engine "features" is the single rank that both are compared with.
CONFIG = {"check_plans": True, "min_run_tokens": 32, "recompute_tokens": 8}
ARGS: dict[str, Any] = {
    "chunked_prefill_size": 256,
    "max_running_requests": 8,
    "max_total_tokens": 3000,
    "context_length": 2500,
}


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's way to run several CPU ranks: which cores each may use."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")


@pytest.fixture
def single(engines: Callable[[str], EngineUnderTest]) -> EngineUnderTest:
    engine = engines("features")
    engine.flush()
    engine.probe("set_plan_options", recompute_all=False, recompute_tokens=8)
    return engine


def conversation(documents: Documents) -> list[list[int]]:
    """Prompts in an order in which later ones find runs of earlier ones, some in chunks."""
    heads = [documents[6 + i][: 11 + 3 * i] for i in range(5)]
    return [
        documents[0] + documents[1],
        heads[0] + documents[0],
        heads[1] + documents[1] + heads[2] + documents[0] + documents[2],
        documents[0][:150] + heads[3],
        heads[4] + documents[2][50:250] + heads[3] + documents[1][:100],
    ]


def answers(engine: EngineUnderTest, prompts: list[list[int]], **args: Any) -> list[dict[str, Any]]:
    return [engine.one(prompt, 8, return_logprob=True, **args) for prompt in prompts]


def assert_equal_answers(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert a["output_ids"] == b["output_ids"]
        assert a["meta_info"]["cached_tokens_details"] == b["meta_info"]["cached_tokens_details"]
        np.testing.assert_allclose(
            [entry[0] for entry in a["meta_info"]["output_token_logprobs"]],
            [entry[0] for entry in b["meta_info"]["output_token_logprobs"]],
            rtol=0,
            atol=1e-3,
        )


@pytest.mark.usefixtures("two_cores")
def test_tensor_parallel_ranks_plan_alike_and_answer_like_one(
    tiny_folder: Path, documents: Documents, single: EngineUnderTest, tmp_path: Path
) -> None:
    engine = EngineUnderTest(
        tiny_folder, "radix_rope", CONFIG, tp_size=2, enable_mixed_chunk=True, **ARGS
    )
    try:
        prompts = conversation(documents)
        theirs = answers(single, prompts)
        assert sum(shifted(r) > 0 for r in theirs) >= 3
        assert_equal_answers(answers(engine, prompts), theirs)
        with pytest.raises(ValueError, match=r'"attention" was asked for.*--tp-size 2'):
            asked = {"mode": "shifted", "repair": "attention"}
            engine.one(prompts[1], sampling={"custom_params": {"radix_rope": asked}})
        # Everything at once, in any order: both ranks must still hold the same.
        results = serve(engine, requests(documents, seed=3))
        assert sum(shifted(r) for r in results) > 300
        engine.assert_nothing_lost()
        engine.probe("tree_of_rank", folder=str(tmp_path))
        ranks = [pickle.loads(file.read_bytes()) for file in tmp_path.iterdir()]
    finally:
        engine.stop()
    assert len(ranks) == 2
    assert len(ranks[0]) > 10
    assert ranks[0] == ranks[1]


@pytest.fixture
def replicas(
    tiny_folder: Path, two_cores: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EngineUnderTest]:
    monkeypatch.setenv("RADIX_ROPE_TEST_FLUSH_FOLDER", str(tmp_path))
    engine = EngineUnderTest(tiny_folder, "radix_rope", CONFIG, dp_size=2, **ARGS)
    yield engine
    engine.stop()


def test_data_parallel_ranks_each_reuse_their_own(
    replicas: EngineUnderTest, documents: Documents, single: EngineUnderTest, tmp_path: Path
) -> None:
    prompts = conversation(documents)
    theirs = answers(single, prompts)
    for rank in (0, 1):
        # The second rank has seen nothing of what the first has cached.
        assert_equal_answers(answers(replicas, prompts, routed_dp_rank=rank), theirs)
    # And where SGLang's own balancing sends them.
    results = serve(replicas, requests(documents, seed=4))
    assert sum(shifted(r) for r in results) > 300
    replicas.flush()
    ranks = [pickle.loads(file.read_bytes()) for file in tmp_path.iterdir()]
    assert len(ranks) == 2
    for rank_state in ranks:
        state = rank_state["accounting"]
        assert state["available"] + state["evictable"] == state["total"], state
        assert state["protected"] == 0, state
        assert state["free_requests"] == state["requests"], state
        assert any(provenance.copied for _, _, _, provenance, _ in rank_state["tree"])
