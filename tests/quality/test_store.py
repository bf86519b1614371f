"""Which model a verdict is about, where it is kept, and what a server makes of it."""

import logging
from pathlib import Path

import pytest

from radix_rope.config import RadixRopeConfig
from radix_rope.quality.store import load_verdict, model_fingerprint, save_verdict, verdict_path

pytest.importorskip("sglang")

from radix_rope.integration.gate import CheckRequired, check_verdict

REQUIRED = RadixRopeConfig(require_check=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RADIX_ROPE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"12345")
    return folder


def stored(passed: bool) -> dict[str, object]:
    options = {"mode": "shifted", "repair": "head"} if passed else {"mode": "exact"}
    return {
        "passed": passed,
        "date": "2031-03-14",
        "options": options,
        "environment": {"dtype": "float32"},
    }


def test_the_fingerprint_follows_config_and_weights(folder: Path) -> None:
    first = model_fingerprint(folder)
    (folder / "README.md").write_text("not part of the model")
    assert model_fingerprint(folder) == first
    (folder / "model.safetensors").write_bytes(b"1234")
    second = model_fingerprint(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    third = model_fingerprint(folder)
    (folder / "model-2.safetensors").write_bytes(b"1")
    assert len({first, second, third, model_fingerprint(folder)}) == 4


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        model_fingerprint(tmp_path)


def test_without_a_verdict(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_verdict(folder) is None
    with caplog.at_level(logging.INFO):
        check_verdict(RadixRopeConfig(), str(folder), "float32")
    assert "no verdict" in caplog.text and "radix-rope check --model-path" in caplog.text
    with pytest.raises(CheckRequired, match=r"no verdict.*radix-rope check --model-path"):
        check_verdict(REQUIRED, str(folder), "float32")


def test_a_name_on_a_hub_has_no_verdict() -> None:
    check_verdict(RadixRopeConfig(), "somebody/some-model", "float32")
    with pytest.raises(CheckRequired):
        check_verdict(REQUIRED, "somebody/some-model", "float32")


def test_a_passing_verdict_lets_a_server_start(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_verdict(model_fingerprint(folder), stored(passed=True))
    with caplog.at_level(logging.INFO):
        check_verdict(REQUIRED, str(folder), "float32")
    for part in ("passed on 2031-03-14", "float32", "'repair': 'head'"):
        assert part in caplog.text
    assert "served in" not in caplog.text
    check_verdict(REQUIRED, str(folder), "bfloat16")
    caplog.clear()
    with caplog.at_level(logging.INFO):
        check_verdict(REQUIRED, str(folder), "bfloat16")
    assert "served in bfloat16 now" in caplog.text


def test_a_failed_verdict(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_verdict(model_fingerprint(folder), stored(passed=False))
    check_verdict(RadixRopeConfig(), str(folder), "float32")
    assert caplog.records[-1].levelno == logging.WARNING
    with pytest.raises(CheckRequired, match="failed on 2031-03-14"):
        check_verdict(REQUIRED, str(folder), "float32")


def test_a_damaged_verdict_counts_as_none(folder: Path) -> None:
    path = verdict_path(model_fingerprint(folder))
    path.parent.mkdir(parents=True)
    path.write_text('{"passed": tr')
    check_verdict(RadixRopeConfig(), str(folder), "float32")
    with pytest.raises(CheckRequired, match="cannot be read"):
        check_verdict(REQUIRED, str(folder), "float32")


def test_another_model_in_the_same_folder_has_no_verdict(folder: Path) -> None:
    save_verdict(model_fingerprint(folder), stored(passed=True))
    (folder / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(CheckRequired):
        check_verdict(REQUIRED, str(folder), "float32")
