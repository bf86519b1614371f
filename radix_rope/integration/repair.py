"""What scores the run tokens, of which a second pass computes the best again.

A `Rule` watches the first pass and gives one score per run token. The only one is attention;
another (CacheBlend's deviation of K and V in the first layers, say) would be a class beside it.
When a second pass is worth it is `content.repair`'s business, how it runs `second_pass`'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from radix_rope.content.plan import ReusePlan
from radix_rope.integration.attention_scores import received_attention
from radix_rope.integration.rope_layers import AttentionLayer, attention_layers
from radix_rope.integration.rows import RowBatch
from radix_rope.rotary.pool import KVPoolView

Plans = Mapping[int, ReusePlan]
"""By a request's place in the batch."""


class Rule(Protocol):
    """Scores run tokens by what it saw of the first pass."""

    def watch(
        self, forward_batch: Any, rows: RowBatch, plans: Plans
    ) -> AbstractContextManager[Callable[[], dict[int, torch.Tensor]]]:
        """Enter around the first pass.

        Args:
            forward_batch: the batch as SGLang made it.
            rows: the same batch in rows, which is about to run.
            plans: of the requests to be repaired.

        Yields:
            A function to call once after the pass: by request, float32 [run tokens] on the
            device, in the order of the plan's runs; higher is computed first.
        """
        ...


class AttentionRule:
    """Scores run tokens by the attention they receive from the request's last gap.

    Summed over heads and the layers of `watched_layers`.

    Args:
        model: the loaded model.
        keys: one key buffer per layer, aliasing the pool; shapes as in `KVPoolView`.
        req_to_token: the pool's slot of every request and position.
    """

    def __init__(
        self, model: torch.nn.Module, keys: Sequence[torch.Tensor], req_to_token: torch.Tensor
    ) -> None:
        """Find the layers to watch; nothing is hooked yet."""
        layers = attention_layers(model)
        self.layers = [layers[i] for i in watched_layers(len(layers))]
        self.keys = keys
        self.req_to_token = req_to_token

    @contextmanager
    def watch(
        self, forward_batch: Any, rows: RowBatch, plans: Plans
    ) -> Iterator[Callable[[], dict[int, torch.Tensor]]]:
        """Keep the last gaps' queries while the first pass runs; see `Rule.watch`."""
        ends = np.cumsum(rows.computed_tokens).tolist()
        spans = {
            index: (ends[index] - len(plan.rows[-1]), ends[index]) for index, plan in plans.items()
        }
        token = torch.cat([torch.arange(*span) for span in spans.values()])
        token = token.to(rows.forward_batch.input_ids.device, non_blocking=True)
        queries: dict[int, torch.Tensor] = {}
        handles = [
            layer.attention.register_forward_pre_hook(
                _keep_queries(layer, token, queries), with_kwargs=True
            )
            for layer in self.layers
        ]

        def scores() -> dict[int, torch.Tensor]:
            lengths = [end - begin for begin, end in spans.values()]
            split = {layer: torch.split(q, lengths) for layer, q in queries.items()}
            return {
                index: self._score(
                    forward_batch.req_pool_indices[index],
                    plan,
                    {layer: parts[i] for layer, parts in split.items()},
                )
                for i, (index, plan) in enumerate(plans.items())
            }

        try:
            yield scores
        finally:
            for handle in handles:
                handle.remove()

    def _score(
        self, req_pool_index: torch.Tensor, plan: ReusePlan, queries: Mapping[int, torch.Tensor]
    ) -> torch.Tensor:
        slots = self.req_to_token[req_pool_index, : plan.end].to(torch.int64)
        received = torch.zeros(plan.end, dtype=torch.float32, device=slots.device)
        for layer in self.layers:
            attention = layer.attention
            scaling = attention.scaling * (attention.k_scale_float or 1.0)
            received += received_attention(
                queries[layer.layer_id],
                keys_at(self.keys[layer.layer_id], slots),
                scaling,
                attention.logit_cap or 0.0,
            )
        return torch.cat([received[run.begin : run.end] for run in plan.runs])


def keys_at(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[tokens, kv_heads, head_dim] of int64 slots [tokens], from a buffer of `KVPoolView`."""
    # Not every device can index fp8, and every device can index bytes.
    plain = buffer.view(torch.uint8) if buffer.dtype.itemsize == 1 else buffer
    if buffer.dim() == 4:
        page_tokens = buffer.shape[1]
        return plain[slots // page_tokens, slots % page_tokens].view(buffer.dtype)
    return plain[slots].view(buffer.dtype)


def no_second_pass(ranks: int, pool: KVPoolView) -> str | None:
    """Why no second pass is possible, or None where it is.

    Args:
        ranks: tensor-parallel size.
        pool: the KV pool.
    """
    if ranks > 1:
        # Sums over other heads would give every rank other picks, and the ranks must compute
        # the same rows.
        return f"--tp-size {ranks}: attention is summed over heads, and each rank has its own"
    if not pool.v:
        return "an MLA model: queries are not in the space of the cached latents"
    return None


def watched_layers(layers: int) -> list[int]:
    """The layers whose attention is summed."""
    return list(range(layers // 2, layers))


def _keep_queries(
    layer: AttentionLayer, token: torch.Tensor, queries: dict[int, torch.Tensor]
) -> Callable[..., None]:
    attention = layer.attention

    def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        query = args[0] if args else kwargs["q"]
        shaped = query.view(len(query), attention.tp_q_head_num, attention.qk_head_dim)
        queries[layer.layer_id] = shaped[token]

    return keep
