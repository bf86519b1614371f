"""The CPU attention backend against float64 softmax attention."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radix_rope.integration.cpu.attention import CpuAttentionBackend, _attend, _attend_masked


def backend() -> CpuAttentionBackend:
    runner = SimpleNamespace(device="cpu", req_to_token_pool=None, token_to_kv_pool=None)
    return CpuAttentionBackend(runner)


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    prefix: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Causal attention in float64; query [m, h, d], key and value [n, g, d]."""
    m, heads, _ = query.shape
    group = heads // key.shape[1]
    key, value = (t.double().repeat_interleave(group, dim=1) for t in (key, value))
    scores = torch.einsum("mhd,nhd->hmn", query.double(), key) * scale
    position = torch.arange(prefix, prefix + m).unsqueeze(1)
    column = torch.arange(key.shape[0]).unsqueeze(0)
    hidden = column > position
    if window is not None:
        hidden |= column < position - window
    scores.masked_fill_(hidden, float("-inf"))
    return torch.einsum("hmn,nhd->mhd", scores.softmax(-1), value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (8, 1)])
@pytest.mark.parametrize("window", [None, 20])
def test_rows_equal_the_reference(
    dtype: torch.dtype, heads: tuple[int, int], window: int | None
) -> None:
    torch.manual_seed(0)
    query_heads, kv_heads, dim, slots = *heads, 64, 400
    k_cache = torch.randn(slots, kv_heads, dim, dtype=dtype)
    v_cache = torch.randn(slots, kv_heads, dim, dtype=dtype)
    req_to_token = torch.stack([torch.randperm(slots)[:150] for _ in range(3)]).to(torch.int32)
    # Three rows of request 1, one cold request, one decode-like row.
    rows = [(1, 0, 40), (1, 70, 30), (1, 120, 7), (0, 0, 90), (2, 99, 1)]
    query = torch.randn(sum(r[2] for r in rows), query_heads, dim, dtype=dtype)
    lens = {
        "req_pool_indices": torch.tensor([r[0] for r in rows]),
        "seq_lens": torch.tensor([r[1] + r[2] for r in rows]),
        "extend_prefix_lens": torch.tensor([r[1] for r in rows], dtype=torch.int32),
        "extend_seq_lens": torch.tensor([r[2] for r in rows], dtype=torch.int32),
    }

    def run() -> torch.Tensor:
        return backend()._run_sdpa_forward_extend(
            query,
            torch.empty_like(query),
            k_cache,
            v_cache,
            req_to_token,
            **lens,
            scaling=0.125,
            enable_gqa=query_heads != kv_heads,
            causal=True,
            sliding_window_size=window,
        )

    output = run()
    first = 0
    bound = 2e-6 if dtype == torch.float32 else 2e-2
    for req, prefix, length in rows:
        slots_of_row = req_to_token[req, : prefix + length].long()
        expected = reference(
            query[first : first + length],
            k_cache[slots_of_row],
            v_cache[slots_of_row],
            prefix,
            0.125,
            window,
        )
        assert (output[first : first + length].double() - expected).abs().max() < bound
        first += length
    assert all(torch.equal(run(), output) for _ in range(3)), "not bit-stable"


@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.parametrize(("prefix", "length"), [(120, 904), (640, 660), (512, 600)])
def test_a_long_row_behind_a_prefix_is_computed_in_blocks(
    prefix: int, length: int, window: int | None
) -> None:
    torch.manual_seed(3)
    query = torch.randn(length, 9, 64)
    key, value = torch.randn(3, prefix + length, 64), torch.randn(3, prefix + length, 64)
    output = _attend(query, key, value, prefix, 0.125, window)
    # One call computes what the mask hides as well. (Equal to the bit on the processors tried.)
    whole = _attend_masked(query, key, value, prefix, 0.125, window)
    assert (output - whole).abs().max() < 1e-6
    expected = reference(query, key.transpose(0, 1), value.transpose(0, 1), prefix, 0.125, window)
    assert (output.double() - expected).abs().max() < 2e-6


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(1)
    cache = torch.randn(300, 3, 64)
    req_to_token = torch.randperm(300)[:200].reshape(1, 200).to(torch.int32)
    query = torch.randn(60, 9, 64)

    def run(rows: list[tuple[int, int]], q: torch.Tensor) -> torch.Tensor:
        args: dict[str, Any] = {
            "req_pool_indices": torch.zeros(len(rows), dtype=torch.int64),
            "seq_lens": torch.tensor([p + n for p, n in rows]),
            "extend_prefix_lens": torch.tensor([p for p, _ in rows]),
            "extend_seq_lens": torch.tensor([n for _, n in rows]),
        }
        return backend()._run_sdpa_forward_extend(
            q,
            torch.empty_like(q),
            cache,
            cache,
            req_to_token,
            **args,
            scaling=0.1,
            enable_gqa=True,
            causal=True,
        )

    together = run([(50, 20), (160, 40)], query)
    assert torch.equal(together[:20], run([(50, 20)], query[:20]))
    assert torch.equal(together[20:], run([(160, 40)], query[20:]))


def test_decode_equals_the_reference() -> None:
    torch.manual_seed(2)
    cache_k, cache_v = torch.randn(100, 3, 64), torch.randn(100, 3, 64)
    req_to_token = torch.stack([torch.randperm(100)[:60] for _ in range(2)]).to(torch.int32)
    query = torch.randn(2, 9, 64)
    output = backend()._run_sdpa_forward_decode(
        query,
        torch.empty_like(query),
        cache_k,
        cache_v,
        req_to_token,
        torch.tensor([0, 1]),
        torch.tensor([60, 13]),
        scaling=0.125,
        enable_gqa=True,
    )
    for i, end in enumerate((60, 13)):
        slots = req_to_token[i, :end].long()
        expected = reference(query[i : i + 1], cache_k[slots], cache_v[slots], end - 1, 0.125, None)
        assert (output[i].double() - expected[0]).abs().max() < 2e-6
