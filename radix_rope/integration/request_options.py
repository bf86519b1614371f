"""What one request may ask of radix_rope: `custom_params={"radix_rope": {...}}`.

Owns reading and checking it. A request that asks for what cannot be given is
refused alone, with the reason; it never falls back to something else in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from radix_rope.config import ConfigError, RadixRopeConfig, check_option, describe_options
from radix_rope.content.plan import PlanOptions

PARAMETER = "radix_rope"

REQUEST_MODES = ("shifted", "exact")

# Options of the planner that a request may set for itself, as in the configuration.
PLAN_KEYS = ("recompute_tokens", "min_run_tokens", "repair", "attention_percent")


class RequestOptionError(ValueError):
    """What a request asked of radix_rope cannot be given; the message says why."""


@dataclass(frozen=True)
class RequestOptions:
    """Checked options of one request.

    Attributes:
        shifted: whether it may be served from moved or approximate KV.
        overrides: options of the planner that differ from the server's.
    """

    shifted: bool
    overrides: tuple[tuple[str, Any], ...] = ()

    def plan_options(self, server: PlanOptions) -> PlanOptions:
        """The server's plan options with this request's own in place."""
        return replace(server, **dict(self.overrides)) if self.overrides else server


def server_default(config: RadixRopeConfig) -> RequestOptions:
    """What a request gets that asks for nothing."""
    return RequestOptions(shifted=config.mode == "shifted")


def parse_request_options(custom_params: Any, config: RadixRopeConfig) -> RequestOptions:
    """Read a request's `custom_params`.

    Raises:
        RequestOptionError: not an object, unknown option, wrong value, or a mode
            that the server's configuration forbids.
    """
    default = server_default(config)
    if not isinstance(custom_params, Mapping) or PARAMETER not in custom_params:
        return default
    asked = custom_params[PARAMETER]
    if not isinstance(asked, Mapping):
        raise RequestOptionError(
            f"radix_rope: custom_params[{PARAMETER!r}] must be an object, got "
            f"{type(asked).__name__}. Give any of\n{_describe()}"
        )
    unknown = sorted(str(key) for key in set(asked) - {"mode", *PLAN_KEYS})
    if unknown:
        raise RequestOptionError(
            f"radix_rope: a request has no option {', '.join(map(repr, unknown))}. "
            f"Give any of\n{_describe()}"
        )
    mode = asked.get("mode", "shifted" if default.shifted else "exact")
    if mode not in REQUEST_MODES:
        raise RequestOptionError(
            f"radix_rope: a request's mode cannot be {json.dumps(mode, default=repr)}; it is one "
            f"of {', '.join(REQUEST_MODES)}."
        )
    if mode == "shifted" and config.mode in ("exact", "off"):
        raise RequestOptionError(
            f'radix_rope: mode "shifted" was asked for, but this server runs in mode '
            f'"{config.mode}", which forbids it. Leave the mode out, or ask the operator for '
            'mode "opt_in" or "shifted".'
        )
    overrides = []
    for key in PLAN_KEYS:
        if key in asked:
            try:
                check_option(key, asked[key])
            except ConfigError as error:
                raise RequestOptionError(str(error)) from None
            overrides.append((key, asked[key]))
    return RequestOptions(mode == "shifted", tuple(overrides))


def refuse_attention(options: RequestOptions, reason: str) -> None:
    """Refuse repair `attention` to a request on a server that has no second pass.

    Which `reason` says. The server's own repair is no matter here: it was refused at start-up.

    Raises:
        RequestOptionError: the request asked for shifted reuse with repair `attention`.
    """
    if options.shifted and ("repair", "attention") in options.overrides:
        raise RequestOptionError(
            'radix_rope: repair "attention" was asked for, but this server cannot give it: it has '
            f'{reason}. Ask for "head" or "none", or leave the repair out.'
        )


def _describe() -> str:
    return f"  mode: one of {', '.join(REQUEST_MODES)}\n{describe_options(PLAN_KEYS)}"
