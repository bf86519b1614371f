"""Which model a verdict is about, where it is kept, and what a server makes of it."""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from radix_rope.config import RadixRopeConfig, parse_config
from radix_rope.quality.store import load_verdict, model_fingerprint, save_verdict, verdict_path
from radix_rope.quality.verdict import Limits, judge
from tests.quality.support import measurement

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


HEAD16 = {"mode": "shifted", "repair": "head", "recompute_tokens": 16}
HEAD64 = {**HEAD16, "recompute_tokens": 64}
ATTENTION15 = {"mode": "shifted", "repair": "attention", "attention_percent": 15}
ATTENTION5 = {**ATTENTION15, "attention_percent": 5}
NONE = {"mode": "shifted", "repair": "none"}


def stored(
    passed: bool,
    *passing: dict[str, object],
    max_generations: int = 8,
    changed_limits: tuple[str, ...] = (),
) -> dict[str, object]:
    """A verdict as `radix-rope check` stores it.

    All settings were measured; those in `passing` (HEAD16 when none is named) passed.
    """
    good = (passing or (HEAD16,)) if passed else ()
    return {
        "passed": passed,
        "date": "2031-03-14",
        "options": {**good[0], "max_generations": max_generations} if passed else {"mode": "exact"},
        "environment": {"dtype": "float32"},
        "settings": [
            {"options": one, "failures": [] if one in good else ["edit: ..."]}
            for one in (NONE, HEAD16, HEAD64, ATTENTION5, ATTENTION15)
        ],
        "changed_limits": list(changed_limits),
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


@pytest.mark.parametrize("size", [0, 1, 16 * 2**10, 255 * 2**10, 256 * 2**10 + 1, 2**20])
def test_the_fingerprint_sees_other_weights_of_the_same_size(folder: Path, size: int) -> None:
    def fingerprint(content: bytes) -> str:
        (folder / "model.safetensors").write_bytes(content)
        return model_fingerprint(folder)

    zeros = bytes(size)
    first = fingerprint(zeros)
    assert fingerprint(zeros) == first
    assert size == 0 or fingerprint(b"\1" * size) != first
    for at in {0, size - 1} if size else set():
        assert fingerprint(zeros[:at] + b"\1" + zeros[at + 1 :]) != first
    if 0 < size <= 256 * 2**10:  # every byte counts
        assert fingerprint(zeros[: size // 2] + b"\1" + zeros[size // 2 + 1 :]) != first


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


def said_at_start(folder: Path, config: RadixRopeConfig, caplog: Any) -> tuple[int, str]:
    caplog.clear()
    with caplog.at_level(logging.INFO):
        check_verdict(config, str(folder), "float32")
    (record,) = caplog.records
    return record.levelno, record.getMessage()


@pytest.mark.parametrize(
    ("passing", "options"),
    [
        ((HEAD16,), {}),
        ((HEAD16,), {"recompute_tokens": 17, "attention_percent": 1}),
        ((HEAD16,), {"max_generations": 0}),
        ((HEAD64, HEAD16), {"recompute_tokens": 1000}),
        ((HEAD16,), {"recompute_tokens": 63}),
        ((NONE,), {"repair": "none"}),
        ((NONE,), {"recompute_tokens": 0}),
        ((NONE,), {"recompute_tokens": 15}),
        ((ATTENTION15,), {"repair": "attention"}),
        ((ATTENTION15,), {"repair": "attention", "attention_percent": 100}),
        ((HEAD16, ATTENTION15), {"repair": "attention"}),
    ],
)
def test_options_at_least_as_careful_as_what_passed_are_covered(
    folder: Path, caplog: pytest.LogCaptureFixture, passing: Any, options: dict[str, Any]
) -> None:
    save_verdict(model_fingerprint(folder), stored(True, *passing))
    level, said = said_at_start(folder, RadixRopeConfig(require_check=True, **options), caplog)
    assert level == logging.INFO and "not covered" not in said


@pytest.mark.parametrize(
    ("passing", "options", "said"),
    [
        ((HEAD16,), {"recompute_tokens": 15}, "repair 'head' with recompute_tokens 15"),
        ((HEAD64,), {}, "recompute_tokens 16 (passed: head 64;"),
        # More than what passed, and itself measured and not good.
        ((NONE,), {}, "recompute_tokens 16 (passed: head 0;"),
        ((HEAD16,), {"recompute_tokens": 70}, "recompute_tokens 70"),
        ((HEAD16,), {"repair": "none"}, "repair 'none'"),
        ((HEAD16,), {"recompute_tokens": 0}, "recompute_tokens 0"),
        # Attention at 5% is in the verdict, but failed.
        ((HEAD16,), {"repair": "attention", "attention_percent": 5}, "attention_percent 5"),
        ((ATTENTION15,), {"repair": "attention", "attention_percent": 14}, "attention_percent 14"),
        ((ATTENTION15,), {}, "repair 'head'"),
        ((NONE,), {"repair": "attention"}, "repair 'attention'"),
        ((ATTENTION15,), {"repair": "attention", "recompute_tokens": 0}, "gives way to 'head'"),
        ((HEAD16,), {"max_generations": 9}, "max_generations 9 (at most 8 passed)"),
        ((HEAD16,), {"rotate": False}, "rotate false"),
    ],
)
def test_options_less_careful_than_what_passed(
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    passing: Any,
    options: dict[str, Any],
    said: str,
) -> None:
    save_verdict(model_fingerprint(folder), stored(True, *passing))
    level, logged = said_at_start(folder, RadixRopeConfig(**options), caplog)
    assert level == logging.WARNING and said in logged
    with pytest.raises(CheckRequired, match=r"require_check is set.*not covered") as error:
        check_verdict(RadixRopeConfig(require_check=True, **options), str(folder), "float32")
    assert said in str(error.value)


def test_a_default_server_repeats_reuse_no_more_often_than_was_good(folder: Path) -> None:
    save_verdict(model_fingerprint(folder), stored(True, max_generations=0))
    with pytest.raises(CheckRequired, match=r"max_generations 8 \(at most 0 passed\)"):
        check_verdict(REQUIRED, str(folder), "float32")


def test_a_server_of_the_recommended_options_starts(folder: Path) -> None:
    verdict = judge(measurement({("edit", "none"): 1.0}, repeated=(1e-4, 0.02)), Limits())
    save_verdict(model_fingerprint(folder), asdict(verdict))
    options = {**verdict.options, "require_check": True}
    check_verdict(parse_config(json.dumps(options)), str(folder), "float32")


def test_limits_that_somebody_chose_are_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changed = ("truncation 9 instead of 0.01",)
    save_verdict(model_fingerprint(folder), stored(True, changed_limits=changed))
    assert "by other limits: truncation 9" in said_at_start(folder, REQUIRED, caplog)[1]
    save_verdict(model_fingerprint(folder), stored(True))
    assert "limits" not in said_at_start(folder, REQUIRED, caplog)[1]


def test_a_damaged_verdict_counts_as_none(folder: Path) -> None:
    path = verdict_path(model_fingerprint(folder))
    path.parent.mkdir(parents=True)
    path.write_text('{"passed": tr')
    check_verdict(RadixRopeConfig(), str(folder), "float32")
    with pytest.raises(CheckRequired, match="cannot be read"):
        check_verdict(REQUIRED, str(folder), "float32")


def test_another_model_in_the_same_folder_has_no_verdict(folder: Path) -> None:
    save_verdict(model_fingerprint(folder), stored(passed=True))
    (folder / "model.safetensors").write_bytes(b"54321")
    with pytest.raises(CheckRequired):
        check_verdict(REQUIRED, str(folder), "float32")
