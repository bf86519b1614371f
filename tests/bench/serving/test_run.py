"""The whole benchmark at its smallest, on real servers."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.serving import __main__ as command
from bench.serving.__main__ import main
from bench.serving.records import Answer, Cell, Sample

PAGE = "python -m bench.serving --preset tiny --write-docs"
ENDS = ("begin", "end")


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


@pytest.mark.parametrize("given", ["--server", "--url"])
@pytest.mark.parametrize(
    ("text", "reason"), [("stock=x", "there is a server named stock already"), ("x", "give a name")]
)
def test_servers_have_names_of_their_own(
    given: str, text: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([given, text])
    assert reason in capsys.readouterr().err


def test_a_preset_without_the_workload_says_what_it_has(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--preset", "claims", "--workloads", "fan_out", "--output", str(tmp_path)]
    assert main([*options, "--model-path", str(model_folder)]) == 1
    assert "has none of fan_out; it measures shared_prefix, permuted" in capsys.readouterr().err


def test_what_was_measured_before_a_failure_is_kept(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = Sample("stock", True, 0, 0, 51, Answer(7.0, 1024, 0, 0))

    def one_cell(measurement: Any, clients: Any, found: list[Cell]) -> None:
        found.append(Cell("shared_prefix", "title", 512, 75, (sample,)))
        raise command.RequestError("stock: it went away")

    monkeypatch.setattr(command, "_start", lambda *_: [])
    monkeypatch.setattr(command.Measurement, "warm_up", lambda *_: None)
    monkeypatch.setattr(command.Measurement, "one_by_one", one_cell)
    page = tmp_path / "page.md"
    page.write_text(begin := "\n".join(f"<!-- written by {PAGE}: {end} -->" for end in ENDS))
    options = ["--preset", "tiny", "--model-path", str(model_folder), "--output", str(tmp_path)]
    assert main([*options, "--logs", str(tmp_path), "--write-docs", str(page)]) == 1
    kept = json.loads((tmp_path / "serving-tiny.incomplete.json").read_text())
    assert kept["incomplete"] == "stock: it went away"
    assert kept["cells"][0]["samples"][0]["answer"]["ttft_ms"] == 7.0
    assert page.read_text() == begin
    assert not (tmp_path / "serving-tiny.json").exists()
