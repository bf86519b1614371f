"""Fetching in several processes, and in processes that are killed half-way."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from radix_rope.models import fetch, store
from radix_rope.models.catalog import cached_model_path
from radix_rope.models.layout import MODEL_FILES
from tests.models.tiny import TinyModel

FETCH = """
import sys
from radix_rope.models import fetch
from radix_rope.models.catalog import ModelSource
fetch.MODELS = {{"tiny": {source!r}}}
{patch}
sys.exit(fetch.fetch_command("tiny", None, "float32"))
"""
HANG_WHILE_CONVERTING = """
import time
from radix_rope.models import convert
def hang(gguf, folder, dtype):
    (folder / "config.json").write_text("half")
    print("half-way", flush=True)
    time.sleep(600)
convert.convert = hang
"""


def start(tiny: TinyModel, patch: str = "") -> subprocess.Popen[str]:
    # Where pytest runs as a background job, SIGINT is ignored, and children inherit that.
    ignore_no_more = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    return subprocess.Popen(
        [sys.executable, "-c", ignore_no_more + FETCH.format(source=tiny.source, patch=patch)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_concurrent_calls_build_once_and_agree(tiny: TinyModel) -> None:
    processes = [start(tiny) for _ in range(3)]
    results = [process.communicate(timeout=120) for process in processes]
    target = cached_model_path("tiny", "float32")
    assert [process.returncode for process in processes] == [0, 0, 0], results
    assert {out for out, _ in results} == {f"{target}\n"}
    assert sum("converting Tiny" in err for _, err in results) == 1
    assert names(target.parent) == [target.name]
    assert names(target) == sorted(MODEL_FILES | {store.MANIFEST})


def test_one_builder_at_a_time(tmp_path: Path) -> None:
    """Also when the lock file is unlinked while others wait for it and yet others arrive."""
    inside: list[Path] = []

    def build(_: int) -> int:
        with store.workspace(tmp_path / "target") as folder:
            inside.append(folder)
            time.sleep(0.001)
            present = len(inside)
            inside.remove(folder)
        return present

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(build, range(200))) == {1}
    assert names(tmp_path) == []


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_build_is_never_taken_for_complete(tiny: TinyModel, kill: signal.Signals) -> None:
    process = start(tiny, HANG_WHILE_CONVERTING)
    assert process.stdout is not None
    assert process.stdout.readline() == "half-way\n"
    target = cached_model_path("tiny", "float32")
    assert not target.exists()
    process.send_signal(kill)
    process.communicate(timeout=60)
    assert process.returncode != 0
    left_behind = names(target.parent)
    if kill == signal.SIGKILL:
        assert len(left_behind) == 2, "a lock file and a workspace, which the next call removes"
    else:
        assert left_behind == []

    assert fetch.fetch_model("tiny") == target
    assert names(target.parent) == [target.name]
    assert names(target) == sorted(MODEL_FILES | {store.MANIFEST})
