"""What of SGLang radix_rope does not serve, refused at start-up with the reason.

Everything here is decided before the first request; what depends on a single
request falls back to exact in `reuse`.
"""

from __future__ import annotations

from typing import Any


class UnsupportedFeature(ValueError):
    """A server option that cannot be combined with radix_rope."""


# Backends whose extend path writes K and V before attention reads the pool, or
# can be told to, so that a row sees the gaps before it.
ATTENTION_BACKENDS = ("radix_rope_cpu", "torch_native", "triton", "fa3", "flashinfer")

_NEEDS_OTHER_TREE = "it needs SGLang's UnifiedRadixCache, and radix_rope is a RadixCache"
_NEEDS_WHOLE_ROWS = "it splits or moves a request's tokens in a way that has not been shown to work"
_NEEDS_ALL_COMPUTED = "it returns what each prompt token's forward saw, and reused tokens have none"


def refuse_unsupported(
    cfg: Any,
    *,
    is_hybrid_swa: bool,
    is_hybrid_ssm: bool,
    model: Any,
    ngram_embedding: bool = False,
) -> None:
    """Check a resolved server configuration and the model.

    Args:
        cfg: SGLang's resolved arguments (`resolved_view(server_args)`).
        is_hybrid_swa: the model has sliding-window layers in a pool of their own, where
            tokens behind the window are freed. Windows over a plain pool are a mask, and
            rows keep it.
        is_hybrid_ssm: the model has recurrent state.
        model: SGLang's ModelConfig.
        ngram_embedding: the model embeds tokens together with those before them.

    Raises:
        UnsupportedFeature: naming the option, why, and what to do instead.
    """
    checks: list[tuple[bool, str, str]] = [
        (is_hybrid_swa, "a hybrid sliding-window model", _NEEDS_OTHER_TREE),
        (is_hybrid_ssm, "a model with recurrent state", "a state cannot be moved or spliced"),
        (model.is_encoder_decoder, "an encoder-decoder model", "keys depend on another sequence"),
        (
            ngram_embedding,
            "a model with n-gram embeddings",
            "its inputs depend on the tokens before a row",
        ),
        (
            model.is_multimodal,
            "a multimodal model",
            "the positions of images are not counted in tokens, and a run of text behind one "
            "would be moved by a wrong distance; --language-model-only serves its text",
        ),
    ]
    _refuse(checks)
    refuse_options(cfg)


