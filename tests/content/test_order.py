"""The order in which donors are preferred, one rule per test, each against the rules below it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from radix_rope.content import (
    ContentTree,
    PlanOptions,
    Provenance,
    ReusePlan,
    Segment,
    check_plan,
    make_plan,
)

EXACT = Provenance()
APPROXIMATE = Provenance(exact=False, generations=1)
COPIED = Provenance(exact=False, copied=True, generations=1, roundings=1)
OPTIONS = PlanOptions(min_run_tokens=64, recompute_tokens=16)
RANDOM = np.random.default_rng(5)

Array = npt.NDArray[np.int64]


def fresh(size: int) -> Array:
    return RANDOM.integers(0, 2**40, size)


DOCUMENT = fresh(2000)


class Case:
    """A tree and a request made of a unique opening, `context` and DOCUMENT[:size]."""

    def __init__(self, context: Array | None = None, size: int = 1000) -> None:
        self.tree = ContentTree()
        self.opening = fresh(700)
        self.context = fresh(600) if context is None else context
        self.document_at = 700 + len(self.context)
        self.request = np.concatenate([self.opening, self.context, DOCUMENT[:size], fresh(40)])

    def donor(
        self,
        context_tokens: int = 0,
        size: int = 1000,
        provenance: Provenance = EXACT,
        before: int = 300,
        owner: str = "",
    ) -> Segment:
        """Cache DOCUMENT[:size] after the last `context_tokens` of the request's context."""
        shared = self.context[len(self.context) - context_tokens :]
        tokens = np.concatenate([fresh(before), shared, DOCUMENT[:size], fresh(30)])
        return self.tree.insert(None, tokens, namespace=None, provenance=provenance, owner=owner)

    def plan(self, options: PlanOptions = OPTIONS, **more: object) -> ReusePlan | None:
        plan = make_plan(self.tree, self.request, 0, len(self.request), None, options, **more)  # type: ignore[arg-type]
        if plan is not None:
            check_plan(plan, self.request)
        self.tree.check_invariants()
        return plan

    def document_donor(self) -> Segment:
        """The donor of the middle of the document."""
        plan = self.plan()
        assert plan is not None
        at = self.document_at + 500
        (run,) = [run for run in plan.runs if run.begin <= at < run.end]
        pieces = [p for p in run.pieces if p.donor_begin + run.delta <= at]
        return pieces[-1].segment


# Each rule wins against every rule after it: the winner is worse in all of those.


def test_exact_before_approximate() -> None:
    case = Case()
    exact = case.donor(context_tokens=0, before=0, size=900)  # at 0, no context, shorter, older
    case.donor(context_tokens=500, size=1000, provenance=APPROXIMATE)
    assert case.document_donor() is exact


def test_longer_left_context_before_all_that_follows() -> None:
    case = Case(context=fresh(300))
    longest = case.donor(
        context_tokens=300, before=0, size=900, provenance=Provenance(exact=False, generations=5)
    )  # at position 0, more generations, shorter, older
    case.donor(context_tokens=299, size=1000, provenance=APPROXIMATE)
    case.donor(context_tokens=100, size=1000, provenance=APPROXIMATE)
    assert case.document_donor() is longest


def test_left_context_counts_up_to_512_tokens() -> None:
    case = Case()
    # Where the document begins, 512 and 550 tokens of context are equally good: the longer run
    # decides. There is no run before it, for both donors' contexts are cut off at 560.
    case.context = case.context[:0]
    shared = fresh(550)
    must = [(0, 700 + 550)]
    case.request = np.concatenate([case.opening, shared, DOCUMENT[:1000], fresh(40)])
    case.document_at = 700 + 550
    case.tree.insert(
        None, np.concatenate([fresh(9), shared, DOCUMENT[:900], fresh(9)]), namespace=None
    )
    longer = case.tree.insert(
        None, np.concatenate([fresh(9), shared[-512:], DOCUMENT[:1000], fresh(9)]), namespace=None
    )
    plan = case.plan(must_compute=must)
    assert plan is not None and [p.segment for p in plan.runs[0].pieces] == [longer]
    assert plan.runs[0].begin == case.document_at  # so much context needs no repair
    assert plan.runs[0].left_context_tokens == 512


