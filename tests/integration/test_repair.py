"""Second-pass repair without an engine: scores, fitting picks to rows, when it is worth it."""

from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_rope.content import PlanOptions, ReusePlan, Row, Run
from radix_rope.content.repair import plan_repair
from radix_rope.integration.attention_scores import received_attention
from radix_rope.integration.picks import choose_rows
from radix_rope.integration.repair import keys_at, no_second_pass
from radix_rope.integration.second_pass import FirstResults, second_batch, second_rows

ATTENTION = PlanOptions(repair="attention")


def reference(queries: Any, keys: Any, scaling: float, cap: float) -> Any:
    """Received attention in float64, one query and head at a time."""
    (m, heads, _), (n, kv_heads, _) = queries.shape, keys.shape
    received = np.zeros(n)
    for i in range(m):
        for head in range(heads):
            seen = n - m + i + 1
            logits = keys[:seen, head * kv_heads // heads] @ queries[i, head] * scaling
            if cap:
                logits = cap * np.tanh(logits / cap)
            weights = np.exp(logits - logits.max())
            received[:seen] += weights / weights.sum()
    return received


@pytest.mark.parametrize(
    ("m", "n", "heads", "kv_heads", "cap", "dtype"),
    [
        (1, 1, 1, 1, 0.0, torch.float32),
        (7, 40, 6, 2, 0.0, torch.float32),
        (20, 20, 4, 4, 0.0, torch.float32),
        (5, 33, 4, 1, 2.0, torch.float32),
        (7, 40, 6, 2, 0.0, torch.bfloat16),
    ],
)
def test_scores_equal_the_attention_in_float64(
    m: int, n: int, heads: int, kv_heads: int, cap: float, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    random = torch.Generator().manual_seed(m * n)
    queries = torch.randn(m, heads, 16, generator=random).to(dtype)
    keys = torch.randn(n, kv_heads, 16, generator=random).to(dtype)
    wanted = reference(queries.double().numpy(), keys.double().numpy(), 0.7, cap)
    for block in (1 << 24, 3 * n):  # in one piece, and query by query
        monkeypatch.setattr("radix_rope.integration.attention_scores._BLOCK_ELEMENTS", block)
        received = received_attention(queries, keys, 0.7, cap)
        np.testing.assert_allclose(received.numpy(), wanted, rtol=2e-5, atol=1e-6)
        assert received.sum().item() == pytest.approx(m * heads, rel=1e-5)


def test_keys_are_read_in_every_layout() -> None:
    flat = torch.arange(12 * 2 * 4).reshape(12, 2, 4).float()
    slots = torch.tensor([11, 0, 5])
    assert torch.equal(keys_at(flat, slots), flat[slots])
    hnd = flat.reshape(3, 4, 2, 4).transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(keys_at(hnd, slots), flat[slots])
    fp8 = flat.to(torch.float8_e4m3fn)
    assert torch.equal(keys_at(fp8, slots).float(), fp8.float()[slots])


@st.composite
def picking(draw: st.DrawFn) -> tuple[list[tuple[int, int]], Any, int, int]:
    runs, at = [], 0
    for gap, length in draw(
        st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60)), min_size=1, max_size=4)
    ):
        runs.append((at + gap, at + gap + length))
        at += gap + length
    total = sum(end - begin for begin, end in runs)
    seed, few = draw(st.integers(0, 99)), draw(st.booleans())
    scores = np.random.default_rng(seed).random(total).astype(np.float32)
    if few:
        scores = scores.round(1)  # ties
    return runs, scores, draw(st.integers(1, 100)), draw(st.integers(1, 40))


