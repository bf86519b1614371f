"""Adversarial content: work stays within the documented bound and plans stay sound and useful."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from radix_rope.content import ContentTree, PlanOptions, check_plan, make_plan, search

Array = npt.NDArray[np.int64]
RANDOM = np.random.default_rng(11)


def fresh(size: int) -> Array:
    return RANDOM.integers(0, 2**40, size)


def one_token() -> tuple[list[Array], Array]:
    return [np.full(100_000, 7)], np.concatenate([fresh(3), np.full(100_000, 7)])


def one_token_in_a_short_donor() -> tuple[list[Array], Array]:
    return [np.full(512, 7)], np.full(50_000, 7)


def one_token_in_many_donors() -> tuple[list[Array], Array]:
    return [np.concatenate([[i], np.full(1000, 7)]) for i in range(100)], np.full(20_000, 7)


def periodic() -> tuple[list[Array], Array]:
    period = fresh(33)
    return [np.tile(period, 600)], np.concatenate([fresh(5), np.tile(period, 600)])


def near_duplicates() -> tuple[list[Array], Array]:
    base = fresh(1000)
    documents = []
    for _ in range(2000):
        document = base.copy()
        document[RANDOM.integers(0, 1000, 4)] = fresh(4)
        documents.append(np.concatenate([fresh(int(RANDOM.integers(1, 64))), document]))
    return documents, np.concatenate([fresh(17), base])


def contained_many_times() -> tuple[list[Array], Array]:
    inner = fresh(200)
    parts = [part for _ in range(300) for part in (inner, fresh(int(RANDOM.integers(1, 40))))]
    return [np.concatenate(parts)], np.concatenate([fresh(3), *parts])


CASES = [
    one_token,
    one_token_in_a_short_donor,
    one_token_in_many_donors,
    periodic,
    near_duplicates,
    contained_many_times,
]


def filled(documents: list[Array]) -> ContentTree:
    tree = ContentTree()
    for document in documents:
        tree.insert(None, document, namespace=None)
    return tree


def worst_overrun(tree: ContentTree, tokens: int) -> int:
    """Comparisons allowed after the budget ran out, as docs/matching.md derives them.

    The donor in hand, then tokens / stride more: 4 slices each to the left and to the right, for
    these donors are one segment each, and one more per full slice of the request.
    """
    slices = 4 + tokens // (1 << 14)
    return 2 * slices + tokens // tree.stride * 8 + slices


@pytest.mark.parametrize("case", CASES)
def test_work_is_bounded(case: Callable[[], tuple[list[Array], Array]]) -> None:
    documents, request = case()
    tree = filled(documents)
    size = len(request)
    plan = make_plan(tree, request, 0, size, None)
    assert plan is not None
    check_plan(plan, request)
    assert plan.reused_tokens > 0.75 * size, "so much equal content must be of use"
    limit = search.COMPARISONS_FIXED + search.COMPARISONS_PER_TOKEN * size
    assert tree.stats.comparisons <= limit + worst_overrun(tree, size)


@pytest.mark.parametrize("case", CASES)
def test_past_the_budget_covered_content_is_still_reused(
    case: Callable[[], tuple[list[Array], Array]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "COMPARISONS_FIXED", 0)
    monkeypatch.setattr(search, "COMPARISONS_PER_TOKEN", 0)
    documents, request = case()
    tree = filled(documents)
    plan = make_plan(tree, request, 0, len(request), None)
    assert tree.stats.budget_exhausted == 1
    assert plan is not None
    check_plan(plan, request)
    assert plan.reused_tokens > 0.6 * len(request)
    assert tree.stats.comparisons <= worst_overrun(tree, len(request))


def test_the_matching_one_of_thousands_of_near_duplicates_is_found() -> None:
    documents, _ = near_duplicates()
    tree = filled(documents)
    for number in (0, 777, 1999):
        request = np.concatenate([fresh(29), documents[number], fresh(9)])
        plan = make_plan(tree, request, 0, len(request), None)
        assert plan is not None
        check_plan(plan, request)
        # The document is the donor of one run: windows few documents hold are looked at first.
        (run,) = plan.runs
        assert (run.begin, run.end) == (29 + 16, 29 + len(documents[number]))


def test_best_donors_are_kept_when_there_are_too_many() -> None:
    """With one candidate allowed, exact wins over approximate and newer over older."""
    from radix_rope.content import Provenance

    body = fresh(200)
    approximate = Provenance(exact=False, generations=1)
    tree = ContentTree(max_candidates=1)
    opening = [fresh(64) for _ in range(4)]  # multiples of the stride: equal windows
    kinds = [approximate, Provenance(), Provenance(), approximate]
    segments = [
        tree.insert(None, np.concatenate([o, body]), namespace=None, provenance=kind)
        for o, kind in zip(opening, kinds, strict=True)
    ]
    request = np.concatenate([fresh(64), body])
    (candidate,) = tree.candidates(request, None, 0, len(request))
    assert candidate.pieces[0].segment is segments[2]
    tree.set_provenance(segments[2], approximate)
    (candidate,) = tree.candidates(request, None, 0, len(request))
    assert candidate.pieces[0].segment is segments[1]
    tree.set_provenance(segments[3], Provenance())
    (candidate,) = tree.candidates(request, None, 0, len(request))
    assert candidate.pieces[0].segment is segments[3]
    tree.check_invariants()


def test_thousands_of_siblings_under_one_parent() -> None:
    tree = ContentTree()
    top = tree.insert(None, fresh(64), namespace=None)
    tails = [fresh(64) for _ in range(5000)]
    for tail in tails:
        tree.insert(top, tail, namespace=None)
    request = np.concatenate([fresh(10), top.tokens, tails[4321], fresh(10)])
    plan = make_plan(tree, request, 0, len(request), None, PlanOptions())
    assert plan is not None
    check_plan(plan, request)
    assert plan.reused_tokens == 128 - 16
