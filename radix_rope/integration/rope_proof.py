"""Start-up proof of the rotation, on the loaded model itself.

Owns two proofs per layer. The first applies the layer's rotary module alone. The second
runs the whole model over one token at many positions, with attention replaced by a probe
that records the key each layer would cache: it sees what really reaches the pool, whatever
the modules look like (a rotary module that a layer holds but does not use, a norm after
RoPE, angles from elsewhere).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from radix_rope.integration.rope_layers import AttentionLayer, attention_layers, rotary_module
from radix_rope.integration.rope_modules import apply_rotary
from radix_rope.rotary.proof import Proof, check_keys, proof_positions, prove, require
from radix_rope.rotary.spec import RopeSpec, UnsupportedRope

# A token that no model pads with; any would do.
_PROBE_TOKEN = 11


@dataclass(frozen=True)
class LayerProof:
    """What was shown for one layer.

    Attributes:
        spec: the layer's rotation.
        module: proof on its rotary module alone; None for a layer without RoPE.
        model: proof on the keys that the whole model produced.
    """

    spec: RopeSpec
    module: Proof | None
    model: Proof


class _AllKeysSeen(Exception):
    """Leaves the model's forward once the last layer's key was recorded."""


def prove_rotation(
    model: torch.nn.Module,
    specs: Sequence[RopeSpec],
    dtype: torch.dtype,
    context_len: int,
) -> list[LayerProof]:
    """Proves every layer's spec on the loaded model, or refuses the model.

    Every rank of a tensor-parallel group must call it at the same time: the model's own
    collectives run.

    Args:
        model: the loaded model, as `read_rope_specs` read it.
        specs: its specs, in layer order.
        dtype: dtype the model computes in. Where the keys it makes are finer than this (an
            fp8 cache's dtype was given, say), theirs decides the bounds.
        context_len: longest context served, in tokens; positions up to its end are tried.

    Returns:
        One `LayerProof` per layer.

    Raises:
        ProofFailed: names the layer, the error and the bound.
        UnsupportedRope: the model could not be run in isolation, so nothing is proven.
    """
    layers = attention_layers(model)
    if len(layers) != len(specs):
        raise UnsupportedRope(
            type(model).__name__, f"{len(layers)} attention layers but {len(specs)} specs"
        )
    device = next(model.parameters()).device
    positions = proof_positions(context_len)
    keys, values = observed_keys(model, layers, positions, device)
    made = next(iter(keys.values())).dtype
    dtype = min(dtype, made, key=lambda kind: torch.finfo(kind).eps)
    module_proofs = _prove_modules(model, layers, specs, dtype, context_len, device)
    proofs: list[LayerProof] = []
    for layer, spec, module_proof in zip(layers, specs, module_proofs, strict=True):
        seen, value = keys[layer.layer_id], values[layer.layer_id]
        if not bool(seen.abs().amax() > 0):
            raise UnsupportedRope(spec.name, "the model produced only zero keys to prove it on")
        proof = check_keys(seen, positions, spec, dtype, _content_roundings(value, dtype))
        require(proof, spec, _hint(seen, spec))
        proofs.append(LayerProof(spec, module_proof, proof))
    return proofs


def _content_roundings(values: torch.Tensor, dtype: torch.dtype) -> float:
    """By how many roundings the keys' content may differ between rows of one batch.

    Values carry no position, so what they differ by shows it (the last rows of a matrix
    product may be summed in another order).
    """
    exact = values.to(torch.float64)
    noise = float((exact - exact[:1]).abs().amax() / exact.abs().amax().clamp_min(1e-30))
    return 2.0 + 4.0 * noise / (torch.finfo(dtype).eps / 2)


def _hint(keys: torch.Tensor, spec: RopeSpec) -> str:
    if spec.has_rope and torch.equal(keys, keys[:1].expand_as(keys)):
        return " (the keys are the same at every position: the layer does not use its RoPE)"
    return ""


def layers_without_motion(model: torch.nn.Module, layers: Sequence[AttentionLayer]) -> set[int]:
    """Layer ids whose keys do not depend on the position when the model runs.

    Several models (Cohere 2, EXAONE 4, AFMoE, MiniCPM) hold a rotary module in every layer
    and use it in some. A model that can't be run here yields nothing: its proof will say so.
    """
    positions = (0, 1, 17)
    device = next(model.parameters()).device
    try:
        keys, values = observed_keys(model, layers, positions, device)
    except UnsupportedRope:
        return set()
    still = set()
    for layer in layers:
        seen, value = keys[layer.layer_id], values[layer.layer_id]
        unrotated = RopeSpec(seen.shape[-1], 0, name=layer.name)
        roundings = _content_roundings(value, seen.dtype)
        if check_keys(seen, positions, unrotated, seen.dtype, roundings).holds:
            still.add(layer.layer_id)
    return still


def _prove_modules(
    model: torch.nn.Module,
    layers: Sequence[AttentionLayer],
    specs: Sequence[RopeSpec],
    dtype: torch.dtype,
    context_len: int,
    device: torch.device,
) -> list[Proof | None]:
    """Proof on the rotary modules alone; modules shared by layers are proven once."""
    done: dict[tuple[int, tuple[float, ...]], Proof] = {}
    proofs: list[Proof | None] = []
    for layer, spec in zip(layers, specs, strict=True):
        module = rotary_module(model, layer)
        if module is None or not spec.has_rope:
            proofs.append(None)
            continue
        key = (id(module), spec.inv_freq)
        if key not in done:
            done[key] = prove(
                _applier(module), _head_spec(module, spec), dtype, context_len, device
            )
        proofs.append(done[key])
    return proofs


def _applier(
    module: torch.nn.Module,
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda positions, keys: apply_rotary(module, positions, keys)


def _head_spec(module: torch.nn.Module, spec: RopeSpec) -> RopeSpec:
    """The spec of the head that the module itself sees: MLA's row without its latent."""
    any_module: Any = module
    head = int(getattr(any_module, "head_size", spec.head_dim))
    return spec if head == spec.head_dim else replace(spec, head_dim=head, rotary_offset=0)


class _NoPool:
    """Stands in for the KV pool: nothing may be written while keys are only looked at."""

    # Models that fuse RoPE with the write to a bfloat16 pool take the plain way for this one.
    dtype = torch.float32


class _Probe:
    """Stands in for the attention backend: records keys and answers with zeros.

    Attributes are those that SGLang's models read from a backend.
    """

    # Where DeepSeek's models ask which of their two forms to compute, Triton's answer after a
    # prefix is the absorbed one, whose keys are the rows that the pool stores.
    prefill_attention_backend_str = "triton"
    decode_attention_backend_str = "triton"
    token_to_kv_pool = _NoPool()

    def __init__(self, layer_ids: set[int], rows: int) -> None:
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self._layer_ids = layer_ids
        self._rows = rows

    def forward(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if k is not None and layer.layer_id in self._layer_ids:
            heads = layer.tp_k_head_num
            key = k.reshape(self._rows, heads, -1)
            self.values[layer.layer_id] = v.reshape(self._rows, heads, -1).clone()
            if kwargs.get("k_rope") is not None:
                key = torch.cat((key, kwargs["k_rope"].reshape(self._rows, heads, -1)), dim=-1)
            self.keys[layer.layer_id] = key.clone()
        if len(self.keys) == len(self._layer_ids):
            raise _AllKeysSeen
        return q.new_zeros((self._rows, layer.tp_q_head_num * layer.v_head_dim))


def observed_keys(
    model: torch.nn.Module,
    layers: Sequence[AttentionLayer],
    positions: Sequence[int],
    device: torch.device,
) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """Runs one token at several positions and records every layer's keys and values.

    Attention returns zeros, so no token sees another and a row differs from the next by its
    position alone.

    Returns:
        ``(keys, values)`` by layer id: ``[positions, heads, dim]`` in the model's dtype, as they
        would be cached; for MLA the key is the whole row and the value its latent.

    Raises:
        UnsupportedRope: the model's forward failed outside the engine.
    """
    probe = _Probe({layer.layer_id for layer in layers}, len(positions))
    try:
        _run_model(model, probe, positions, device)
    except _AllKeysSeen:
        pass
    except Exception as error:
        raise UnsupportedRope(
            type(model).__name__,
            f"it cannot be run on probe tokens, so its rotation is not proven ({error!r})",
        ) from error
    missing = [layer.name for layer in layers if layer.layer_id not in probe.keys]
    if missing:
        raise UnsupportedRope(
            type(model).__name__, f"layer {missing[0]} gave no key to the attention probe"
        )
    return probe.keys, probe.values


def _run_model(
    model: torch.nn.Module, probe: _Probe, positions: Sequence[int], device: torch.device
) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    tokens = len(positions)
    where = torch.tensor(positions, dtype=torch.int64, device=device)
    ids = torch.full((tokens,), _PROBE_TOKEN, dtype=torch.int64, device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    # A prefix of one token: see _Probe about DeepSeek.
    prefix = 1
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=ids,
        req_pool_indices=zero,
        seq_lens=zero + prefix + tokens,
        out_cache_loc=torch.arange(tokens, dtype=torch.int64, device=device),
        seq_lens_sum=prefix + tokens,
        seq_lens_cpu=torch.tensor([prefix + tokens]),
        extend_num_tokens=tokens,
        extend_seq_lens=(zero + tokens).to(torch.int32),
        extend_prefix_lens=(zero + prefix).to(torch.int32),
        extend_start_loc=zero.to(torch.int32),
        extend_seq_lens_cpu=[tokens],
        extend_prefix_lens_cpu=[prefix],
        positions=where,
        mrope_positions=where.expand(3, tokens),
    )
    context: Any = ForwardContext(attn_backend=probe)
    with torch.inference_mode(), forward_context(context):
        model(ids, where, batch)