@settings(max_examples=400, deadline=None)
@given(picking())
def test_picks_fit_their_rows(case: tuple[list[tuple[int, int]], Any, int, int]) -> None:
    runs, scores, percent, max_rows = case
    rows = choose_rows(runs, scores, percent, max_rows)
    positions = [x for begin, end in runs for x in range(begin, end)]
    wanted = -(-len(positions) * percent // 100)
    picked = [x for begin, end in rows for x in range(begin, end)]
    assert 1 <= len(rows) <= max_rows
    assert set(picked) <= set(positions) and picked == sorted(set(picked))
    assert len(picked) <= wanted
    assert all(a[1] < b[0] for a, b in pairwise(rows)), "rows could be joined"
    best = sorted(zip(-scores, positions, strict=True))[:wanted]
    singles = sorted(x for _, x in best)
    alone = 1 + sum(b > a + 1 for a, b in pairwise(singles))
    if alone <= max_rows:
        assert picked == singles, "single tokens fit, and others were picked"
    assert choose_rows(runs, scores, percent, max_rows) == rows


def test_all_tokens_of_a_run_are_one_row() -> None:
    scores = np.random.default_rng(3).random(30).astype(np.float32)
    assert choose_rows([(5, 25), (30, 40)], scores, 100, 2) == [(5, 25), (30, 40)]
    # One row is left: the better of two blocks.
    assert choose_rows([(0, 4), (10, 14)], np.float32([0, 1, 1, 1, 2, 2, 2, 0]), 50, 1) == [
        (10, 14)
    ]


def test_a_peak_is_picked_alone_and_a_plateau_in_blocks() -> None:
    scores = np.zeros(100, dtype=np.float32)
    scores[[7, 30, 31, 80]] = [5, 4, 4, 3]
    assert choose_rows([(0, 100)], scores, 4, 3) == [(7, 8), (30, 32), (80, 81)]
    scores[:] = 0
    scores[10:90:2] = 1
    rows = choose_rows([(0, 100)], scores, 20, 4)
    assert len(rows) <= 4 and sum(end - begin for begin, end in rows) >= 16


def plan(*, runs: list[tuple[int, int]], end: int, options: PlanOptions) -> ReusePlan:
    rows, at = [], 0
    for low, high in runs:
        if at < low:
            rows.append(Row(at, low))
        at = high
    rows.append(Row(at, end))
    made = tuple(Run(low, high, low + 100, (), 0) for low, high in runs)
    return ReusePlan(0, end, made, tuple(rows), options)


@pytest.mark.parametrize(
    ("runs", "end", "possible", "kept"),
    [
        ([(10, 500)], 540, True, True),
        ([(10, 500)], 540, False, False),
        ([(10, 1500)], 1756, True, True),
        ([(10, 1500)], 1757, True, False),  # a question of 257 tokens
        ([(100, 200)], 210, True, False),  # most of it is computed anyway
        ([], 540, True, False),
    ],
)
def test_a_second_pass_only_where_it_is_worth_it(
    runs: list[tuple[int, int]], end: int, possible: bool, kept: bool
) -> None:
    asked = []

    def make(options: PlanOptions) -> ReusePlan:
        asked.append(options.repair)
        return plan(runs=runs, end=end, options=options)

    made = plan_repair(make, ATTENTION, possible)
    assert made is not None
    assert made.options.repair == asked[-1] == ("attention" if kept else "head")
    for repair in ("none", "head"):
        asked.clear()
        plan_repair(make, replace(ATTENTION, repair=repair), possible)
        assert asked == [repair]


def test_no_second_pass_over_shared_heads_or_latents() -> None:
    pool: Any = SimpleNamespace(v=[1])
    assert no_second_pass(1, pool) is None
    assert "--tp-size 2" in (no_second_pass(2, pool) or "")
    assert "MLA" in (no_second_pass(1, SimpleNamespace(v=[])) or "")  # type: ignore[arg-type]


def test_rows_that_are_left_are_dealt_out() -> None:
    plans = {
        index: plan(runs=[(10, 110)], end=120, options=replace(ATTENTION, attention_percent=10))
        for index in (0, 2, 3)
    }
    scattered = torch.zeros(100)
    scattered[::10] = 1
    scores = {index: scattered for index in plans}
    # 4 requests and 20 more rows: 7, 7 and 6.
    rows = second_rows(plans, scores, 4, 24)
    assert list(rows) == [0, 2, 3]
    assert all(own[-1] == (110, 120) for own in rows.values())
    for own, most in zip(rows.values(), (7, 7, 6), strict=True):
        assert 1 <= len(own) - 1 <= most
    assert list(second_rows(plans, scores, 4, 6)) == [0, 2]
    assert second_rows(plans, scores, 4, 4) == {}
    # No longer than it may be: 10 of 100 tokens, and the last gap of 10, were asked for.
    for most in (20, 16, 12, 11):
        own = second_rows(plans, scores, 4, 100, most)
        lengths = [sum(end - begin for begin, end in rows) for rows in own.values()]
        assert lengths == ([] if most == 11 else [most - 1] * 3), most
    many = second_rows(plans, scores, 4, 100)
    assert many[3] == [*((x, x + 1) for x in range(10, 110, 10)), (110, 120)]


@dataclass
class Batch:
    """What of SGLang's ForwardBatch the second pass reads."""

    extend_prefix_lens_cpu: list[int]
    extend_seq_lens_cpu: list[int]
    extend_logprob_start_lens_cpu: list[int]
    out_cache_loc: torch.Tensor
    return_logprob: bool = True


def test_requests_without_repair_leave_their_kv_and_keep_their_results() -> None:
    forward = Batch([0, 5, 0], [4, 3, 6], [4, 1, 4], torch.arange(100, 113))
    batch, rows = second_batch(forward, {2: [(1, 2), (3, 6)]})
    assert rows == {0: [(3, 4)], 1: [(6, 8)], 2: [(1, 2), (3, 6)]}
    assert batch.out_cache_loc.tolist() == [0] * 7 + list(range(107, 113))
    assert forward.out_cache_loc.tolist() == list(range(100, 113))

    def logits(value: float) -> Any:
        return SimpleNamespace(
            next_token_logits=torch.full((3, 2), value),
            input_token_logprobs=torch.full((4,), value),
            input_top_logprobs_val=[[], [value] * 2, [value] * 2],
            input_top_logprobs_idx=[[], [1, 2], [1, 2]],
            input_token_ids_logprobs_val=None,
            input_token_ids_logprobs_idx=None,
        )

    first, second = logits(1.0), logits(2.0)
    kept = FirstResults(first, [0, 1], [0, 2, 2])
    first.next_token_logits.fill_(9)  # a buffer that is used again
    kept.put_into(second)
    assert second.next_token_logits[:, 0].tolist() == [1, 1, 2]
    assert second.input_token_logprobs.tolist() == [1, 1, 2, 2]
    assert second.input_top_logprobs_val == [[], [1.0] * 2, [2.0] * 2]
