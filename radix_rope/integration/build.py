"""Builds the cache from what SGLang's scheduler hands to a backend factory.

Order: options, version, features, the model's RoPE and its proof, the kernel,
then the hooks. Each refusal comes before anything is changed.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from radix_rope.config import RadixRopeConfig, config_from_env
from radix_rope.integration import seams
from radix_rope.integration.cache import RadixRopeCache
from radix_rope.integration.gate import check_verdict
from radix_rope.integration.support import UnsupportedFeature, refuse_unsupported

logger = logging.getLogger(__name__)

# Below this many rows per forward, plans are cut down so often that it is worth a warning.
_ENOUGH_ROWS = 8


def build_cache(ctx: Any) -> RadixRopeCache:
    """Factory of the backend `radix_rope` (`TreeCacheBuildContext` in, cache out).

    Raises:
        ConfigError, SGLangVersionError, UnsupportedFeature, CheckRequired, UnsupportedRope: with
            what was asked, why not, and what instead.
    """
    from sglang.srt.arg_groups.overrides import resolved_view

    from radix_rope.integration.hooks import install_request_check

    config = config_from_env()
    seams.check_version(config.allow_untested_sglang)
    server = resolved_view(ctx.server_args)
    refuse_unsupported(
        server,
        is_hybrid_swa=ctx.is_hybrid_swa,
        is_hybrid_ssm=ctx.is_hybrid_ssm,
        model=ctx.model_config,
        ngram_embedding=bool(ctx.tp_worker.model_runner.ngram_embedding_manager.enabled),
    )
    if ctx.params.disable:
        logger.warning(
            "radix_rope: with --disable-radix-cache no KV outlives its request, so none is "
            "reused. Drop it to reuse any."
        )
    elif not ctx.model_config.is_generation:
        logger.warning(
            "radix_rope: an embedding model pools over every token of a prompt, so each is "
            "computed: prompts share exact prefixes only."
        )
        config = replace(config, mode="off")
    cache = RadixRopeCache(ctx.params, config)
    install_request_check()
    if config.mode in ("shifted", "opt_in") and cache.content is not None:
        dtype = str(ctx.model_config.dtype).removeprefix("torch.")
        check_verdict(config, str(ctx.model_config.model_path), dtype)
        _enable_reuse(cache, ctx, config, int(server.tp_size))
        cache.fallbacks.ranks = int(server.tp_size)
        cache.mixes = bool(server.enable_mixed_chunk)
        # As long as any other forward of this server, at most; -1 is no chunks.
        chunk = server.chunked_prefill_size
        cache.max_second_pass_tokens = chunk if chunk is not None and chunk > 0 else None
        if cache.max_rows < _ENOUGH_ROWS:
            logger.warning(
                "radix_rope: a forward may have %d rows only, and each reused run takes about one "
                "besides one per request: little or nothing will be reused. Give a "
                "--max-running-requests of %d or more.",
                cache.max_rows,
                _ENOUGH_ROWS,
            )
    logger.info("radix_rope: %s, %s", config, _kernel_name(cache))
    return cache


def _enable_reuse(cache: RadixRopeCache, ctx: Any, config: RadixRopeConfig, ranks: int) -> None:
    from radix_rope.integration.hooks import install
    from radix_rope.integration.metrics import make_metrics
    from radix_rope.integration.repair import AttentionRule, no_second_pass
    from radix_rope.integration.rope_specs import pool_view, prove_rotation, read_rope_specs
    from radix_rope.rotary.corrector import make_corrector

    runner = ctx.tp_worker.model_runner
    pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    context_len = int(ctx.model_config.context_len)
    specs = read_rope_specs(runner.model, pool.layer_num, pool, context_len)
    prove_rotation(runner.model, specs, pool.dtype, context_len)
    view = pool_view(pool, specs)
    corrector = make_corrector(view, config.kernel, config.rotate)
    install()
    # Backends size their metadata by the request pool, the eager runner by the
    # largest number of running requests.
    cache.max_rows = min(int(runner.req_to_token_pool.size), int(runner.eager_runner._eager_max_bs))
    if pool.dtype.itemsize == 1:
        # Rounding to fp8 is not harmless (docs/rotary.md): move originals only.
        cache.plan_options = replace(cache.plan_options, max_roundings=1)
    refusal = cache.no_second_pass = no_second_pass(ranks, view)
    if refusal is None:
        cache.repair_rule = AttentionRule(
            runner.model, view.k, runner.req_to_token_pool.req_to_token
        )
    elif config.repair == "attention":
        raise UnsupportedFeature(
            f"radix_rope: repair 'attention' is not supported with {refusal}. Use 'head'."
        )
    cache.corrector = corrector
    cache.metrics = make_metrics(view.bytes_per_token, view.device)


def _kernel_name(cache: RadixRopeCache) -> str:
    return "no reuse" if cache.corrector is None else f"kernel {cache.corrector.name}"
