"""`radix-rope check` as a user runs it: on a real engine, in processes of its own."""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from radix_rope.config import RadixRopeConfig, parse_config
from radix_rope.quality.command import _config, missing_contexts
from radix_rope.quality.records import read
from radix_rope.quality.scenarios import VARIANTS
from radix_rope.quality.summary import rows
from tests.quality.support import measurement, target

pytest.importorskip("sglang")


def check(model: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "radix_rope.cli", "check", "--model-path", str(model), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **environment},
    )


@pytest.mark.engine
@pytest.mark.long
def test_one_scenario_from_engine_to_verdict(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADIX_ROPE_CACHE", str(tmp_path / "cache"))
    result, config, plot = tmp_path / "r.json", tmp_path / "c.json", tmp_path / "p.png"
    asked = ("--quick", "--questions", "2", "--scenario", "independent", "--json", str(result))
    files = ("--write-config", str(config), "--plot", str(plot))
    done = check(model_folder, *asked, *files, "--max-kl", "independent=9", "--min-kept", "0")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "VERDICT: passed" in done.stdout and "a try, not stored" in done.stdout
    assert not (tmp_path / "cache" / "checks").exists()
    assert plot.read_bytes().startswith(b"\x89PNG")

    table = {row.setting: row for row in rows(read(result.read_text()))}
    assert all(row.targets == 2 for row in table.values())
    assert all(0 <= row.kl_nats <= row.worst_kl_nats < 5 for row in table.values())
    # The donors stood alone, so what is reused differs by more than two exact runs do.
    assert table["floor"].kl_nats < 1e-6 < table["none"].kl_nats
    assert table["floor"].computed_share == 1
    assert 0 < table["none"].computed_share < table["head64"].computed_share < 0.5
    options = parse_config(config.read_text())
    assert options.mode == "shifted"

    # The same measurement against limits that nothing keeps; no engine is needed.
    done = check(model_folder, *asked, "--resume", "--max-kl", "independent=1e-12")
    assert done.returncode == 1, done.stdout + done.stderr[-3000:]
    assert "VERDICT: failed" in done.stdout and "Starting SGLang" not in done.stderr
    verdict = json.loads(result.read_text())["verdict"]
    assert not verdict["passed"] and verdict["options"] == {"mode": "exact"}


@pytest.mark.engine
@pytest.mark.long
def test_an_engine_without_a_second_pass_is_measured_without_attention(
    tiny_folder: Path, tmp_path: Path
) -> None:
    result = tmp_path / "r.json"
    asked = ("--quick", "--questions", "1", "--scenario", "edit", "--json", str(result))
    limits = ("--max-kl", "99", "--min-kept", "0")
    ranks = ("--engine-args", '{"tp_size": 2}')
    # How SGLang runs several ranks on a CPU: which cores each may use.
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "RADIX_ROPE_CACHE": str(tmp_path)}
    done = check(tiny_folder, *asked, *limits, *ranks, **cores)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "Without the attention settings: the engine has --tp-size 2" in done.stderr
    assert "skip  attention, 15%: not measured, the engine has --tp-size 2" in done.stdout
    assert {row.setting for row in rows(read(result.read_text()))} == {
        "floor", "none", "head16", "head64",
    }  # fmt: skip


def test_servers_are_held_to_options_that_the_check_does_not_take_from_its_operator() -> None:
    own = RadixRopeConfig(
        mode="opt_in", repair="none", recompute_tokens=1, attention_percent=1, max_generations=0,
        require_check=True, stride=16,
    )  # fmt: skip
    assert _config(own) == RadixRopeConfig(stride=16)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model-path", "/nowhere"], "no config.json"),
        (["--max-kl", "reorder=much"], "SCENARIO=NATS"),
        (["--max-kl", "rotation=1"], "there is no scenario 'rotation'"),
        (["--resume"], "--json: name it"),
        (["--questions", "99"], "choose from 1 to"),
    ],
)
def test_what_cannot_be_checked_is_said_at_once(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from radix_rope.cli import main

    (tmp_path / "config.json").write_text("{}")
    assert main(["check", "--model-path", str(tmp_path), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_resuming_measures_the_contexts_that_are_missing() -> None:
    asked = argparse.Namespace(scenario=["edit", "repeated"], questions=None, quick=False)
    every = missing_contexts(asked, None)
    assert len(every) == 2 * VARIANTS["edit"] + 2
    targets = [
        target("edit", "none", 0.1, sheet="harbour", variant=1),
        target("repeated", "all_turns", 0.1, sheet="observatory"),
        # Measured, and not asked for.
        target("reorder", "none", 0.1),
    ]
    before = dataclasses.replace(measurement(), targets=targets)
    left = missing_contexts(asked, before)
    gone = [context for context in every if context not in left]
    assert [(name, sheet.name, variant) for name, sheet, variant in gone] == [
        ("edit", "harbour", 1),
        ("repeated", "observatory", 0),
    ]
