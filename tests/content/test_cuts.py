"""Plans cut at a number of computed tokens, and runs found again after splits."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_rope.content import ContentTree, PlanOptions, ReusePlan, Segment, check_plan, make_plan

DOCUMENT = np.arange(1000, 1600)


def cached() -> tuple[ContentTree, Segment]:
    """The document, cached in one piece."""
    tree = ContentTree(stride=8)
    return tree, tree.insert(None, DOCUMENT, namespace=None)


def pieces_of(sizes: list[tuple[int, int]]) -> np.ndarray:
    """Unknown tokens and stretches of the document in turns: (unknown, known) lengths."""
    parts, fresh, at = [], 10_000, 0
    for unknown, known in sizes:
        parts.append(np.arange(fresh, fresh + unknown))
        fresh += unknown
        at = (at + 37) % (len(DOCUMENT) - known)
        parts.append(DOCUMENT[at : at + known])
    parts.append(np.array([9_999]))
    return np.concatenate(parts)


def naive_computed(plan: ReusePlan, end: int) -> int:
    """Tokens of [begin, end) that are computed if it is a forward of its own, one by one."""
    reused = set()
    for run in plan.runs:
        kept = [x for x in range(run.begin, run.end) if x < end - 1]
        if len(kept) >= plan.options.min_run_tokens:
            reused |= set(kept)
    return sum(x not in reused for x in range(plan.begin, end))


SIZES = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 120)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=300)
@given(SIZES, st.integers(0, 300), st.sampled_from([1, 4, 16]), st.integers(1, 40))
def test_cut_where_computed_tokens_reach_the_budget(sizes, budget, page_size, least):  # type: ignore[no-untyped-def]
    tree, _ = cached()
    tokens = pieces_of(sizes)
    options = PlanOptions(min_run_tokens=least, recompute_tokens=4)
    plan = make_plan(tree, tokens, 0, len(tokens), None, options)
    if plan is None:
        return
    end = plan.end_within(budget, page_size)
    fitting = [
        e
        for e in [*range(page_size, len(tokens), page_size), len(tokens)]
        if naive_computed(plan, e) <= budget
    ]
    assert end == max(fitting, default=0)
    # Never before the place where a prompt without runs would be cut.
    assert end >= min(len(tokens), budget) // page_size * page_size or end == len(tokens)
    for cut in {end, len(tokens) // 2, len(tokens)} - {0}:
        part = plan.until(cut)
        if part is None:
            assert naive_computed(plan, cut) == cut
        else:
            check_plan(part, tokens)
            assert (part.begin, part.end) == (0, cut)
            assert part.computed_tokens == naive_computed(plan, cut)


def test_chunks_in_turn_compute_no_more_than_the_budget_each() -> None:
    tree, _ = cached()
    tokens = pieces_of([(30, 200), (45, 300), (80, 90), (10, 0)])
    options = PlanOptions(min_run_tokens=32, recompute_tokens=8)
    begin, computed = 0, []
    while begin < len(tokens):
        plan = make_plan(tree, tokens, begin, len(tokens), None, options)
        if plan is None:
            end = min(len(tokens), begin + 40)
            computed.append(end - begin)
        else:
            end = plan.end_within(40)
            part = plan.until(end)
            computed.append(end - begin if part is None else part.computed_tokens)
            if part is not None:
                check_plan(part, tokens)
        assert end > begin, "no progress"
        begin = end
    assert max(computed) <= 40
    # By length it would have been 19 chunks, each in the middle of something.
    assert computed == [40, 40, 40, 40, 30]


def test_positions_to_compute_are_cut_too() -> None:
    tree, _ = cached()
    tokens = pieces_of([(20, 300)])
    plan = make_plan(tree, tokens, 0, len(tokens), None, PlanOptions(), [(200, len(tokens))])
    assert plan is not None
    part = plan.until(210)
    assert part is not None and part.must_compute == ((200, 210),)
    check_plan(part, tokens)
    assert [(run.begin, run.end) for run in part.runs] == [(36, 200)]
    before = plan.until(190)
    assert before is not None and before.must_compute == ()


def test_a_run_is_found_again_after_splits() -> None:
    tree, segment = cached()
    tokens = pieces_of([(20, 300)])
    plan = make_plan(tree, tokens, 0, len(tokens), None)
    assert plan is not None
    (run,) = plan.runs
    version = tree.version
    low, high = run.donor_begin, run.donor_begin + len(run)
    for at in (low + 50, high - 10, high + 20, low - 10):
        owner = segment
        while not owner.start < at < owner.end:
            assert owner.parent is not None
            owner = owner.parent
        tree.split(owner, at - owner.start)
    assert tree.version == version, "a split changes no plan"
    again = run.found_again()
    assert len(again.pieces) == 3
    check_plan(plan.with_runs([again]), tokens)
    assert make_plan(tree, tokens, 0, len(tokens), None) == plan.with_runs([again])


def test_the_version_grows_with_what_could_change_a_plan() -> None:
    tree, segment = cached()
    versions = [tree.version]

    def grew() -> bool:
        versions.append(tree.version)
        return versions[-1] > versions[-2]

    leaf = tree.insert(segment, np.arange(40), namespace=None)
    assert grew()
    tree.touch(leaf)
    assert not grew()
    tree.set_provenance(leaf, leaf.provenance)
    assert grew()
    tree.remove(leaf)
    assert grew()
    tree.reset()
    assert grew()