def refuse_options(cfg: Any) -> None:
    """Check what is known before the model is loaded, in the process the user sees.

    Args:
        cfg: SGLang's resolved arguments (`resolved_view(server_args)`).

    Raises:
        UnsupportedFeature: naming the option, why, and what to do instead.
    """
    checks: list[tuple[bool, str, str]] = [
        (cfg.enable_hierarchical_cache, "--enable-hierarchical-cache", _NEEDS_OTHER_TREE),
        (cfg.enable_lmcache, "--enable-lmcache", _NEEDS_OTHER_TREE),
        (cfg.enable_flexkv, "--enable-flexkv", _NEEDS_OTHER_TREE),
        (cfg.enable_streaming_session, "--enable-streaming-session", _NEEDS_OTHER_TREE),
        (cfg.enable_session_radix_cache, "--enable-session-radix-cache", _NEEDS_OTHER_TREE),
        (
            cfg.enable_unified_cache_external_linker,
            "--enable-unified-cache-external-linker",
            _NEEDS_OTHER_TREE,
        ),
        (
            cfg.radix_eviction_policy == "tlru",
            "--radix-eviction-policy tlru",
            _NEEDS_OTHER_TREE,
        ),
        (cfg.enable_unified_memory, "--enable-unified-memory", "slots are translated per layer"),
        (
            cfg.enable_page_major_kv_layout,
            "--enable-page-major-kv-layout",
            "its pool has not been shown to work",
        ),
        (cfg.enable_hisparse, "--enable-hisparse", _NEEDS_WHOLE_ROWS),
        (
            cfg.speculative_algorithm is not None,
            f"--speculative-algorithm {cfg.speculative_algorithm}",
            "it has not been shown to work, and a draft model's KV would have to be moved too",
        ),
        (cfg.pp_size > 1, f"--pp-size {cfg.pp_size}", "plans are not passed between stages"),
        (
            # SGLang turns the old spelling into the new one while it resolves.
            cfg.attn_dp_size > 1 or cfg.enable_dp_attention,
            f"--attn-dp-size {cfg.attn_dp_size} (DP attention)",
            _NEEDS_WHOLE_ROWS,
        ),
        (cfg.attn_cp_size > 1, f"--attn-cp-size {cfg.attn_cp_size}", _NEEDS_WHOLE_ROWS),
        (cfg.dcp_size > 1, f"--dcp-size {cfg.dcp_size}", _NEEDS_WHOLE_ROWS),
        (cfg.enable_layernorm_sp, "--enable-layernorm-sp", _NEEDS_WHOLE_ROWS),
        (
            cfg.enable_attn_tp_input_scattered,
            "--enable-attn-tp-input-scattered",
            _NEEDS_WHOLE_ROWS,
        ),
        (
            cfg.disaggregation_mode != "null",
            f"--disaggregation-mode {cfg.disaggregation_mode}",
            "approximate KV would be sent to other servers as exact",
        ),
        (
            cfg.enable_lora or bool(cfg.lora_paths),
            "--enable-lora",
            "adapters are prepared per request, not per row",
        ),
        (cfg.enable_two_batch_overlap, "--enable-two-batch-overlap", _NEEDS_WHOLE_ROWS),
        (cfg.enable_single_batch_overlap, "--enable-single-batch-overlap", _NEEDS_WHOLE_ROWS),
        (cfg.enable_pdmux, "--enable-pdmux", _NEEDS_WHOLE_ROWS),
        (
            cfg.enable_torch_compile,
            "--enable-torch-compile",
            "compiled forwards beside those in rows have not been shown to work",
        ),
        (cfg.dllm_algorithm is not None, "--dllm-algorithm", "its attention is not causal"),
        (cfg.enable_mis, "--enable-mis", "the items of a prompt do not see each other"),
        (cfg.enable_return_routed_experts, "--enable-return-routed-experts", _NEEDS_ALL_COMPUTED),
        (cfg.enable_return_indexer_topk, "--enable-return-indexer-topk", _NEEDS_ALL_COMPUTED),
        (
            # A decoding request that wants hidden states can join a prefill whose
            # tokens were counted before some of them were reused.
            cfg.enable_mixed_chunk and cfg.enable_return_hidden_states,
            "--enable-mixed-chunk with --enable-return-hidden-states",
            _NEEDS_ALL_COMPUTED,
        ),
        (
            cfg.enable_deterministic_inference,
            "--enable-deterministic-inference",
            "a prompt's answer may depend on what was cached before",
        ),
        (
            cfg.kv_events_config is not None,
            "--kv-events-config",
            "routers and storage would take the events of approximate KV for exact",
        ),
        (
            cfg.kv_canary != "none",
            f"--kv-canary {cfg.kv_canary}",
            "it takes moved KV for a stray write",
        ),
    ]
    _refuse(checks)
    backend = cfg.prefill_attention_backend or cfg.attention_backend
    if backend not in ATTENTION_BACKENDS:
        raise UnsupportedFeature(
            f"radix_rope: attention backend {backend!r} is not supported: it has not been shown "
            "to read earlier rows of the same request. Use one of "
            f"{', '.join(ATTENTION_BACKENDS)} (--attention-backend)."
        )


def _refuse(checks: list[tuple[bool, str, str]]) -> None:
    for asked, name, reason in checks:
        if asked:
            raise UnsupportedFeature(
                f"radix_rope: {name} is not supported: {reason}. Drop it, or drop "
                "--radix-cache-impl radix_rope."
            )
