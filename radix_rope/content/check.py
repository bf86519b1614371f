"""The checker of plans: what must hold of every plan, whoever made it.

Owns assertions about a plan and its request. May not know how the plan was found, so that it can
judge the planner.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radix_rope.content.plan import ReusePlan, Row, Run
from radix_rope.content.segment import Segment
from radix_rope.content.tree import as_tokens


def check_plan(plan: ReusePlan, tokens: npt.ArrayLike) -> None:
    """Raise AssertionError unless `plan` is sound for the request `tokens` (int64, (n,)).

    Checks that rows and runs partition the range, that the last token and `must_compute` are
    computed, that every donor piece holds the request's very tokens at the promised positions along
    one path of one namespace, and that runs respect `min_run_tokens`.
    """
    array = as_tokens(tokens)
    assert 0 <= plan.begin < plan.end <= len(array), "the plan's range is not within the request"
    parts: list[Row | Run] = sorted([*plan.rows, *plan.runs], key=lambda part: part.begin)
    at = plan.begin
    for part in parts:
        assert part.begin == at and part.end > part.begin, f"rows and runs leave a hole at {at}"
        at = part.end
    assert at == plan.end, "rows and runs do not reach the end of the range"
    assert list(plan.rows) == sorted(plan.rows, key=lambda row: row.begin), "rows are unordered"
    assert list(plan.runs) == sorted(plan.runs, key=lambda run: run.begin), "runs are unordered"
    assert plan.rows and plan.rows[-1].end == plan.end, "the last token is not computed"
    assert plan.runs or plan.options.recompute_all, "a plan without runs is no plan"
    assert not (plan.runs and plan.options.recompute_all), "recompute_all reuses nothing"
    namespaces = {piece.segment.namespace for run in plan.runs for piece in run.pieces}
    assert len(namespaces) <= 1, f"the plan mixes namespaces {namespaces}"
    for run in plan.runs:
        _check_run(plan, run, array)
    assert plan.computed_tokens + plan.reused_tokens == plan.end - plan.begin


def _check_run(plan: ReusePlan, run: Run, tokens: np.ndarray) -> None:
    assert len(run) >= plan.options.min_run_tokens, f"{run} is shorter than min_run_tokens"
    for low, high in plan.must_compute:
        assert max(low, run.begin) >= min(high, run.end), f"{run} reuses tokens of [{low}, {high})"
    assert run.pieces and run.pieces[0].donor_begin == run.donor_begin, "donor_begin is off"
    _check_head(plan, run, tokens)
    at = run.begin
    for index, piece in enumerate(run.pieces):
        segment = piece.segment
        assert piece.length > 0 and piece.offset >= 0
        assert piece.offset + piece.length <= len(segment.tokens), "a piece leaves its segment"
        assert piece.donor_begin == at - run.delta, "a piece stands at another delta"
        donor = segment.tokens[piece.offset : piece.offset + piece.length]
        assert np.array_equal(donor, tokens[at : at + piece.length]), "donor tokens differ"
        if index:
            before = run.pieces[index - 1]
            assert segment.parent is before.segment and piece.offset == 0, "pieces leave their path"
            assert before.offset + before.length == len(before.segment.tokens)
        at += piece.length
    assert at == run.end, "pieces do not cover the run"
    provenances = [piece.segment.provenance for piece in run.pieces]
    limit = plan.options.max_generations
    if limit is not None:
        assert all(p.exact or max(1, p.generations) <= limit for p in provenances)


def _check_head(plan: ReusePlan, run: Run, tokens: np.ndarray) -> None:
    """The head is as long as the options ask for, and what stands before it is the donor's too."""
    first = run.begin - run.head_tokens
    low = first - run.left_context_tokens
    assert 0 <= run.left_context_tokens <= 512, "left context counts up to 512"
    assert first >= plan.begin, "the head begins before the range"
    wanted = plan.options.head_tokens(run.left_context_tokens, first - run.delta)
    assert run.head_tokens == wanted, f"{run} should have a head of {wanted}"
    at = run.begin
    segment: Segment | None = run.pieces[0].segment
    holder = segment
    while at > low:
        assert segment is not None, "the left context leaves the donor's path"
        begin = max(low, segment.start + run.delta)
        if begin <= first < at:
            holder = segment
        donor = segment.tokens[begin - run.delta - segment.start : at - run.delta - segment.start]
        assert np.array_equal(donor, tokens[begin:at]), "the left context is not the donor's"
        at, segment = begin, segment.parent
    assert holder is not None
    assert not (holder.provenance.copied and run.left_context_tokens), "a copy has no left context"