def test_left_context_counts_tokens_that_are_computed_or_in_the_prefix() -> None:
    case = Case()
    matching = case.donor(context_tokens=200, size=900)
    case.donor(context_tokens=0, size=1000)
    for begin, must in ((case.document_at, ()), (0, ((0, case.document_at),))):
        plan = make_plan(case.tree, case.request, begin, len(case.request), None, OPTIONS, must)
        assert plan is not None
        check_plan(plan, case.request)
        run = plan.runs[0]
        assert run.pieces[0].segment is matching
        # Of the 256 tokens that would repair it, 200 match: 16 * 56 / 256, rounded up.
        assert (run.begin, run.left_context_tokens) == (case.document_at + 4, 200)


def test_donor_at_position_0_loses() -> None:
    case = Case()
    more = Provenance(exact=False, generations=5)
    elsewhere = case.donor(before=300, size=900, provenance=more)
    case.donor(before=0, size=1000, provenance=APPROXIMATE)
    assert case.document_donor() is elsewhere


def test_computed_before_copied() -> None:
    case = Case(context=fresh(300))
    more = Provenance(exact=False, generations=5)
    computed = case.donor(context_tokens=0, before=0, size=900, provenance=more)
    case.donor(context_tokens=300, size=1000, provenance=COPIED)
    assert case.document_donor() is computed


def test_keys_rounded_too_often_are_not_moved_again() -> None:
    case = Case()
    case.donor(
        size=1000, provenance=Provenance(exact=False, copied=True, generations=1, roundings=3)
    )
    for limit, served in ((None, True), (4, True), (3, False), (1, False)):
        options = replace(OPTIONS, max_roundings=limit)
        plan = make_plan(case.tree, case.request, 0, len(case.request), None, options)
        assert (plan is not None) == served
    with pytest.raises(ValueError, match="max_roundings"):
        replace(OPTIONS, max_roundings=0)


def test_fewer_generations_first() -> None:
    case = Case()
    once = case.donor(size=900, provenance=COPIED)
    case.donor(size=1000, provenance=Provenance(exact=False, copied=True, generations=2))
    assert case.document_donor() is once


def test_longest_run_first() -> None:
    case = Case()
    longest = case.donor(size=1000)
    newer = case.donor(size=999)
    case.tree.touch(newer)
    assert case.document_donor() is longest


def test_most_recently_used_first() -> None:
    case = Case()
    one, two = case.donor(), case.donor()
    assert case.document_donor() is two
    case.tree.touch(one)
    assert case.document_donor() is one


def test_first_inserted_breaks_the_last_tie() -> None:
    case = Case()
    one, two = case.donor(), case.donor()
    two.last_used = one.last_used  # as after a touch of a path that holds both
    assert case.document_donor() is one


# How runs are resolved along the request.


def test_when_a_donor_ends_the_next_best_takes_over_with_its_own_context() -> None:
    case = Case(size=1000)
    first = case.donor(context_tokens=100, size=400)
    second = case.donor(context_tokens=50, size=1000)
    case.donor(context_tokens=0, size=1000)
    plan = case.plan()
    assert plan is not None
    a, b = plan.runs
    assert (a.pieces[0].segment, b.pieces[0].segment) == (first, second)
    assert a.end == case.document_at + 400
    assert (b.begin, b.end) == (a.end, case.document_at + 1000)
    assert b.left_context_tokens == 50 + 400


