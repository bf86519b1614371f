"""Builds a file or folder beside its final place and moves it there in one step.

Owns the lock, the workspace and the manifest that tells a complete model folder
from anything else. Knows nothing of what is built, nor where it comes from.
"""

import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from radix_rope.models.errors import FetchError

MANIFEST = "radix-rope.json"
"""Name of the file, in every folder built here, that says what the folder holds."""


@contextmanager
def workspace(target: Path) -> Iterator[Path]:
    """An empty folder on the target's file system, for one builder of `target` at a time.

    Waits while another process or thread builds the same target, so look again whether there
    is still anything to do. Workspaces that killed builders left are removed first; this one
    goes at the end, whatever happens, and so does the lock file.

    Args:
        target: absolute path of what will be built; its parent folder is created.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.partial-"
    with _lock(target.parent / f".{target.name}.lock", target):
        for left_behind in target.parent.iterdir():
            if left_behind.name.startswith(prefix):
                shutil.rmtree(left_behind, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _lock(path: Path, target: Path) -> Iterator[None]:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another process that makes {target}", file=sys.stderr)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The holder before us unlinked the file when it was done: a lock on a file
            # without that name excludes nobody, so open the name again.
            if _is_open_at(descriptor, path):
                break
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _is_open_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def write_manifest(folder: Path, identity: Mapping[str, Any]) -> None:
    """Record in `folder` what it holds and the size in bytes of each of its files.

    Args:
        folder: folder without subfolders, otherwise finished.
        identity: JSON object that differs whenever the content should.
    """
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    text = json.dumps({**identity, "files": files}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def is_complete(folder: Path, identity: Mapping[str, Any]) -> bool:
    """Whether `folder` holds what `identity` names, with every file at its recorded size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, int] = manifest.pop("files")
        return manifest == dict(identity) and all(
            (folder / name).stat().st_size == size for name, size in files.items()
        )
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def require_replaceable(target: Path, names: frozenset[str]) -> None:
    """Refuse a target that holds anything but an empty folder or an earlier build.

    Args:
        target: absolute path.
        names: every file name that a build writes, besides the manifest.

    Raises:
        FetchError: there is something at `target` that must not be overwritten.
    """
    if not target.exists():
        return
    if not target.is_dir():
        reason = "there is a file of that name"
    elif os.path.ismount(target):
        reason = "it is a mount point, which cannot be replaced in one step"
    elif Path.cwd().is_relative_to(target):
        reason = "it is the current folder, which would be replaced under your feet"
    else:
        found = {path.name for path in target.iterdir()}
        foreign = sorted(found - names - {MANIFEST})
        if not found or (MANIFEST in found and not foreign):
            return
        what = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        reason = (
            f"it holds files that radix-rope did not write ({what})"
            if foreign
            else f"it has no {MANIFEST}, so radix-rope did not write it"
        )
    raise FetchError(
        f"cannot put the model into {target}: {reason}. Nothing was changed; "
        f"name another folder, or remove this one"
    )


def publish(built: Path, target: Path) -> None:
    """Move a finished file or folder from its workspace to `target`, replacing what is there.

    Must run inside `workspace(target)`. A process killed in between leaves either the old
    target, or none, or the new one.
    """
    if target.is_dir() and any(target.iterdir()):
        # rename() replaces an empty folder only.
        os.replace(target, built.parent / "replaced")
    os.replace(built, target)
