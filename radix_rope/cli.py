"""The `radix-rope` command: one `Command` per subcommand.

Knows the arguments of each subcommand and nothing of its work: the module that
does it is imported when the subcommand runs, so `--help` loads neither torch nor SGLang.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from radix_rope import __version__
from radix_rope.models.catalog import DEFAULT_MODEL, DTYPES, MODELS, cached_model_path
from radix_rope.models.hub import model_folder
from radix_rope.quality.scenarios import SCENARIOS

_FOLDER = "model folder, or the name of a model that is in the hub's cache on this machine"


@dataclass(frozen=True)
class Command:
    """One subcommand. To add one, write its two functions and append it to `COMMANDS`."""

    name: str
    help: str
    """One line for `radix-rope --help`."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Does the work and returns the exit code."""


def _fetch_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help=f"one of: {', '.join(sorted(MODELS))}")
    parser.add_argument(
        "--output", metavar="DIR", help="folder to make (default: one in radix-rope's cache)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default=DTYPES[0], help="dtype of the weights (%(default)s)"
    )


def _fetch_model(arguments: argparse.Namespace) -> int:
    from radix_rope.models.fetch import fetch_command

    return fetch_command(arguments.name, arguments.output, arguments.dtype)


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model-path",
        type=model_folder,
        metavar="DIR",
        help=f"{_FOLDER} (default: the fetched {DEFAULT_MODEL})",
    )


def _verify(arguments: argparse.Namespace) -> int:
    model_path = arguments.model_path
    if model_path is None:
        model_path = cached_model_path()
        if not model_path.is_dir():
            print(
                f"radix-rope verify: no model was fetched to {model_path} yet; run "
                f"`radix-rope fetch-model {DEFAULT_MODEL}` first, or name a folder with "
                f"--model-path",
                file=sys.stderr,
            )
            return 1
    from radix_rope.integration.rope_specs import verify_command

    return verify_command(str(model_path))


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def _doctor(arguments: argparse.Namespace) -> int:
    from radix_rope.doctor import doctor_command

    return doctor_command()


def _add_model_path(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--model-path",
        type=model_folder,
        default=cached_model_path(),
        metavar="DIR",
        help=f"{what} (default: the fetched {DEFAULT_MODEL})",
    )


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_model_path(parser, _FOLDER)
    add("--json", type=Path, metavar="F", help="write every measured target and the verdict")
    add("--plot", type=Path, metavar="F", help="write the chart (needs matplotlib)")
    add("--write-config", type=Path, metavar="F", help="write the options for --radix-rope-config")
    add("--quick", action="store_true", help="a try: few questions, no verdict is stored")
    add(
        "--scenario",
        action="append",
        metavar="NAME",
        choices=SCENARIOS,
        help=f"measure this one alone; may be repeated; one of: {', '.join(SCENARIOS)}",
    )
    add("--questions", type=int, metavar="N", help="questions a fact sheet (default: all)")
    add("--resume", action="store_true", help="keep the scenarios that --json already holds")
    add(
        "--max-kl",
        action="append",
        default=[],
        metavar="[SCENARIO=]NATS",
        help="limit of the mean KL, of one scenario or of all that have one; may be repeated",
    )
    add(
        "--min-kept",
        type=float,
        default=0.95,
        metavar="SHARE",
        help="share of the gold answers of the exact run that must be kept (%(default)s)",
    )
    add("--dtype", help="dtype of the weights (default: float32 on a CPU, else SGLang's choice)")
    add(
        "--engine-args",
        default="{}",
        metavar="JSON",
        help="more arguments of sglang.Engine, as a JSON object",
    )


def _check(arguments: argparse.Namespace) -> int:
    from radix_rope.quality.command import check_command

    return check_command(arguments)


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_model_path(parser, f"{_FOLDER}; only its tokenizer is read")
    add(
        "--donors",
        type=Path,
        nargs="+",
        action="extend",
        required=True,
        metavar="FILE",
        help="prompts that were served before, in this order",
    )
    add("--prompt", type=Path, required=True, metavar="FILE", help="the prompt to explain")
    add("--html", type=Path, metavar="F", help="write it as one HTML file too")
    add("--no-text", action="store_true", help="print the table alone, not the prompt's text")
    add("--tokens", action="store_true", help="the files hold token ids, each a JSON list")
    add("--page-size", type=int, default=1, metavar="N", help="the server's (%(default)s)")
    add(
        "--radix-rope-config",
        metavar="JSON",
        help="the server's options as a JSON object (default: RADIX_ROPE_CONFIG)",
    )


def _explain(arguments: argparse.Namespace) -> int:
    from radix_rope.explain.command import explain_command

    return explain_command(arguments)


COMMANDS = (
    Command(
        "fetch-model",
        "fetch a small model and convert it for SGLang and transformers",
        _fetch_model_arguments,
        _fetch_model,
    ),
    Command(
        "verify",
        "check, on a model's real RoPE, that rotated keys are the keys of the new positions",
        _verify_arguments,
        _verify,
    ),
    Command(
        "check",
        "measure how far reuse changes a model's answers; non-zero exit when no setting passes",
        _check_arguments,
        _check,
    ),
    Command(
        "explain",
        "show which parts of a prompt would be exact, reused, recomputed or computed; no engine",
        _explain_arguments,
        _explain,
    ),
    Command(
        "doctor",
        "say which SGLang is in use, how radix_rope is attached to it, and what is wrong",
        _doctor_arguments,
        _doctor,
    ),
)
"""Every subcommand, in the order of `--help`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        arguments: without the program's name; None for those of the process.

    Returns:
        Exit code: 0 for success, 130 when interrupted.

    Raises:
        SystemExit: from argparse, after `--help`, `--version` or wrong arguments (code 2).
    """
    parser = argparse.ArgumentParser(
        prog="radix-rope", description="Reuse cached KV at any offset in SGLang."
    )
    parser.add_argument("--version", action="version", version=f"radix-rope {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    parsed = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = parsed.run
    try:
        return run(parsed)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
