"""`radix-rope doctor`: what is installed, how it fits together, and what is wrong.

Looks at files and metadata only, so it works where SGLang is missing, broken
or of another version. It starts no server and loads no model.
"""

import json
import os
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path

from radix_rope.config import ConfigError, RadixRopeConfig, config_from_env
from radix_rope.integration import seams

PLUGIN_NAME = "radix_rope"
PLUGIN_GROUP = "sglang.srt.plugins"
PLATFORM_NAME = "radix_rope_cpu"
PLATFORM_GROUP = "sglang.srt.platforms"

_SGLANG = f"sglang=={seams.TESTED_SGLANG_VERSIONS[-1]}"
_INSTALL_PLUGIN = "install it with the Python that runs SGLang: pip install /path/to/radix-rope"


@dataclass
class Report:
    """What was found (label, text) and what is wrong (with what to do), in order."""

    facts: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def fact(self, label: str, text: str) -> None:
        """Add something that was found."""
        self.facts.append((label, text))

    def problem(self, text: str) -> None:
        """Add something that is wrong, with what to do about it."""
        self.problems.append(text)

    def text(self) -> str:
        """The report for people."""
        lines = [f"{label + ':':<20}{text}" for label, text in self.facts]
        if self.problems:
            lines += ["", "What is wrong:", *(f"- {problem}" for problem in self.problems)]
        else:
            lines += ["", "All is well: start SGLang with --radix-cache-impl radix_rope."]
        return "\n".join(lines)


def doctor_command() -> int:
    """Print the report; 0 when nothing is wrong, else 1."""
    report = examine()
    print(report.text())
    return 1 if report.problems else 0


def examine() -> Report:
    """Look at everything, in the order in which a server would need it."""
    report = Report()
    config = _config(report)
    folder = _sglang(report, config)
    if folder is not None:
        _form(report, folder)
    _plugins(report)
    _device(report, config)
    return report


def _config(report: Report) -> RadixRopeConfig:
    try:
        config = config_from_env()
    except ConfigError as error:
        report.problem(f"{error} (set in RADIX_ROPE_CONFIG)")
        return RadixRopeConfig()
    default = RadixRopeConfig()
    changed = {
        option.name: getattr(config, option.name)
        for option in fields(config)
        if getattr(config, option.name) != getattr(default, option.name)
    }
    report.fact("options", json.dumps(changed) if changed else "defaults")
    return config


def _sglang(report: Report, config: RadixRopeConfig) -> Path | None:
    """Folder of the `sglang` package that Python would import."""
    spec = find_spec("sglang")
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        installed = None
    if spec is None or not spec.submodule_search_locations:
        report.fact("SGLang", "not installed")
        report.problem(f"SGLang is not installed in this environment: pip install {_SGLANG}")
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    report.fact("SGLang", f"{installed or 'of unknown version'} in {folder}")
    try:
        seams.check_version(config.allow_untested_sglang, installed or "of unknown version")
    except seams.SGLangVersionError as error:
        report.problem(str(error))
    return folder


def _form(report: Report, folder: Path) -> None:
    """Whether SGLang calls radix_rope itself (patched) or is wrapped at run time (hooked)."""
    state = seams.read_steps(folder)
    steps = [_short(target) for target, found in state.items() if found is True]
    hooks = [_short(target) for target, found in state.items() if found is False]
    missing = [target for target, found in state.items() if found is None]
    option = seams.has_impl_option(folder)
    if missing:
        report.problem(
            f"this SGLang has no {', '.join(missing)}, which radix_rope wraps: install {_SGLANG}"
        )
    if not steps and not option:
        report.fact("form", "hooked: functions of an unmodified SGLang are wrapped at run time")
    elif not hooks and option:
        report.fact("form", "patched: SGLang calls radix_rope itself")
    else:
        report.fact("form", f"half patched: {len(steps)} of {len(state)} steps are in SGLang")
        absent = hooks + ([] if option else ["--radix-cache-impl"])
        report.problem(
            f"the patches were applied in part ({', '.join(absent)} not patched): apply all of "
            "patches/ or none. `make unpatch` and `make patched-env` build the tree anew; an "
            f"installed SGLang is restored by pip install --force-reinstall --no-deps {_SGLANG}"
        )
    start_up = [_short(seams.ADD_CLI_ARGS), _short(seams.RESOLVE_ARGS)]
    report.fact("hooks at start-up", f"{', '.join(start_up)} (command line only)")
    report.fact("hooks when serving", ", ".join(hooks) or "none")


def _short(target: str) -> str:
    return ".".join(target.split(".")[-2:])


def _plugins(report: Report) -> None:
    """Whether SGLang would find and load radix_rope's entry points."""
    allowed = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")} - {""}
    for label, group, name in (
        ("plugin", PLUGIN_GROUP, PLUGIN_NAME),
        ("CPU platform", PLATFORM_GROUP, PLATFORM_NAME),
    ):
        found = [entry for entry in entry_points(group=group) if entry.name == name]
        if not found:
            report.fact(label, f"entry point {name} of {group} not found")
            report.problem(
                f"SGLang cannot find the entry point {name} ({group}), so radix_rope is not "
                f"installed as a package: {_INSTALL_PLUGIN}"
            )
        elif allowed and name not in allowed:
            report.fact(label, f"{name}, kept out by SGLANG_PLUGINS")
            report.problem(
                f"SGLANG_PLUGINS={os.environ['SGLANG_PLUGINS']} keeps {name} out: add it, or "
                "unset the variable"
            )
        else:
            report.fact(label, f"{name} = {found[0].value}")


def _device(report: Report, config: RadixRopeConfig) -> None:
    """Device, attention backend and kernel that a server here would use."""
    try:
        import torch
    except ImportError as error:
        report.problem(f"torch cannot be imported ({error}): it comes with pip install {_SGLANG}")
        return
    from radix_rope.integration.cpu.activate import activate
    from radix_rope.integration.support import ATTENTION_BACKENDS
    from radix_rope.rotary.corrector import available_kernels

    ours = activate() is not None
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    device = accelerator.type if accelerator is not None else "cpu"
    if ours:
        report.fact("platform", "cpu, served by radix_rope's CPU platform (no accelerator found)")
        report.fact("attention backend", "radix_rope_cpu, unless --attention-backend names another")
    else:
        where = f"{device}, served by SGLang"
        if accelerator is not None and device == "cuda":
            where += f" ({torch.cuda.get_device_name()})"
        report.fact("platform", where)
        served = ", ".join(name for name in ATTENTION_BACKENDS if name != "radix_rope_cpu")
        report.fact("attention backend", f"SGLang's choice; radix_rope works with {served}")
    usable = available_kernels(device)
    if config.kernel == "auto":
        report.fact("kernel", f"{usable[0]} (can run here: {', '.join(usable)})")
    elif config.kernel in usable:
        report.fact("kernel", f"{config.kernel}, as configured")
    else:
        report.fact("kernel", f"{config.kernel} was asked for and cannot run here")
        report.problem(
            f"kernel {config.kernel} cannot run on {device} here: choose auto or one of "
            f"{', '.join(usable)}"
        )
