"""How much attention each key receives from the last tokens of a sequence.

Owns the formula: softmax(scaling * q k^T) of the causal attention that the model itself computes,
summed over queries and heads. Knows neither SGLang nor plans.
"""

from __future__ import annotations

import torch

# Scores held at a time: 64 MiB of float32.
_BLOCK_ELEMENTS = 1 << 24


def received_attention(
    queries: torch.Tensor, keys: torch.Tensor, scaling: float, logit_cap: float = 0.0
) -> torch.Tensor:
    """Sum the attention weights that each key gets.

    Args:
        queries: [m, heads, head_dim], of the sequence's last m tokens, rotated.
        keys: [n, kv_heads, head_dim] of the whole sequence, n >= m, rotated, in any float dtype;
            kv_heads divides heads, and a group of neighbouring heads shares one.
        scaling: what q k^T is multiplied by.
        logit_cap: c > 0 replaces each logit x by c * tanh(x / c).

    Returns:
        float32 [n] that sums up to m * heads.
    """
    m, heads, head_dim = queries.shape
    n, kv_heads, _ = keys.shape
    group = heads // kv_heads
    grouped = queries.reshape(m, kv_heads, group, head_dim).permute(1, 0, 2, 3).float() * scaling
    received = torch.zeros(n, dtype=torch.float32, device=keys.device)
    key_position = torch.arange(n, device=keys.device)
    query_position = torch.arange(n - m, n, device=keys.device)
    step = max(1, _BLOCK_ELEMENTS // (group * n))
    for head in range(kv_heads):
        head_keys = keys[:, head].float()
        for low in range(0, m, step):
            block = grouped[head, low : low + step]
            logits = block @ head_keys.T  # [queries, group, n]
            if logit_cap > 0:
                logits = logit_cap * torch.tanh(logits / logit_cap)
            hidden = key_position > query_position[low : low + step, None]
            logits.masked_fill_(hidden[:, None], float("-inf"))
            received += logits.softmax(dim=-1).sum(dim=(0, 1))
    return received
