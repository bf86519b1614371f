"""What `radix-rope doctor` says, each time in an environment that really is that way."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import radix_rope
from tests.patches.test_series import SERIES, apply_in_place, copy_touched

SITE = Path(sysconfig.get_paths()["purelib"])


class Environment:
    """A site-packages folder made of links to the real one's entries, without some of them."""

    def __init__(self, folder: Path, leave_out: tuple[str, ...] = ()) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "radix_rope").symlink_to(Path(radix_rope.__file__).parent)
        for entry in SITE.iterdir():
            if not entry.name.startswith(leave_out) and not entry.is_relative_to(
                SITE / "radix_rope"
            ):
                (folder / entry.name).symlink_to(entry)

    def doctor(self, **variables: str) -> tuple[int, str]:
        """Exit code and output of `radix-rope doctor` there."""
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RADIX_ROPE", "SGLANG", "PYTHON", "CUDA"))
        }
        done = subprocess.run(
            # Without `site`, the environment that runs the tests stays out.
            [sys.executable, "-S", "-m", "radix_rope.cli", "doctor"],
            env={**environment, "PYTHONPATH": str(self.folder), **variables},
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        assert not done.stderr, done.stderr
        return done.returncode, done.stdout


def said(output: str, *parts: str) -> bool:
    missing = [part for part in parts if part not in output]
    assert not missing, f"{missing} not in:\n{output}"
    return True


def test_healthy_and_hooked(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "site")
    code, output = environment.doctor()
    assert said(output, "0.5.23", str(environment.folder / "sglang"), "hooked:", "All is well")
    assert said(output, "ModelRunner._forward_raw", "LogitsMetadata.from_forward_batch")
    assert said(output, "radix_rope = radix_rope.integration.plugin:register")
    assert said(output, "attention backend:", "kernel:", "can run here: ", "torch")
    assert code == 0


def test_healthy_and_patched(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "site", leave_out=("sglang",))
    link_metadata(environment)
    apply_in_place(copy_touched(environment.folder), SERIES)
    code, output = environment.doctor()
    assert said(output, "patched: SGLang calls radix_rope itself", "All is well")
    assert said(output, "hooks when serving: none")
    assert code == 0


@pytest.mark.parametrize("applied", [1, 2, 3, 4, 5])
def test_half_applied_patches(tmp_path: Path, applied: int) -> None:
    environment = Environment(tmp_path / "site", leave_out=("sglang",))
    link_metadata(environment)
    apply_in_place(copy_touched(environment.folder), SERIES[:applied])
    code, output = environment.doctor()
    assert said(
        output, f"half patched: {(0, 3, 4, 7, 8)[applied - 1]} of 11 steps", "applied in part"
    )
    assert said(output, "PrefillAdder.add_one_req", "make unpatch")
    assert "All is well" not in output
    assert code == 1


def test_no_sglang(tmp_path: Path) -> None:
    code, output = Environment(tmp_path / "site", leave_out=("sglang",)).doctor()
    assert said(output, "not installed", "pip install sglang==0.5.23")
    # What does not depend on SGLang is still said.
    assert said(output, "plugin:", "kernel:")
    assert code == 1


def test_wrong_version(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "site", leave_out=("sglang-",))
    metadata = environment.folder / "sglang-0.5.12.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.12\n")
    code, output = environment.doctor()
    assert said(output, "0.5.12 in", "was not tested", "0.5.23", "allow_untested_sglang")
    assert code == 1
    allowed = '{"allow_untested_sglang": true}'
    code, output = environment.doctor(RADIX_ROPE_CONFIG=allowed)
    assert said(output, "0.5.12 in", allowed, "All is well")
    assert code == 0


def test_a_missing_function_is_named(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "site", leave_out=("sglang",))
    link_metadata(environment)
    package = copy_touched(environment.folder)
    (package / "srt/managers/scheduler_components/output_streamer.py").unlink()
    code, output = environment.doctor()
    assert said(output, "has no sglang.srt.managers.scheduler_components.output_streamer")
    assert code == 1


def test_plugin_not_installed(tmp_path: Path) -> None:
    environment = Environment(
        tmp_path / "site", leave_out=("radix_rope", "__editable__.radix_rope")
    )
    code, output = environment.doctor()
    assert said(output, "entry point radix_rope of sglang.srt.plugins not found")
    assert said(output, "not installed as a package", "pip install /path/to/radix-rope")
    assert code == 1


def test_plugin_kept_out_by_the_environment(tmp_path: Path) -> None:
    code, output = Environment(tmp_path / "site").doctor(SGLANG_PLUGINS="other, radix_rope_cpu")
    assert said(output, "SGLANG_PLUGINS=other, radix_rope_cpu keeps radix_rope out")
    assert code == 1


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ('{"recompute_token": 4}', ("recompute_token", "RADIX_ROPE_CONFIG")),
        ('{"kernel": "flashinfer"}', ("kernel flashinfer cannot run on", "auto or one of")),
    ],
)
def test_wrong_options(tmp_path: Path, config: str, parts: tuple[str, ...]) -> None:
    code, output = Environment(tmp_path / "site").doctor(
        RADIX_ROPE_CONFIG=config, CUDA_VISIBLE_DEVICES=""
    )
    assert said(output, *parts)
    assert code == 1


def link_metadata(environment: Environment) -> None:
    """SGLang's metadata as installed, where its package is another one."""
    (metadata,) = SITE.glob("sglang-*.dist-info")
    (environment.folder / metadata.name).symlink_to(metadata)
