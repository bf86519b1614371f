"""Builds a second SGLang tree with the series in `patches/` applied.

Owns where that tree lies and whether the series fits. Imports neither SGLang
nor torch: it copies files and lets `git apply` decide.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from radix_rope.models.catalog import cache_root

PATCHES = Path(__file__).resolve().parent.parent / "patches"
"""Folder of the series, one subfolder per SGLang version; only a checkout has it."""

_STAMP = ".radix-rope-patched"


class PatchError(RuntimeError):
    """The patched tree cannot be built; the message says why and what to do."""


def patched_root() -> Path:
    """Folder to put on PYTHONPATH; the patched `sglang` package lies in it."""
    return cache_root() / "patched"


def installed_sglang() -> tuple[str, Path]:
    """Version and package folder of the installed SGLang, whatever PYTHONPATH says.

    Raises:
        PatchError: SGLang is not installed.
    """
    try:
        found = distribution("sglang")
    except PackageNotFoundError:
        raise PatchError("SGLang is not installed in this environment; run `make setup`.") from None
    folder = Path(str(found.locate_file("sglang")))
    if not folder.is_dir():
        # An editable install keeps only metadata in site-packages.
        spec = importlib.util.find_spec("sglang")
        if spec is None or not spec.submodule_search_locations:
            raise PatchError(f"SGLang {found.version} is installed but has no package folder.")
        folder = Path(next(iter(spec.submodule_search_locations)))
    return found.version, folder


def series(version: str) -> list[Path]:
    """The patches for an SGLang version, in order.

    Raises:
        PatchError: there are none; names the versions that have some.
    """
    patches = sorted((PATCHES / f"sglang-{version}").glob("*.patch"))
    if patches:
        return patches
    if not PATCHES.is_dir():
        raise PatchError(
            f"the patches are not here ({PATCHES}): they come with a checkout of radix-rope, "
            "not with an installed package. Run this from a checkout."
        )
    have = ", ".join(sorted(folder.name for folder in PATCHES.glob("sglang-*")))
    raise PatchError(f"there are no patches for SGLang {version}, only for {have}.")


def touched(patches: Sequence[Path]) -> list[str]:
    """Files that a series changes or adds, relative to the folder of `sglang/`."""
    names: set[str] = set()
    for patch in patches:
        for line in patch.read_text().splitlines():
            if line.startswith("diff --git a/"):
                names.add(line.split(" b/", 1)[1])
    return sorted(names)


def dry_run(package: Path, patches: Sequence[Path], result: Path) -> None:
    """Apply a series to copies of the files that it touches, never to `package` itself.

    Args:
        package: folder of an `sglang` package.
        patches: the series, in order.
        result: empty folder; holds the patched files afterwards.

    Raises:
        PatchError: naming the patch that does not fit and git's reason.
    """
    for name in touched(patches):
        source = package.parent / name
        if source.is_file():
            (result / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, result / name)
    for patch in patches:
        for only_check in (["--check"], []):
            _git_apply(result, patch, only_check, package)


def _git_apply(folder: Path, patch: Path, options: list[str], package: Path) -> None:
    # Whatever repository surrounds the folder must not matter.
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        outside.pop(name, None)
    try:
        done = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", *options, str(patch)],
            cwd=folder,
            env=outside,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        raise PatchError("git is not installed; it applies the patches.") from None
    if done.returncode != 0:
        raise PatchError(
            f"{patch.name} does not fit {package}:\n{done.stderr.strip()}\n"
            "Nothing was changed. The files differ from the published wheel: reinstall SGLang "
            "(`pip install --force-reinstall --no-deps sglang==VERSION`), or, if it was "
            "patched already, use it as it is (`radix-rope doctor` tells)."
        )


def apply() -> tuple[Path, bool]:
    """Build the patched tree, or reuse it where nothing changed since.

    Returns:
        The folder for PYTHONPATH, and whether it was built now.

    Raises:
        PatchError: nothing was changed.
    """
    version, package = installed_sglang()
    patches = series(version)
    target = patched_root()
    stamp = _stamp_of(version, package, patches)
    if target.is_dir() and _read(target / _STAMP) == stamp:
        return target, False
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="patched-") as scratch:
        changed, tree = Path(scratch) / "changed", Path(scratch) / "tree"
        changed.mkdir()
        dry_run(package, patches, changed)
        shutil.copytree(package, tree / "sglang", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(changed, tree, dirs_exist_ok=True)
        (tree / _STAMP).write_text(stamp)
        remove()
        tree.rename(target)
    return target, True


def remove() -> bool:
    """Delete the patched tree; the installed SGLang was never touched.

    Returns:
        Whether there was one.

    Raises:
        PatchError: the folder was not made by `apply`.
    """
    target = patched_root()
    if not target.exists():
        return False
    if not (target / _STAMP).is_file():
        raise PatchError(f"{target} was not made by `make patched-env`; remove it by hand.")
    shutil.rmtree(target)
    return True


def check() -> list[str]:
    """Names of the patches, after a dry run on the installed SGLang.

    Raises:
        PatchError: one does not fit.
    """
    version, package = installed_sglang()
    patches = series(version)
    with tempfile.TemporaryDirectory() as scratch:
        dry_run(package, patches, Path(scratch))
    return [patch.name for patch in patches]


def _stamp_of(version: str, package: Path, patches: Sequence[Path]) -> str:
    digest = hashlib.sha256(f"{version} {package}\n".encode())
    for patch in patches:
        digest.update(patch.read_bytes())
    for name in touched(patches):
        source = package.parent / name
        digest.update(source.read_bytes() if source.is_file() else b"absent")
    return digest.hexdigest()


def _read(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


def main(arguments: Sequence[str]) -> int:
    """`python -m radix_rope.patching apply|remove|check`; what `make patched-env` calls."""
    try:
        match list(arguments):
            case ["apply"]:
                target, built = apply()
                print(f"patched SGLang {'built' if built else 'already built'} in {target}")
                print(f"use it with PYTHONPATH={target}")
            case ["remove"]:
                removed = remove()
                print(
                    f"{patched_root()} {'removed' if removed else 'does not exist'}; "
                    "the installed SGLang was never changed"
                )
            case ["check"]:
                for name in check():
                    print(f"fits: {name}")
            case _:
                print("usage: python -m radix_rope.patching apply|remove|check", file=sys.stderr)
                return 2
    except PatchError as error:
        print(f"radix-rope: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
