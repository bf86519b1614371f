"""`radix-rope verify` on model folders that hold a config and no weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from radix_rope.integration.rope_specs import verify_command
from tests.rotary.tiny_models import write_config


def verify(model: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: it sets up SGLang's process-wide state."""
    program = (
        "import sys; from radix_rope.integration.rope_specs import verify_command; "
        "sys.exit(verify_command(sys.argv[1]))"
    )
    return subprocess.run(
        [sys.executable, "-c", program, write_config(model, folder)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.engine
def test_two_rotations_of_one_model(tmp_path: Path) -> None:
    """Gemma 3 has two; each gets all statements, and the scaled one is the scaled one."""
    done = verify("gemma3-two-thetas", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("Gemma3RotaryEmbedding") == 2
    assert done.stdout.count(" ok") == 2 * 7 and "FAILED" not in done.stdout
    assert "all statements hold" in done.stdout


@pytest.mark.engine
def test_a_refused_model_is_named(tmp_path: Path) -> None:
    done = verify("llama-dynamic", tmp_path)
    assert done.returncode == 2
    assert "DynamicNTKScalingRotaryEmbedding" in done.stdout


def test_a_missing_folder_is_a_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify_command(str(tmp_path / "nowhere")) == 2
    assert "no config.json" in capsys.readouterr().out


def test_without_a_model_plain_rope_is_verified(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_command(None) == 0
    out = capsys.readouterr().out
    assert out.count(" ok") == 7 and "all statements hold" in out
