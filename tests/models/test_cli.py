"""The command line: arguments, exit codes, what goes to stdout, what is imported."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from radix_rope import __version__, cli
from radix_rope.models.catalog import CACHE_VARIABLE, MODELS
from tests.models.tiny import TinyModel


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from radix_rope.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'sglang', 'transformers', 'gguf', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(command.name in done.stdout for command in cli.COMMANDS)


def test_version_and_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in ((["--version"], 0), ([], 2), (["fly"], 2), (["fetch-model"], 2)):
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        assert end.value.code == code, arguments
    assert capsys.readouterr().out == f"radix-rope {__version__}\n"


def test_fetch_model_prints_the_folder_last(
    tiny: TinyModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "model"
    arguments = ["fetch-model", "tiny", "--output", str(output), "--dtype", "bfloat16"]
    for progress in ("converting Tiny to bfloat16", f"reusing {output}"):
        assert cli.main(arguments) == 0
        printed = capfd.readouterr()
        assert printed.out == f"{output}\n"
        assert progress in printed.err


def test_fetch_model_failure_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fetch-model", "gpt-17"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    known = ", ".join(sorted(MODELS))
    assert printed.err == (
        f"radix-rope fetch-model: there is no model 'gpt-17' to fetch; known models: {known}\n"
    )


def test_verify_passes_the_folder_and_the_exit_code_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def verify_command(model_path: str) -> int:
        asked.append(model_path)
        return 7

    module = SimpleNamespace(verify_command=verify_command)
    monkeypatch.setitem(sys.modules, "radix_rope.integration.rope_specs", module)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert cli.main(["verify", "--model-path", "some/where"]) == 7

    assert cli.main(["verify"]) == 1
    assert "radix-rope fetch-model smollm2-135m-instruct" in capsys.readouterr().err
    fetched = tmp_path / "models" / "smollm2-135m-instruct-float32"
    fetched.mkdir(parents=True)
    assert cli.main(["verify"]) == 7
    assert asked == ["some/where", str(fetched)]


def test_interruption_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> int:
        raise KeyboardInterrupt

    command = cli.Command("wait", "wait", lambda parser: None, interrupt)
    monkeypatch.setattr(cli, "COMMANDS", (command,))
    assert cli.main(["wait"]) == 130