def test_a_donor_that_would_reuse_too_little_leaves_its_place_to_the_next() -> None:
    case = Case(size=1000)
    case.donor(context_tokens=10, size=69)  # 79 tokens: 16 + 63
    next_best = case.donor(context_tokens=0, size=1000)
    plan = case.plan()
    assert plan is not None and [p.segment for p in plan.runs[0].pieces] == [next_best]
    assert plan.runs[0].begin == case.document_at + 16
    case = Case(size=1000)
    just_enough = case.donor(context_tokens=10, size=70)
    case.donor(context_tokens=0, size=1000)
    plan = case.plan()
    assert plan is not None and plan.runs[0].pieces[0].segment is just_enough
    assert len(plan.runs[0]) == 64 and len(plan.runs) == 2


def test_short_runs_are_computed() -> None:
    case = Case(size=79)
    case.donor(size=79)
    assert case.plan() is None
    case = Case(size=80)
    case.donor(size=80)
    plan = case.plan()
    assert plan is not None and [len(run) for run in plan.runs] == [64]


def test_provenance_that_changes_within_a_donor_costs_one_head() -> None:
    case = Case(size=1000)
    segment = case.donor(size=1000)
    upper = case.tree.split(segment, 300 + 250)
    middle = case.tree.split(segment, 500)
    case.tree.set_provenance(middle, APPROXIMATE)
    plan = case.plan()
    assert plan is not None
    (run,) = plan.runs
    assert (run.begin, run.end) == (case.document_at + 16, case.document_at + 1000)
    assert [p.segment for p in run.pieces] == [upper, middle, segment]
    assert [p.length for p in run.pieces] == [234, 500, 250]


def test_a_short_approximate_part_joins_the_exact_run_beside_it() -> None:
    """40 approximate tokens at either end or in the middle are worth no run of their own."""
    for cuts, kinds in (
        ([340], [APPROXIMATE, EXACT]),
        ([1260], [EXACT, APPROXIMATE]),
        ([700, 740], [EXACT, APPROXIMATE, EXACT]),
        ([700, 740], [APPROXIMATE, EXACT, APPROXIMATE]),
    ):
        case = Case(size=1000)
        segment = case.donor(size=1000)
        parts = [segment]
        for cut in reversed(cuts):
            parts.insert(0, case.tree.split(parts[0], cut))
        for part, kind in zip(parts, kinds, strict=True):
            case.tree.set_provenance(part, kind)
        plan = case.plan()
        assert plan is not None
        at = case.document_at
        assert [(r.begin - at, r.end - at) for r in plan.runs] == [(16, 1000)]


def test_another_exact_donor_replaces_the_approximate_middle() -> None:
    case = Case(size=1000)
    segment = case.donor(size=1000)
    upper = case.tree.split(segment, 300 + 250)
    middle = case.tree.split(segment, 500)
    case.tree.set_provenance(middle, APPROXIMATE)
    other = case.tree.insert(
        None, np.concatenate([fresh(50), DOCUMENT[200:800], fresh(50)]), namespace=None
    )
    plan = case.plan()
    assert plan is not None
    at = case.document_at
    got = [(r.begin - at, r.end - at, [p.segment for p in r.pieces]) for r in plan.runs]
    # The first donor has the longer context up to its cut; then the other, with its own context.
    # Its 50 tokens shorten its head to 16 * 206 / 256, and the last run needs none.
    assert got == [(16, 250, [upper]), (263, 800, [other]), (800, 1000, [segment])]
    assert [r.left_context_tokens for r in plan.runs] == [0, 50, 512]


def test_generation_limit_cuts_a_donor() -> None:
    case = Case(size=1000)
    segment = case.donor(size=1000)
    case.tree.split(segment, 300 + 500)
    case.tree.set_provenance(segment, COPIED)
    at = case.document_at
    for limit, end in ((None, 1000), (1, 1000), (0, 500)):
        plan = case.plan(PlanOptions(max_generations=limit))
        assert plan is not None
        assert [(r.begin - at, r.end - at) for r in plan.runs] == [(16, end)]


