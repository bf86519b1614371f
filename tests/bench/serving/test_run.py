"""The whole benchmark at its smallest, on real servers."""

import json
from pathlib import Path

import pytest

from bench.serving.__main__ import main


@pytest.mark.engine
@pytest.mark.long
def test_the_smallest_run(tmp_path: Path, model_folder: Path) -> None:
    options = ["--preset", "tiny", "--workloads", "shared_prefix", "truncation"]
    options += ["--model-path", str(model_folder)]
    options += ["--output", str(tmp_path), "--logs", str(tmp_path)]
    code = main(options)
    assert code == 0
    data = json.loads((tmp_path / "serving-tiny.json").read_text())
    assert [cell["workload"] for cell in data["cells"]] == ["shared_prefix", "truncation"]
    assert {load["server"] for load in data["loads"]} == {"stock", "radix_rope"}
    exact = next(c for c in data["checks"] if "computed the tokens" in c["promise"])
    assert exact["passed"], exact
    ours = [
        s["answer"]
        for cell in data["cells"]
        for s in cell["samples"]
        if s["server"] == "radix_rope" and s["shifted"]
    ]
    assert [a["shifted_tokens"] > 0 for a in ours] == [True, True]
    assert (tmp_path / "serving-tiny.png").stat().st_size > 10_000
    assert "| shared prefix, unique head | 512 |" in (tmp_path / "serving-tiny.md").read_text()
