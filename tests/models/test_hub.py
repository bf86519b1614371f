"""Models named as SGLang takes them: folders, and names on the hub that are cached."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from radix_rope.config import RadixRopeConfig
from radix_rope.integration.gate import check_verdict
from radix_rope.models.hub import model_folder
from radix_rope.quality.store import model_fingerprint, verdict_path

NAME, COMMIT = "some-org/some-model", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model as the hub's client keeps it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model = tmp_path / "hub" / "models--some-org--some-model"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    snapshot = model / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    return snapshot


def test_a_folder_is_itself(tmp_path: Path, cached: Path) -> None:
    assert model_folder(str(tmp_path)) == tmp_path


def test_a_cached_name_is_its_snapshot(cached: Path) -> None:
    assert model_folder(NAME) == cached


@pytest.mark.parametrize("named", ["some-org/other-model", "no/such/folder", "", "a b"])
def test_anything_else_stays_as_it_is(named: str, cached: Path) -> None:
    assert model_folder(named) == Path(named)


def test_a_server_started_with_a_name_finds_the_verdict_of_its_snapshot(
    cached: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RADIX_ROPE_CACHE", str(tmp_path / "cache"))
    path = verdict_path(model_fingerprint(cached))
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"the verdict .* cannot be read"):
        check_verdict(RadixRopeConfig(require_check=True), NAME, "float32")