def test_must_compute_ranges_and_the_last_token_are_rows() -> None:
    case = Case(size=1000)
    case.donor(size=1000)
    at = case.document_at
    case.request = case.request[: at + 1000]  # ends with the document
    plan = case.plan(must_compute=[(at + 128, at + 129), (at + 310, at + 320)])
    assert plan is not None
    assert [(r.begin - at, r.end - at) for r in plan.runs] == [(16, 128), (137, 310), (320, 999)]
    assert [(r.begin, r.end) for r in plan.rows] == [
        (0, at + 16),
        (at + 128, at + 137),
        (at + 310, at + 320),
        (at + 999, at + 1000),
    ]
    assert plan.reused_tokens == 112 + 173 + 679
    assert plan.computed_tokens == at + 1000 - plan.reused_tokens


def test_recompute_all_splits_rows_where_runs_would_be() -> None:
    case = Case(size=1000)
    case.donor(size=1000)
    reused, computed = case.plan(), case.plan(PlanOptions(recompute_all=True))
    assert reused is not None and computed is not None
    assert computed.runs == () and computed.reused_tokens == 0
    bounds = sorted((p.begin, p.end) for p in [*reused.rows, *reused.runs])
    assert [(r.begin, r.end) for r in computed.rows] == bounds


# How much of a run is computed at its head.


@pytest.mark.parametrize(
    ("context", "head"), [(0, 16), (1, 16), (16, 15), (128, 8), (240, 1), (255, 1), (256, 0)]
)
def test_the_head_is_shorter_the_more_context_matches(context: int, head: int) -> None:
    case = Case()
    case.donor(context_tokens=context)
    plan = case.plan(must_compute=[(0, case.document_at)])
    assert plan is not None
    (run,) = plan.runs
    assert (run.begin, run.head_tokens) == (case.document_at + head, head)
    assert run.left_context_tokens == context


@pytest.mark.parametrize(
    ("repair", "tokens", "head"),
    [("none", 16, 1), ("attention", 16, 1), ("head", 0, 1), ("head", 1, 1), ("head", 9, 9)],
)
def test_the_token_at_the_donors_position_0_is_never_copied(
    repair: str, tokens: int, head: int
) -> None:
    options = PlanOptions(repair=repair, recompute_tokens=tokens)
    case = Case()
    case.donor(before=0)
    plan = case.plan(options)
    assert plan is not None and plan.runs[0].begin == case.document_at + head
    # From its second token on it is like any other.
    plan = case.plan(options, must_compute=[(0, case.document_at + 1)])
    assert plan is not None
    assert plan.runs[0].head_tokens == (tokens if repair == "head" else 0)


@pytest.mark.parametrize("repair", ["none", "attention"])
def test_other_repairs_compute_no_head(repair: str) -> None:
    case = Case(size=64)
    case.donor(size=64)
    plan = case.plan(PlanOptions(repair=repair))
    assert plan is not None
    assert [(r.begin, r.head_tokens) for r in plan.runs] == [(case.document_at, 0)]
    assert case.plan(PlanOptions(repair="head")) is None  # 48 tokens are too few


def test_a_short_head_leaves_enough_of_a_short_run() -> None:
    case = Case(size=64)
    case.donor(context_tokens=256, size=64)
    plan = case.plan(must_compute=[(0, case.document_at)])
    assert plan is not None and len(plan.runs[0]) == 64
    case = Case(size=64)
    case.donor(context_tokens=255, size=64)
    assert case.plan(must_compute=[(0, case.document_at)]) is None


def test_what_stands_before_a_copy_does_not_shorten_its_head() -> None:
    case = Case()
    case.donor(context_tokens=300, provenance=COPIED)
    plan = case.plan(must_compute=[(0, case.document_at)])
    assert plan is not None
    (run,) = plan.runs
    assert (run.head_tokens, run.left_context_tokens) == (16, 0)


