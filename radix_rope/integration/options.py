"""SGLang's command line: `--radix-cache-impl` and `--radix-rope-config`.

Both end where SGLang already looks (`radix_cache_backend`) or in the
environment, which the scheduler processes inherit.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from radix_rope.config import ENV_VAR, ConfigError, config_from_env, describe_options, parse_config
from radix_rope.integration import seams
from radix_rope.integration.support import refuse_options

# Dotted paths (comma-separated) chosen on the command line, for the processes
# that come after: each of them registers these.
IMPL_ENV_VAR = "RADIX_ROPE_CACHE_IMPL"


def add_cli_args(original: Callable[..., Any], parser: argparse.ArgumentParser) -> Any:
    """Hook of `ServerArgs.add_cli_args`: add our options to SGLang's."""
    result = original(parser)
    # An SGLang built with our patches has this option itself.
    if "--radix-cache-impl" not in parser._option_string_actions:
        parser.add_argument(
            "--radix-cache-impl",
            action=_ImplAction,
            metavar="NAME",
            help="Prefix cache implementation: a registered backend name (radix_rope), or a "
            "dotted path package.module:Class of a BasePrefixCache. Same as "
            "--radix-cache-backend.",
        )
    parser.add_argument(
        "--radix-rope-config",
        action=_ConfigAction,
        metavar="JSON",
        help=f"Options of radix_rope as a JSON object (also: {ENV_VAR}). Options:\n"
        + describe_options().replace("%", "%%"),
    )
    return result


def check_server_args(original: Callable[..., Any], server_args: Any) -> Any:
    """Hook of `ServerArgs.resolve_once`: refuse early, in the process the user sees.

    Raises:
        ConfigError, SGLangVersionError, FileNotFoundError, UnsupportedFeature: only when
            radix_rope is chosen.
    """
    if server_args.radix_cache_backend == seams.BACKEND_NAME:
        config = config_from_env()
        seams.check_version(config.allow_untested_sglang)
        path = str(server_args.model_path)
        if path.startswith(("/", "./", "../", "~")) and not os.path.isdir(path):
            raise FileNotFoundError(
                f"radix_rope: the model folder {path!r} does not exist. Give the folder of a "
                "Hugging Face model, or run `radix-rope fetch-model smollm2-135m-instruct`, "
                "which prints the folder of a small one."
            )
    result = original(server_args)
    if server_args.radix_cache_backend == seams.BACKEND_NAME:
        from sglang.srt.arg_groups.overrides import resolved_view

        refuse_options(resolved_view(server_args))
    return result


def register_impl(name: str) -> None:
    """Make a backend selectable by name or dotted path in this process.

    Raises:
        ValueError: neither a registered name nor `package.module:Class` of a
            BasePrefixCache; the message lists the registered names.
    """
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.registry import (
        get_radix_cache_factory,
        register_radix_cache_backend,
        registered_radix_cache_backends,
    )

    if get_radix_cache_factory(name) is not None:
        return
    allowed = (
        f"registered names are {', '.join(registered_radix_cache_backends())}; or give a dotted "
        "path package.module:Class of a BasePrefixCache"
    )
    if ":" not in name:
        raise ValueError(f"--radix-cache-impl {name!r} is not registered: {allowed}.")
    try:
        cls = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--radix-cache-impl {name!r} cannot be imported ({error}): {allowed}."
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, BasePrefixCache)):
        raise ValueError(f"--radix-cache-impl {name!r} is not a BasePrefixCache: {allowed}.")
    register_radix_cache_backend(name, lambda ctx: cls(ctx.params))


class _ImplAction(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        try:
            register_impl(values)
        except ValueError as error:
            parser.error(str(error))
        if ":" in values:
            os.environ[IMPL_ENV_VAR] = values
        namespace.radix_cache_backend = values


class _ConfigAction(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        try:
            parse_config(values)
        except ConfigError as error:
            parser.error(str(error))
        os.environ[ENV_VAR] = values
