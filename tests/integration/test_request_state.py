"""A request's provenance against a naive twin that keeps one label per token."""

from hypothesis import given
from hypothesis import strategies as st

from radix_rope.content.segment import Provenance
from radix_rope.integration.cache import _page_spans
from radix_rope.integration.request import EXACT, PathProvenance, RequestState


@st.composite
def splices(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]]]:
    """A length and disjoint ascending (begin, end, generations) runs within it."""
    length = draw(st.integers(1, 200))
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=8, unique=True)))
    runs = [
        (begin, end, draw(st.integers(1, 4)))
        for begin, end in zip(cuts[::2], cuts[1::2], strict=False)
    ]
    return length, runs


@given(splices(), st.integers(0, 200), st.sampled_from([1, 4, 16]))
def test_spans_equal_one_label_per_token(
    case: tuple[int, list[tuple[int, int, int]]], start: int, page_size: int
) -> None:
    length, runs = case
    state = RequestState()
    state.begin_extend(0, 0, PathProvenance())
    labels = [EXACT] * (length + start)
    worst = 0
    for begin, end, generations in runs:
        provenance = Provenance(exact=False, copied=True, generations=generations)
        state.splice(begin, end, provenance)
        worst = max(worst, generations)
    if runs:
        first = runs[0][0]
        computed = Provenance(exact=False, generations=worst)
        labels[first:] = [computed] * (len(labels) - first)
        for begin, end, generations in runs:
            labels[begin:end] = [Provenance(False, True, generations)] * (end - begin)
    spans = list(state.spans(start, len(labels)))
    flat = [provenance for begin, end, provenance in spans for _ in range(begin, end)]
    assert flat == labels[start:]

    # Page-aligned cuts: nothing approximate inside a page that is called exact.
    pages = len(labels[start:]) // page_size
    if pages:
        covered = start
        for cut, provenance in _page_spans(state, start, pages * page_size, page_size):
            assert (cut - start) % page_size == 0 and cut > covered
            inside = labels[covered:cut]
            assert provenance.exact == all(label.exact for label in inside)
            assert provenance.generations == max(label.generations for label in inside)
            covered = cut
        assert covered == start + pages * page_size


def test_the_tree_decides_about_its_own_part() -> None:
    state = RequestState()
    state.begin_extend(0, 0, PathProvenance())
    state.splice(10, 50, Provenance(exact=False, copied=True, generations=1))
    # The tree had exact nodes for all of it: later tokens see exact KV again.
    state.begin_extend(100, 100, PathProvenance())
    assert list(state.spans(100, 120)) == [(100, 120, EXACT)]
    # The tree holds [0, 96) as approximate from 32 on.
    state.begin_extend(96, 96, PathProvenance(32, 2))
    assert [p.exact for _, _, p in state.spans(0, 120)] == [True, False]
    assert next(iter(state.spans(96, 120)))[2].generations == 2


def test_a_partial_page_after_an_approximate_row_stays_approximate() -> None:
    state = RequestState()
    state.begin_extend(0, 0, PathProvenance())
    state.splice(10, 50, Provenance(exact=False, copied=True, generations=1))
    # [0, 96) went into the tree, [96, 100) is still the request's own.
    state.begin_extend(96, 100, PathProvenance())
    assert not next(iter(state.spans(96, 100)))[2].exact