def test_a_copied_part_does_not_join_where_its_longer_head_would_cost_more() -> None:
    """10 copied tokens before a run without a head would bring a head of 16."""
    for copied_tokens, begin in ((10, 10), (40, 16)):
        case = Case()
        segment = case.donor(context_tokens=400)
        before = case.tree.split(segment, 700)
        part = case.tree.split(segment, copied_tokens)
        case.tree.set_provenance(part, COPIED)
        assert before.end == 700
        plan = case.plan(must_compute=[(0, case.document_at)])
        assert plan is not None
        assert [run.begin - case.document_at for run in plan.runs] == [begin]


# Where donors may stand.


def test_same_offset_other_text_before() -> None:
    tree = ContentTree()
    body = fresh(500)
    tree.insert(None, np.concatenate([fresh(20), body]), namespace=None)
    request = np.concatenate([fresh(20), body])
    plan = make_plan(tree, request, 0, len(request), None)
    assert plan is not None
    check_plan(plan, request)
    assert [(r.begin, r.end, r.delta) for r in plan.runs] == [(36, 519, 0)]


def test_donor_in_the_requests_own_prefix() -> None:
    tree = ContentTree()
    body = fresh(300)
    prefix = np.concatenate([fresh(50), body])
    segment = tree.insert(None, prefix, namespace=None)
    request = np.concatenate([prefix, fresh(5), body, fresh(5)])
    plan = make_plan(tree, request, len(prefix), len(request), None)
    assert plan is not None
    check_plan(plan, request)
    (run,) = plan.runs
    assert (run.begin, run.end, run.delta) == (350 + 5 + 16, 350 + 305, 305)
    assert run.pieces[0].segment is segment


def test_same_content_twice_in_a_request_from_one_donor() -> None:
    tree = ContentTree()
    body = fresh(300)
    tree.insert(None, np.concatenate([fresh(50), body]), namespace=None)
    request = np.concatenate([fresh(5), body, fresh(5), body, fresh(5)])
    plan = make_plan(tree, request, 0, len(request), None)
    assert plan is not None
    check_plan(plan, request)
    assert [(r.begin, r.end) for r in plan.runs] == [(21, 305), (326, 610)]


def test_run_across_a_chunk_boundary() -> None:
    tree = ContentTree()
    body = fresh(1000)
    tree.insert(None, np.concatenate([fresh(50), body]), namespace=None)
    request = np.concatenate([fresh(70), body, fresh(30)])
    first = make_plan(tree, request, 0, 512, None)
    second = make_plan(tree, request, 512, len(request), None)
    assert first is not None and second is not None
    check_plan(first, request)
    check_plan(second, request)
    assert [(r.begin, r.end, r.left_context_tokens) for r in first.runs] == [(86, 511, 0)]
    # What goes on in the next chunk stands after its own beginning.
    assert [(r.begin, r.end) for r in second.runs] == [(512, 1070)]
    assert second.runs[0].left_context_tokens == 512 - 70


def test_run_continues_into_the_right_child() -> None:
    tree = ContentTree(page_size=16)
    trunk = fresh(160)
    head = fresh(15)  # siblings may share all but one token of their first page
    top = tree.insert(None, trunk, namespace=None)
    tails = [np.concatenate([head, fresh(145)]) for _ in range(300)]
    children = [tree.insert(top, tail, namespace=None) for tail in tails]
    tree.check_invariants()
    request = np.concatenate([fresh(7), trunk, tails[123], fresh(9)])
    plan = make_plan(tree, request, 0, len(request), None)
    assert plan is not None
    check_plan(plan, request)
    (run,) = plan.runs
    assert [p.segment for p in run.pieces] == [top, children[123]]
    assert (run.begin, run.end) == (23, 327)


@pytest.mark.parametrize("other", ["b", "", None, ("a",), 1])
def test_namespaces_are_never_crossed(other: object) -> None:
    tree = ContentTree()
    body = fresh(500)
    tree.insert(None, body, namespace="a")
    tree.insert(None, fresh(500), namespace=other)
    assert make_plan(tree, body, 0, 500, other) is None
    assert tree.candidates(body, other, 0, 500) == []
    assert make_plan(tree, body, 0, 500, "a") is not None
