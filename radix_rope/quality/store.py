"""Where verdicts about models are kept, and which model a verdict is about.

Verdicts live in radix-rope's cache, not beside the model, whose folder may not be writable. May
not know how a verdict is reached; a server reads it without loading what measures.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radix_rope.models.catalog import cache_root

_SAMPLES, _SAMPLE_BYTES = 16, 16 * 1024
"""Of a weight file: that many pieces, the first and last at its ends, that long. A model of 100
files costs 25 MiB of reading."""

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.index.json")


@dataclass(frozen=True, slots=True)
class StoredVerdict:
    """What a server needs to know of a verdict.

    Attributes:
        passed: some setting keeps every limit.
        date: when it was measured, ISO.
        options: of `RadixRopeConfig`, recommended by it.
        dtype: that the model was measured in.
        judged: the options of every setting measured, and whether it keeps the limits.
        changed_limits: limits that are not this package's own, in words.
    """

    passed: bool
    date: str
    options: dict[str, Any]
    dtype: str
    judged: list[tuple[dict[str, Any], bool]]
    changed_limits: list[str]


def model_fingerprint(folder: Path) -> str:
    """Names a model: 16 hexadecimal digits, from its `config.json` and its weight files.

    Of those their names, sizes, and pieces spread over each: two trainings of one model differ
    nearly everywhere, while reading every byte would take minutes.

    Raises:
        FileNotFoundError: no model folder.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise FileNotFoundError(
            f"{folder} is no model folder: it has no config.json. Give the folder of a Hugging "
            "Face model with --model-path, or its name where it was downloaded already, or run "
            "`radix-rope fetch-model` for a small one"
        )
    digest = hashlib.sha256(config.read_bytes())
    weights = {path for pattern in _WEIGHTS for path in folder.glob(pattern)}
    for path in sorted(filter(Path.is_file, weights)):
        size = path.stat().st_size
        digest.update(f"\n{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for offset in _sample_offsets(size):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _sample_offsets(size: int) -> list[int]:
    """Where the pieces begin; together they are the whole of a small file."""
    last = size - _SAMPLE_BYTES
    if last <= (_SAMPLES - 1) * _SAMPLE_BYTES:
        return list(range(0, size, _SAMPLE_BYTES))
    return [last * i // (_SAMPLES - 1) for i in range(_SAMPLES)]


def verdict_path(fingerprint: str) -> Path:
    """The file of a model's verdict; it need not exist."""
    return cache_root() / "checks" / f"{fingerprint}.json"


def save_verdict(fingerprint: str, verdict: dict[str, Any]) -> Path:
    """Keep a verdict (of `verdict.Verdict`, as JSON), in place of an earlier one."""
    path = verdict_path(fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(verdict, indent=2) + "\n", encoding="utf-8")
    new.replace(path)
    return path


def load_verdict(folder: Path) -> StoredVerdict | None:
    """The verdict about the model in a folder; None when there is none.

    Raises:
        ValueError: the file is there and cannot be read.
    """
    if not (folder / "config.json").is_file():
        return None
    path = verdict_path(model_fingerprint(folder))
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        passed, date, options = raw["passed"], raw["date"], raw["options"]
        dtype = raw["environment"]["dtype"]
        judged = [(dict(one["options"]), not one["failures"]) for one in raw["settings"]]
        changed = [str(text) for text in raw["changed_limits"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"the verdict {path} cannot be read ({error!r}); remove it and run `radix-rope check` "
            "again"
        ) from error
    return StoredVerdict(bool(passed), str(date), dict(options), str(dtype), judged, changed)
