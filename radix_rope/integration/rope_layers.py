"""Finds a loaded model's attention layers and the rotary module behind each.

Owns the walk over SGLang's modules. Works on names and attributes and imports nothing of
SGLang; what a rotary module means is `rope_modules`' business.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from radix_rope.integration.rope_modules import is_rotary_module
from radix_rope.rotary.spec import UnsupportedRope


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a loaded model.

    Attributes:
        layer_id: the layer's number, as its KV pool counts.
        attention: the `RadixAttention` whose keys are cached.
        owner: the module that holds it and computes q, k and v.
        name: dotted name of the owner in the model.
    """

    layer_id: int
    attention: Any
    owner: torch.nn.Module
    name: str


def attention_layers(model: torch.nn.Module) -> list[AttentionLayer]:
    """Finds the decoder attention layers of a model, in order of their layer id.

    Where a layer has several attention objects (MLA has one for absorbed and one for
    expanded keys), the one with the fewest key heads is what the pool stores.

    Raises:
        UnsupportedRope: cross or bidirectional attention.
    """
    found: dict[int, AttentionLayer] = {}
    for name, owner in model.named_modules():
        for child in owner.children():
            if type(child).__name__ != "RadixAttention":
                continue
            attention: Any = child
            title = name or type(model).__name__
            if attention.is_cross_attention:
                raise UnsupportedRope(
                    f"cross attention ({title})", "its keys belong to another sequence"
                )
            if attention.attn_type.value != "decoder":
                raise UnsupportedRope(
                    f"{attention.attn_type.value} attention ({title})",
                    "keys depend on what follows them, so no prefix of them can be reused",
                )
            known = found.get(attention.layer_id)
            if known is None or attention.tp_k_head_num < known.attention.tp_k_head_num:
                found[attention.layer_id] = AttentionLayer(
                    attention.layer_id, attention, owner, title
                )
    return [found[layer_id] for layer_id in sorted(found)]


def rotary_module(model: torch.nn.Module, layer: AttentionLayer) -> torch.nn.Module | None:
    """The rotary module whose angles reach this layer's keys; None without RoPE.

    Raises:
        UnsupportedRope: several candidates, or angles from an unknown place.
    """
    if "position_embeddings" in inspect.signature(layer.owner.forward).parameters:
        # Gemma 3 has a rotary module in each layer, but off AMX it uses the angles that
        # the model computes once with these two.
        for parent in _ancestors(model, layer.name):
            shared: Any = parent
            if hasattr(shared, "rotary_emb_local") and hasattr(shared, "rotary_emb"):
                local = bool(getattr(layer.owner, "is_sliding", False))
                chosen: torch.nn.Module = shared.rotary_emb_local if local else shared.rotary_emb
                return chosen
        raise UnsupportedRope(
            f"{type(layer.owner).__name__} ({layer.name})",
            "it takes its angles from outside the layer and their source was not found",
        )
    distinct = {id(child): child for child in layer.owner.children() if is_rotary_module(child)}
    if len(distinct) > 1:
        names = sorted(type(child).__name__ for child in distinct.values())
        raise UnsupportedRope(
            f"{type(layer.owner).__name__} ({layer.name})",
            f"it holds several rotary modules ({', '.join(names)})",
        )
    return next(iter(distinct.values()), None)


def _ancestors(model: torch.nn.Module, name: str) -> Iterator[torch.nn.Module]:
    """The modules above a dotted name, the nearest first."""
    parts = name.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        yield model.get_submodule(".".join(parts[:depth]))
