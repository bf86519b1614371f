"""Server-wide options of radix_rope: names, types, ranges, defaults.

Read once per process from `--radix-rope-config` or `RADIX_ROPE_CONFIG`. Knows
neither SGLang nor torch, so that a wrong option is refused before anything
heavy is loaded.
"""

import json
import os
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

ENV_VAR = "RADIX_ROPE_CONFIG"

MODES = ("shifted", "opt_in", "exact", "off")
REPAIRS = ("none", "head", "attention")
KERNELS = ("auto", "cpu", "torch", "triton", "flashinfer")

# Inclusive ranges of the integer options.
RANGES: dict[str, tuple[int, int]] = {
    "min_run_tokens": (1, 1_000_000),
    "recompute_tokens": (0, 1_000_000),
    "attention_percent": (1, 100),
    "stride": (4, 4096),
    "max_generations": (0, 1000),
    "max_roundings": (1, 1000),
}
CHOICES: dict[str, tuple[str, ...]] = {"mode": MODES, "repair": REPAIRS, "kernel": KERNELS}


class ConfigError(ValueError):
    """An option that cannot be accepted; the message lists what is allowed."""


@dataclass(frozen=True)
class RadixRopeConfig:
    """Options of the server; every field can be set in the JSON object.

    Attributes:
        mode: `shifted` reuses KV at any offset unless a request asks for `exact`;
            `opt_in` does so only for requests that ask for `shifted`; `exact` keeps
            the content index but reuses only what stock SGLang would, whatever a
            request asks; `off` keeps no index.
        min_run_tokens: shortest run worth reusing, after its head was taken off.
        recompute_tokens: tokens computed again at the head of a run that nothing before it
            shares with its donor; fewer where up to 256 tokens do.
        repair: which tokens of a run are computed again: `none`, its `head`, or those
            that the request's last gap looks at most (`attention`).
        attention_percent: how many of 100 run tokens `attention` computes again.
        stride: distance of the anchors; a shared run of `2 * stride - 1` tokens
            is always found.
        max_generations: reuses of reused KV allowed in a row; 0 takes exact KV alone as donor.
        max_roundings: how often a key may be rotated and rounded in a row; always
            1 with an fp8 cache, whose keys are moved from the original only.
        kernel: which correction kernel moves the keys.
        rotate: `false` copies keys without rotating them. Wrong answers; only
            for showing what the rotation is for.
        explain: log one line per planned request: what is reused, from where, and what was
            given up. Positions and counts, no prompt content.
        recompute_all: split the prefill as planned but reuse nothing. For tests.
        check_plans: verify every plan before it is used, and let failed assertions through
            instead of computing the batch whole. For tests.
        require_check: refuse to start unless the model passed `radix-rope check` with a setting
            that these options are at least as careful as.
        allow_untested_sglang: run on an SGLang version nobody tested.
    """

    mode: str = "shifted"
    min_run_tokens: int = 64
    recompute_tokens: int = 16
    repair: str = "head"
    attention_percent: int = 15
    stride: int = 32
    max_generations: int = 8
    max_roundings: int = 8
    kernel: str = "auto"
    rotate: bool = True
    explain: bool = False
    recompute_all: bool = False
    check_plans: bool = False
    require_check: bool = False
    allow_untested_sglang: bool = False

    def __post_init__(self) -> None:
        """Refuse values of a wrong type or out of range (ConfigError)."""
        for field in fields(self):
            check_option(field.name, getattr(self, field.name))


def describe_options(names: Collection[str] | None = None) -> str:
    """One line per option (all, or those named): name, what it accepts, default."""
    return "\n".join(
        f"  {field.name}: {_accepts(field.name)}; default {json.dumps(field.default)}"
        for field in fields(RadixRopeConfig)
        if names is None or field.name in names
    )


def parse_config(text: str) -> RadixRopeConfig:
    """Read a JSON object of options.

    Raises:
        ConfigError: not a JSON object, unknown option, wrong type or out of range.
    """
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"radix_rope: the configuration is not valid JSON ({error}): {text!r}. "
            f"Give an object with any of\n{describe_options()}"
        ) from None
    if not isinstance(raw, dict):
        raise ConfigError(
            f"radix_rope: the configuration must be a JSON object, got {type(raw).__name__}: "
            f"{text!r}. Give an object with any of\n{describe_options()}"
        )
    known = {field.name for field in fields(RadixRopeConfig)}
    unknown = sorted(set(raw) - known)
    if unknown:
        raise ConfigError(
            f"radix_rope: unknown option {', '.join(map(repr, unknown))}. "
            f"Allowed options are\n{describe_options()}"
        )
    return RadixRopeConfig(**raw)


def config_from_env() -> RadixRopeConfig:
    """The options in `RADIX_ROPE_CONFIG`, or the defaults when it is unset or empty."""
    text = os.environ.get(ENV_VAR, "")
    return parse_config(text) if text.strip() else RadixRopeConfig()


def _default(name: str) -> Any:
    return next(field.default for field in fields(RadixRopeConfig) if field.name == name)


def _accepts(name: str) -> str:
    if name in CHOICES:
        return "one of " + ", ".join(CHOICES[name])
    if name in RANGES:
        low, high = RANGES[name]
        return f"integer from {low} to {high}"
    return "true or false"


def check_option(name: str, value: Any) -> None:
    """Refuse a value that option `name` cannot have (ConfigError)."""
    if name in CHOICES:
        valid = isinstance(value, str) and value in CHOICES[name]
    elif name in RANGES:
        low, high = RANGES[name]
        # bool is an int in Python; `true` is no number here.
        valid = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    else:
        valid = isinstance(value, bool)
    if not valid:
        raise ConfigError(
            f"radix_rope: option {name!r} cannot be {json.dumps(value, default=repr)}; "
            f"it accepts {_accepts(name)} (default {json.dumps(_default(name))})."
        )
