"""The series fits the published wheel, and building a patched tree is safe to repeat."""

import base64
import hashlib
import inspect
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from radix_rope import patching
from radix_rope.integration import seams

VERSION = "0.5.23"
SERIES = patching.series(VERSION)


def copy_touched(folder: Path) -> Path:
    """The wheel's files that the series touches, in a tree of their own; the package's folder."""
    _, package = patching.installed_sglang()
    for name in patching.touched(SERIES):
        if (package.parent / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(package.parent / name, folder / name)
    (folder / "sglang" / "__init__.py").touch()
    return folder / "sglang"


def apply_in_place(package: Path, patches: list[Path]) -> None:
    """Patch a tree itself, as somebody would who does it by hand."""
    with tempfile.TemporaryDirectory() as folder:
        patching.dry_run(package, patches, Path(folder))
        shutil.copytree(folder, package.parent, dirs_exist_ok=True)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small installed SGLang and an empty cache of ours; the package's folder."""
    package = copy_touched(tmp_path / "site")
    monkeypatch.setattr(patching, "installed_sglang", lambda: (VERSION, package))
    monkeypatch.setenv("RADIX_ROPE_CACHE", str(tmp_path / "cache"))
    return package


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_installed_files_are_the_published_ones() -> None:
    found = distribution("sglang")
    assert found.version == VERSION
    hashes = {str(file): file.hash for file in found.files or [] if file.hash is not None}
    old = [name for name in patching.touched(SERIES) if name in hashes]
    assert len(old) == len(patching.touched(SERIES)) - 1  # one file is new
    for name in old:
        digest = hashlib.sha256(Path(str(found.locate_file(name))).read_bytes()).digest()
        assert base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == hashes[name].value, name


def test_each_patch_fits_in_order_and_can_be_undone(tmp_path: Path) -> None:
    copy_touched(tmp_path)
    before = content(tmp_path)
    environment = {"PATH": "/usr/bin:/bin", "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}

    def git(*arguments: str) -> None:
        command = ["git", "apply", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, (arguments, done.stderr)
        # Whitespace errors are printed as warnings.
        assert not done.stderr, done.stderr

    for patch in SERIES:
        git("--check", str(patch))
        git(str(patch))
    assert content(tmp_path) != before
    for patch in reversed(SERIES):
        git("-R", str(patch))
    assert content(tmp_path) == before


def test_every_patch_says_why_and_the_list_says_what_it_touches() -> None:
    readme = (patching.PATCHES / "README.md").read_text()
    for number, patch in enumerate(SERIES, 1):
        text = patch.read_text()
        assert patch.name.startswith(f"{number:04d}-")
        message, diff = text.split("\ndiff --git", 1)
        assert len(message.split("\n\n", 1)[1].split()) > 40, "a message that explains nothing"
        added = len(re.findall(r"^\+(?!\+\+ )", diff, re.M))
        removed = len(re.findall(r"^-(?!-- )", diff, re.M))
        counts = f"+{added}" + (f" −{removed}" if removed else "")
        assert f"| `{number:04d}` | {counts} |" in readme, (patch.name, counts)


def test_build_reuse_and_remove(wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (wheel / "untouched.py").write_text("x = 1\n")
    before = content(wheel)
    assert patching.main(["check"]) == 0
    assert not patching.patched_root().exists()
    assert patching.main(["apply"]) == 0
    assert f"PYTHONPATH={patching.patched_root()}" in capsys.readouterr().out
    after = content(patching.patched_root() / "sglang")
    changed = {f"sglang/{name}" for name in after if before.get(name) != after[name]}
    assert changed == set(patching.touched(SERIES))
    assert content(wheel) == before, "the installed SGLang was changed"
    steps = seams.read_steps(patching.patched_root() / "sglang")
    assert steps == dict.fromkeys(seams.SERVING_PATH, True)
    assert seams.read_steps(wheel) == dict.fromkeys(seams.SERVING_PATH, False)
    assert seams.has_impl_option(patching.patched_root() / "sglang")
    assert not seams.has_impl_option(wheel)

    assert patching.apply() == (patching.patched_root(), False)
    with (wheel / "srt" / "server_args.py").open("a") as file:
        file.write("# another build\n")
    assert patching.apply() == (patching.patched_root(), True)
    assert (patching.patched_root() / "sglang/srt/server_args.py").read_text().endswith("build\n")

    assert patching.main(["remove"]) == 0
    assert "removed" in capsys.readouterr().out
    assert not patching.patched_root().exists()
    assert patching.main(["remove"]) == 0
    assert "does not exist" in capsys.readouterr().out


def test_a_hunk_that_does_not_fit_is_refused(
    wheel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = patching.apply()
    good = content(root)
    file = wheel / "srt" / "layers" / "logits_processor.py"
    file.write_text(file.read_text().replace("def from_forward_batch(", "def from_batch("))
    before = content(wheel)
    for command in ("check", "apply"):
        assert patching.main([command]) == 1
        message = capsys.readouterr().err
        assert SERIES[2].name in message and "logits_processor.py" in message, message
        assert "reinstall SGLang" in message
    assert content(wheel) == before
    assert content(root) == good, "the tree built before was lost"
    assert [p.name for p in root.parent.iterdir()] == [root.name], "left-overs"


def test_a_patched_tree_is_not_patched_again(wheel: Path) -> None:
    apply_in_place(wheel, SERIES)
    with pytest.raises(patching.PatchError, match=r"0001-.* does not fit(.|\n)*radix-rope doctor"):
        patching.apply()
    assert not patching.patched_root().exists()


def test_other_versions_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, wheel: Path) -> None:
    monkeypatch.setattr(patching, "installed_sglang", lambda: ("0.5.12", wheel))
    with pytest.raises(patching.PatchError, match=r"0\.5\.12, only for sglang-0\.5\.23"):
        patching.apply()


def test_remove_leaves_a_folder_of_somebody_else(wheel: Path) -> None:
    patching.patched_root().mkdir(parents=True)
    (patching.patched_root() / "mine").touch()
    with pytest.raises(patching.PatchError, match="by hand"):
        patching.remove()
    assert (patching.patched_root() / "mine").exists()


@pytest.fixture
def extend_step(wheel: Path) -> Callable[..., Any]:
    """The decorator of patch 0002, from the patched file itself."""
    root, _ = patching.apply()
    module = ModuleType("extend_step")
    source = (root / "sglang" / "srt" / "mem_cache" / "extend_step.py").read_text()
    exec(compile(source, "extend_step.py", "exec"), module.__dict__)
    decorator: Callable[..., Any] = module.extend_step
    return decorator


def test_a_step_is_its_function_until_a_cache_takes_part(extend_step: Callable[..., Any]) -> None:
    class Batch:
        @extend_step
        def prepare(self, n: int, *, twice: bool = False) -> int:
            """What it does."""
            return 2 * n if twice else n

        @classmethod
        @extend_step
        def new(cls, n: int) -> tuple[type, int]:
            return cls, n

    class Special(Batch):
        pass

    assert Batch().prepare(3, twice=True) == 6
    assert Special.new(3) == (Special, 3)
    assert Batch.prepare.__doc__ == "What it does."
    assert list(inspect.signature(Batch.prepare).parameters) == ["self", "n", "twice"]
    with pytest.raises(TypeError, match="prepare"):
        Batch().prepare()

    Batch.prepare.around = lambda original, batch, n, **more: original(batch, n + 1, **more)
    Batch.new.__func__.around = lambda original, cls, n: original(cls, n + 10)
    assert Batch().prepare(3, twice=True) == 8
    assert Special.new(3) == (Special, 13)


def test_a_step_can_be_traced_without_a_graph_break(extend_step: Callable[..., Any]) -> None:
    import torch

    @extend_step
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    compiled = torch.compile(lambda x: double(x) + 1, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0))
