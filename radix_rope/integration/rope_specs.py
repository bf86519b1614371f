"""Reads the rotation of every attention layer from a loaded SGLang model, and its KV pool.

Owns the way from SGLang's modules and pools to `rotary`'s `RopeSpec` and `KVPoolView`, and
every refusal on that way. What is read here is believed only after `rope_proof` has shown
that the model's own keys obey it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from radix_rope.integration.rope_layers import (
    AttentionLayer,
    attention_layers,
    rotary_module,
)
from radix_rope.integration.rope_modules import read_rope
from radix_rope.integration.rope_proof import layers_without_motion, prove_rotation
from radix_rope.integration.rope_verify import verify_command
from radix_rope.rotary.pool import KVPoolView
from radix_rope.rotary.spec import RopeSpec, UnsupportedRope

__all__ = [
    "AttentionLayer",
    "attention_layers",
    "pool_view",
    "prove_rotation",
    "read_rope_specs",
    "verify_command",
]

# Modules that put positions into hidden states instead of keys.
_LEARNED_POSITIONS = frozenset(
    {"wpe", "embed_positions", "position_embedding", "position_embeddings", "pos_embed"}
)


def read_rope_specs(
    model: torch.nn.Module, num_layers: int, kv_pool: Any, context_len: int | None = None
) -> list[RopeSpec]:
    """Reads one `RopeSpec` per layer of the pool from the loaded model's modules.

    Args:
        model: the loaded model.
        num_layers: attention layers that the pool holds on this rank.
        kv_pool: SGLang's token-to-KV pool; its rows say whether keys are latent (MLA).
        context_len: longest context served; needed by LongRoPE only.

    Returns:
        Specs in the pool's layer order.

    Raises:
        UnsupportedRope: a layer whose RoPE is refused or unknown, or positions that are not
            rotary.
    """
    layers = attention_layers(model)
    start = int(getattr(kv_pool, "start_layer", 0) or 0)
    local = [layer for layer in layers if start <= layer.layer_id < start + num_layers]
    if len(local) != num_layers:
        raise UnsupportedRope(
            type(model).__name__,
            f"its KV pool holds {num_layers} layers from layer {start}, but {len(local)} "
            "attention layers were found there (hybrid, recurrent or shared layers)",
        )
    specs = [_layer_spec(model, layer, kv_pool, context_len) for layer in local]
    still = layers_without_motion(model, local)
    specs = [
        _without_rope(spec, layer) if layer.layer_id in still else spec
        for layer, spec in zip(local, specs, strict=True)
    ]
    if not any(spec.has_rope for spec in specs):
        raise UnsupportedRope(
            type(model).__name__,
            "no layer has rotary positions: they are learned, ALiBi or absent, and learned or "
            "ALiBi positions cannot be moved by a rotation",
        )
    return specs


def _without_rope(spec: RopeSpec, layer: AttentionLayer) -> RopeSpec:
    return RopeSpec(spec.head_dim, 0, name=f"no RoPE ({layer.name})")


def _layer_spec(
    model: torch.nn.Module, layer: AttentionLayer, kv_pool: Any, context_len: int | None
) -> RopeSpec:
    rank = getattr(kv_pool, "kv_lora_rank", None)
    row_dim = int(kv_pool.kv_cache_dim) if rank is not None else int(layer.attention.qk_head_dim)
    module = rotary_module(model, layer)
    if module is None:
        _refuse_other_positions(model, layer)
        return _without_rope(RopeSpec(row_dim, 0), layer)
    offset = 0 if rank is None else int(rank)
    return read_rope(module, layer.name, row_dim, offset, context_len)


def _refuse_other_positions(model: torch.nn.Module, layer: AttentionLayer) -> None:
    """A layer without RoPE may be copied only if nothing else tells it positions."""
    learned = [
        name
        for name, _ in model.named_modules()
        if name.rsplit(".", 1)[-1] in _LEARNED_POSITIONS and "vision" not in name
    ]
    if learned:
        raise UnsupportedRope(
            f"{type(model).__name__} with learned positions ({learned[0]})",
            "positions enter the hidden states, so keys and values both depend on them",
        )
    if layer.attention.pos_encoding_mode != "NONE" or hasattr(layer.owner, "alibi_slopes"):
        raise UnsupportedRope(
            f"{type(layer.owner).__name__} with ALiBi or another bias ({layer.name})",
            "positions enter as a bias on the scores, not as a rotation of the keys",
        )


def pool_view(
    kv_pool: Any, specs: Sequence[RopeSpec], k_scale: Sequence[float | None] | None = None
) -> KVPoolView:
    """Makes the view of an SGLang KV pool that the kernels work on. Copies nothing.

    Understands `MHATokenToKVPool` in the NHD and HND layouts and `MLATokenToKVPool`, with
    float32, float16, bfloat16, fp8 e4m3 and fp8 e5m2 caches. Classes are matched exactly: a
    subclass stores something else.

    Args:
        kv_pool: the pool.
        specs: one spec per layer of the pool.
        k_scale: per layer the scale of stored keys, one number or None.

    Raises:
        UnsupportedRope: any other pool, layout or cache dtype, by name.
    """
    kind = type(kv_pool).__name__
    if kind == "MLATokenToKVPool":
        if kv_pool.dsa_kv_cache_store_fp8 or kv_pool.use_dsa:
            raise UnsupportedRope(
                "MLATokenToKVPool for sparse attention (DSA)",
                "the row mixes fp8 latents, scales and bf16 keys, and an indexer holds more "
                "rotated keys elsewhere",
            )
        return KVPoolView(_typed(kv_pool.kv_buffer, kv_pool), [], list(specs), k_scale)
    if kind != "MHATokenToKVPool":
        raise UnsupportedRope(
            f"KV pool {kind}",
            "only MHATokenToKVPool and MLATokenToKVPool store one plain row per token and "
            "layer under the slot numbers that the radix tree holds",
        )
    if kv_pool.is_quantized_kv_cache:
        raise UnsupportedRope(
            f"KV pool {kind} quantised by {type(kv_pool.quant_method).__name__}",
            "keys are packed with block scales, which a rotation would change",
            "use an unquantised or fp8 KV cache, or the stock radix cache",
        )
    if kv_pool.kv_cache_layout not in ("nhd", "hnd"):
        raise UnsupportedRope(
            f"KV cache layout {kv_pool.kv_cache_layout!r}",
            "only the NHD and HND layouts keep the elements of one key row together",
            "use the default layout",
        )
    keys, values = _typed(kv_pool.k_buffer, kv_pool), _typed(kv_pool.v_buffer, kv_pool)
    if kv_pool.use_hnd:
        # [pages, heads, page_tokens, dim] as [pages, page_tokens, heads, dim].
        keys = [buffer.transpose(1, 2) for buffer in keys]
        values = [buffer.transpose(1, 2) for buffer in values]
    return KVPoolView(keys, values, list(specs), k_scale)


def _typed(buffers: Sequence[torch.Tensor], kv_pool: Any) -> list[torch.Tensor]:
    """fp8 pools are stored as bytes; show them as what they are."""
    if kv_pool.store_dtype == kv_pool.dtype:
        return list(buffers)
    return [buffer.view(kv_pool.dtype) for buffer in buffers]
