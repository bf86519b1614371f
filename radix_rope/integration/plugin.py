"""Entry point of the group `sglang.srt.plugins`, run in every SGLang process.

Registers the backend and the command-line options and touches nothing else:
the hooks on the serving path are installed only when a scheduler builds our
cache, so a server that did not ask for radix_rope runs stock code.
"""

from __future__ import annotations

import os
from typing import Any

from radix_rope.integration import options, seams


def register() -> None:
    """Register backend, options and, where it is used, the CPU attention backend.

    SGLang logs and skips a plugin that raises, and would then only say that
    the backend is unknown; so nothing here raises, and `build_cache` gives the
    reason when the backend is used.
    """
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    register_radix_cache_backend(seams.BACKEND_NAME, _build)
    seams.hook(seams.ADD_CLI_ARGS, options.add_cli_args)
    seams.hook(seams.RESOLVE_ARGS, options.check_server_args)
    _offer_cpu_attention()
    for chosen in filter(None, os.environ.get(options.IMPL_ENV_VAR, "").split(",")):
        options.register_impl(chosen)


def _build(ctx: Any) -> Any:
    # Imported late: the launcher and the detokenizer never build a cache.
    from radix_rope.integration.build import build_cache

    return build_cache(ctx)


def _offer_cpu_attention() -> None:
    from radix_rope.integration.cpu.activate import activate

    if activate() is None:
        return
    from sglang.srt.arg_groups.choices import (
        ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
    )

    from radix_rope.integration.cpu.platform import ATTENTION_BACKEND

    if ATTENTION_BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([ATTENTION_BACKEND])
