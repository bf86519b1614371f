"""CPU attention that computes only the query rows being extended.

SGLang's `torch_native` backend pads every query to the whole sequence and
repeats K and V for grouped-query heads. This one gathers K and V once per
request, folds the query heads of a group into the query dimension (so K and V
are never repeated), and lets torch's CPU flash kernel do the rest. Knows
nothing of the cache or of plans.
"""

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

from radix_rope.integration.cpu.masks import CausalMasks
from radix_rope.integration.cpu.platform import ATTENTION_BACKEND

_BLOCK_TOKENS = 512
"""How many keys torch's CPU flash kernel takes at a time."""

_MASKS = CausalMasks(max_bytes=64 << 20)


class CpuAttentionBackend(TorchNativeAttnBackend):  # type: ignore[misc]
    """`torch_native` with the padded and repeated work removed.

    Cross attention and encoder-only layers keep the parent's path. Results do
    not depend on what else is in the batch: every row is one kernel call.
    """

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """A forward begins."""
        _MASKS.clear()
        super().init_forward_metadata(forward_batch)

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        """Attention of every row's new tokens over the row's whole sequence.

        query, output: [tokens, heads, head_dim]; k_cache, v_cache: [slots,
        kv_heads, head_dim]; one entry per row in the length tensors.
        """
        if encoder_lens is not None or is_cross_attn or not causal:
            return super()._run_sdpa_forward_extend(  # type: ignore[no-any-return]
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
                extend_prefix_lens, extend_seq_lens, encoder_lens, scaling, enable_gqa,
                causal, is_cross_attn, sliding_window_size,
            )  # fmt: skip
        reqs = req_pool_indices.tolist()
        ends = seq_lens.tolist()
        longest: dict[int, int] = {}
        for req, end in zip(reqs, ends, strict=True):
            longest[req] = max(longest.get(req, 0), end)
        # Rows of one request share its K and V: gather them once.
        gathered: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        first = 0
        for req, prefix, length, end in zip(
            reqs, extend_prefix_lens.tolist(), extend_seq_lens.tolist(), ends, strict=True
        ):
            if length == 0:
                continue
            if req not in gathered:
                slots = req_to_token[req, : longest[req]]
                gathered[req] = (
                    _gather(k_cache, slots, query.dtype),
                    _gather(v_cache, slots, query.dtype),
                )
            key, value = gathered[req]
            rows = slice(first, first + length)
            output[rows] = _attend(
                query[rows], key[:, :end], value[:, :end], prefix, scaling, sliding_window_size
            )
            first += length
        return output

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        """One new token per request over its whole sequence; shapes as above."""
        if encoder_lens is not None or is_cross_attn:
            return super()._run_sdpa_forward_decode(  # type: ignore[no-any-return]
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
                encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
            )  # fmt: skip
        for i, (req, end) in enumerate(
            zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
        ):
            slots = req_to_token[req, :end]
            output[i : i + 1] = _attend(
                query[i : i + 1],
                _gather(k_cache, slots, query.dtype),
                _gather(v_cache, slots, query.dtype),
                end - 1,
                scaling,
                sliding_window_size,
            )
        return output


def _gather(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[kv_heads, tokens, head_dim] of the given slots, in the compute dtype."""
    return cache.index_select(0, slots).to(dtype).transpose(0, 1)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    prefix_tokens: int,
    scaling: float | None,
    sliding_window_size: int | None,
) -> torch.Tensor:
    """Causal attention of `query` [m, heads, d] standing after `prefix_tokens`.

    key, value: [kv_heads, prefix_tokens + m, d]. Returns [m, heads, d_v].
    """
    m, heads, dim = query.shape
    kv_heads = key.shape[0]
    group = heads // kv_heads
    # SGLang writes "no window" as None or -1.
    window = None if sliding_window_size is None or sliding_window_size < 0 else sliding_window_size
    if prefix_tokens == 0 and window is None:
        # Square and causal: the kernel skips the upper triangle by itself. The group is the batch,
        # over which K and V are the same memory.
        grouped = query.view(m, kv_heads, group, dim).permute(2, 1, 0, 3)
        out = scaled_dot_product_attention(
            grouped,
            key.expand(group, -1, -1, -1),
            value.expand(group, -1, -1, -1),
            is_causal=True,
            scale=scaling,
        )
        return out.permute(2, 1, 0, 3).reshape(m, heads, value.shape[-1])
    if m <= _BLOCK_TOKENS:
        return _attend_masked(query, key, value, prefix_tokens, scaling, window)
    # A mask does not keep the kernel from computing what it hides. Blocks that end where the
    # kernel's own blocks of keys do leave that out, and add in the same order as one call.
    parts = []
    first, end = prefix_tokens, prefix_tokens + m
    while first < end:
        last = min(end, (first // _BLOCK_TOKENS + 1) * _BLOCK_TOKENS)
        rows = query[first - prefix_tokens : last - prefix_tokens]
        parts.append(_attend_masked(rows, key[:, :last], value[:, :last], first, scaling, window))
        first = last
    return torch.cat(parts)


def _attend_masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    prefix_tokens: int,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """`_attend` in one call of the kernel, all query heads of a group at once."""
    m, heads, dim = query.shape
    kv_heads = key.shape[0]
    group = heads // kv_heads
    # [kv_heads, group * m, d]: the heads of a group are more query rows.
    folded = query.view(m, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    mask = None
    if m > 1 or window is not None:
        mask = _MASKS.get(m, prefix_tokens, group, window, query.dtype)
    out = scaled_dot_product_attention(
        folded.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), attn_mask=mask, scale=scaling
    )
    return (
        out[0].view(kv_heads, group, m, -1).permute(2, 0, 1, 3).reshape(m, heads, value.shape[-1])
    )


def register() -> None:
    """Make the backend known to the model runner; safe to call more than once."""

    def create(runner: Any) -> CpuAttentionBackend:
        if runner.use_mla_backend:
            _absorb_latents()
        return CpuAttentionBackend(runner)

    ATTENTION_BACKENDS[ATTENTION_BACKEND] = create


def _absorb_latents() -> None:
    """Have DeepSeek's models compute every prefill on the latent rows that the pool holds.

    For a backend it does not know SGLang expands the keys of a prefill without a prefix and
    hands them over beside the pool, which this backend does not read.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    def absorbed(attention: Any, forward_batch: Any) -> Any:
        return AttnForwardMethod.MLA

    AttentionBackendRegistry.register(ATTENTION_BACKEND, absorbed)
