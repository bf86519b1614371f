"""Two tensor-parallel ranks, each with its own scheduler and tree, plan alike."""

import json
import pickle
import shutil
from pathlib import Path

import pytest

from tests.integration.engines import EngineUnderTest, shifted
from tests.integration.test_engine_hostile import requests, serve

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture
def even_model(model_folder: Path, tmp_path: Path) -> Path:
    """Two layers with heads that two ranks can share, to be filled with dummy weights."""
    folder = tmp_path / "even"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder / name, folder / name)
    config = json.loads((model_folder / "config.json").read_text())
    config |= {
        "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_ranks_hold_the_same_tree(
    even_model: Path,
    documents: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # SGLang's way to run several CPU ranks: which cores each may use.
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    engine = EngineUnderTest(
        even_model,
        "radix_rope",
        {"check_plans": True, "min_run_tokens": 8, "recompute_tokens": 2, "stride": 4},
        load_format="dummy",
        tp_size=2,
        max_running_requests=12,
        enable_mixed_chunk=True,
        chunked_prefill_size=128,
        max_total_tokens=1500,
        context_length=1400,
    )
    try:
        results = serve(engine, requests(documents, seed=3))
        assert sum(shifted(r) for r in results) > 300
        engine.assert_nothing_lost()
        trees = tmp_path / "trees"
        trees.mkdir()
        engine.probe("tree_of_rank", folder=str(trees))
        ranks = [pickle.loads(file.read_bytes()) for file in trees.iterdir()]
    finally:
        engine.stop()
    assert len(ranks) == 2
    assert len(ranks[0]) > 10
    assert ranks[0] == ranks[1]
