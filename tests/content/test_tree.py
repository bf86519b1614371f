"""The tree's lifecycle, its bad arguments, its counters and its index, without randomness."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

from radix_rope.content import ContentTree, PlanOptions, Provenance, fingerprint, make_plan
from radix_rope.content.filter import KeyFilter
from radix_rope.content.index import WindowIndex, pack_place, unpack_place

RANDOM = np.random.default_rng(2)


def fresh(size: int) -> np.ndarray:
    return RANDOM.integers(0, 2**40, size)


# Bad arguments


@pytest.mark.parametrize("name", ["stride", "page_size", "max_candidates"])
def test_options_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0, it must be at least 1"):
        ContentTree(**{name: 0})


@pytest.mark.parametrize(
    "options", [{"min_run_tokens": 0}, {"recompute_tokens": -1}, {"max_generations": -1}]
)
def test_plan_options_are_checked(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        PlanOptions(**options)


def test_insert_refuses() -> None:
    tree = ContentTree(page_size=16)
    top = tree.insert(None, fresh(32), namespace="a")
    with pytest.raises(ValueError, match="multiple of the page size, 16"):
        tree.insert(None, fresh(20), namespace="a")
    with pytest.raises(ValueError, match="cannot insert 0 tokens"):
        tree.insert(top, [], namespace="a")
    with pytest.raises(ValueError, match="below a segment of namespace 'a'"):
        tree.insert(top, fresh(16), namespace="b")
    with pytest.raises(TypeError, match="integers"):
        tree.insert(None, np.ones(16), namespace="a")
    with pytest.raises(ValueError, match="one-dimensional"):
        tree.insert(None, np.ones((2, 16), dtype=np.int64), namespace="a")
    tree.check_invariants()


@pytest.mark.parametrize("at", [-16, 0, 8, 32, 48])
def test_split_refuses(at: int) -> None:
    tree = ContentTree(page_size=16)
    top = tree.insert(None, fresh(32), namespace=None)
    with pytest.raises(ValueError, match="the cut must lie inside"):
        tree.split(top, at, owner=None)
    tree.check_invariants()


def test_remove_refuses_inner_segments_and_strangers() -> None:
    tree = ContentTree()
    top = tree.insert(None, fresh(32), namespace=None)
    below = tree.insert(top, fresh(32), namespace=None)
    with pytest.raises(ValueError, match="1 children hang below it"):
        tree.remove(top)
    tree.remove(below)
    for call in (
        lambda: tree.remove(below),
        lambda: tree.touch(below),
        lambda: tree.split(below, 5, owner=None),
        lambda: tree.set_provenance(below, Provenance()),
        lambda: tree.insert(below, fresh(3), namespace=None),
    ):
        with pytest.raises(ValueError, match="not in this tree"):
            call()
    tree.reset()
    with pytest.raises(ValueError, match="not in this tree"):
        tree.remove(top)
    other = ContentTree()
    stranger = other.insert(None, fresh(5), namespace=None)
    tree.insert(None, fresh(5), namespace=None)
    with pytest.raises(ValueError, match="not in this tree"):
        tree.remove(stranger)
    tree.check_invariants()


@pytest.mark.parametrize(("begin", "end"), [(-1, 5), (6, 5), (0, 11)])
def test_ranges_must_lie_in_the_request(begin: int, end: int) -> None:
    tree = ContentTree()
    tree.insert(None, fresh(100), namespace=None)
    with pytest.raises(ValueError, match="must lie within it"):
        tree.candidates(fresh(10), None, begin, end)


def test_must_compute_must_be_ranges() -> None:
    with pytest.raises(ValueError, match="not a range"):
        make_plan(ContentTree(), fresh(10), 0, 10, None, must_compute=[(5, 3)])


# Empty and tiny


def test_empty_inputs() -> None:
    tree = ContentTree()
    assert tree.candidates([], None, 0, 0) == []
    assert make_plan(tree, fresh(100), 0, 100, None) is None
    document = fresh(100)
    tree.insert(None, document, namespace=None)
    assert tree.candidates(document, None, 50, 50) == []
    assert make_plan(tree, document, 50, 50, None) is None
    assert make_plan(tree, document[:1], 0, 1, None) is None
    tree.check_invariants()


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_tiny_strides_find_tiny_runs(stride: int) -> None:
    tree = ContentTree(stride=stride)
    tree.insert(None, np.arange(100, 120), namespace=None)
    size = 2 * stride - 1
    for start in range(100, 121 - size):
        request = np.concatenate([[1], np.arange(start, start + size), [2]])
        found = tree.candidates(request, None, 0, len(request))
        assert [(c.begin, c.end, c.donor_begin) for c in found] == [(1, 1 + size, start - 100)]


def test_plain_lists_and_small_integers_are_accepted() -> None:
    tree = ContentTree(stride=4)
    tree.insert(None, list(range(50)), namespace=None)
    request = np.arange(10, 40, dtype=np.int32)
    (found,) = tree.candidates(request, None, 0, 30)
    assert (found.begin, found.end, found.delta) == (0, 30, -10)


# Lifecycle


def test_split_keeps_identity_below_and_copies_above() -> None:
    tree = ContentTree()
    document = fresh(100)
    kind = Provenance(exact=False, generations=2)
    lower = tree.insert(None, document, namespace="n", provenance=kind, owner="old")
    child = tree.insert(lower, fresh(10), namespace="n")
    tree.touch(child)
    upper = tree.split(lower, 37, owner="new")
    assert (upper.start, len(upper.tokens), upper.owner) == (0, 37, "new")
    assert (lower.start, len(lower.tokens), lower.owner) == (37, 63, "old")
    assert lower.parent is upper and child.parent is lower and upper.parent is None
    assert upper.provenance == kind and upper.last_used == lower.last_used
    assert np.array_equal(np.concatenate([upper.tokens, lower.tokens]), document)
    tree.check_invariants()


def test_tokens_are_kept_without_a_copy() -> None:
    tree = ContentTree()
    document = fresh(100)
    segment = tree.insert(None, document, namespace=None)
    assert np.shares_memory(segment.tokens, document)
    upper = tree.split(segment, 10, owner=None)
    assert np.shares_memory(upper.tokens, document)


def test_removing_everything_leaves_nothing_behind() -> None:
    tree = ContentTree()
    for namespace in ("a", "b"):
        top = tree.insert(None, fresh(100), namespace=namespace)
        tree.insert(top, fresh(100), namespace=namespace)
        tree.split(top, 50, owner=None)
    while tree.stats.segments:
        tree.remove(next(s for s in tree.segments() if s.children is None))
        tree.check_invariants()
    assert tree.stats.cached_tokens == tree.stats.entries == len(tree.index) == 0
    assert tree.strips == {} and tree._tops == {}


def test_siblings_that_hold_the_same_tokens_do_no_harm() -> None:
    """Bigram keys tell siblings apart by one token more than they hold."""
    tree = ContentTree(stride=4)
    top = tree.insert(None, fresh(20), namespace=None)
    same = fresh(40)
    twins = [tree.insert(top, same.copy(), namespace=None) for _ in range(3)]
    tree.split(twins[1], 7, owner=None)
    tree.check_invariants()
    request = np.concatenate([fresh(3), top.tokens, same, fresh(2)])
    found = tree.candidates(request, None, 0, len(request))
    assert found and all((c.begin, c.end, c.delta) == (3, 63, 3) for c in found)
    for segment in (twins[2], twins[0], twins[1]):
        tree.remove(segment)
        tree.check_invariants()


def test_logical_clock() -> None:
    tree = ContentTree()
    a = tree.insert(None, fresh(10), namespace=None)
    b = tree.insert(a, fresh(10), namespace=None)
    c = tree.insert(a, fresh(10), namespace=None)
    assert a.last_used < b.last_used < c.last_used
    tree.touch(b)
    assert a.last_used == b.last_used > c.last_used


def test_counters() -> None:
    tree = ContentTree()
    document = fresh(320)
    tree.insert(None, document, namespace=None)
    assert (tree.stats.cached_tokens, tree.stats.segments, tree.stats.entries) == (320, 1, 10)
    request = np.concatenate([fresh(5), document])
    tree.candidates(request, None, 0, len(request))
    stats = tree.stats
    assert (stats.matches, stats.runs_found, stats.candidates_verified) == (1, 1, 1)
    assert stats.windows_proposed == 10 and stats.collisions == 0 and stats.comparisons >= 2
    assert stats.total_match_seconds >= stats.last_match_seconds > 0
    tree.reset()
    assert (stats.cached_tokens, stats.segments, stats.entries, stats.matches) == (0, 0, 0, 1)


def test_index_memory_is_reported_as_the_allocator_sees_it() -> None:
    documents = [fresh(4096) for _ in range(40)]
    documents += [d.copy() for d in documents[:10]]  # windows with two donors
    gc.collect()
    tracemalloc.start()
    tree = ContentTree()
    before, _ = tracemalloc.get_traced_memory()
    for document in documents:
        tree.insert(None, document, namespace=None)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tree.stats.cached_tokens == 50 * 4096
    assert abs(after - before - tree.stats.index_bytes) < 0.1 * tree.stats.index_bytes
    assert tree.stats.index_bytes <= 8 * tree.stats.cached_tokens


# Fingerprints and index


@pytest.mark.parametrize("stride", [1, 2, 3, 5, 8, 31, 32, 33])
@pytest.mark.parametrize("size", [0, 1, 7, 32, 33, 200])
def test_both_sides_hash_alike(stride: int, size: int) -> None:
    tokens = fresh(size)
    every = fingerprint.at_every_offset(tokens, stride, 12345)
    assert len(every) == max(0, size - stride + 1)
    anchored = fingerprint.at_multiples(tokens, stride, 12345)
    assert len(anchored) == size // stride
    assert np.array_equal(every[::stride][: len(anchored)], anchored)
    if len(every):
        assert int(every.max()) < 1 << 60
        alone = fingerprint.at_every_offset(tokens[:stride].copy(), stride, 12345)
        assert every[0] == alone[0]
        salted = fingerprint.at_every_offset(tokens, stride, 54321)
        assert not np.any(every == salted)


def test_fingerprints_of_similar_windows_differ() -> None:
    tokens = np.zeros((4096, 32), dtype=np.int64)
    tokens[np.arange(4096), np.arange(4096) % 32] = np.arange(4096) // 32 + 1
    keys = fingerprint.at_multiples(tokens.ravel(), 32, 0)
    assert len(np.unique(keys)) == 4096


def test_places_order_by_rank_then_newest_strip_then_lowest_window() -> None:
    places = [pack_place(r, s, w) for r in (0, 1, 2) for s in (0, 5) for w in (9, 3, 0)]
    assert places == sorted(places)
    assert unpack_place(pack_place(2, 2**32 - 1, 2**24 - 1)) == (2, 2**32 - 1, 2**24 - 1)
    assert pack_place(2, 2**32 - 1, 0) < 1 << 60


def test_filter_counts_saturate_without_denying() -> None:
    filter_ = KeyFilter()
    keys = np.arange(300, dtype=np.uint64) + np.uint64(1 << 59)  # share their first cell
    filter_.add(keys[:200], keys[:200].tolist(), 200)
    filter_.add(keys[200:], keys.tolist(), 300)
    filter_.check(keys)
    filter_.discard(keys[:299])
    filter_.check(keys[299:])


def test_filter_forgets_and_keeps_most_foreign_keys_out() -> None:
    keys = RANDOM.integers(0, 1 << 60, 5000, dtype=np.uint64)
    foreign = RANDOM.integers(0, 1 << 60, 100_000, dtype=np.uint64)
    filter_ = KeyFilter()
    for stop in range(500, 5001, 500):
        filter_.add(keys[stop - 500 : stop], keys[:stop].tolist(), stop)
        filter_.check(keys[:stop])
    assert len(filter_.passing(foreign)) < len(foreign) / 200
    filter_.discard(keys)
    assert len(filter_.passing(keys)) == len(filter_.passing(foreign)) == 0


def test_index_refuses_to_remove_what_it_does_not_hold() -> None:
    index = WindowIndex()
    keys = np.array([5, 5, 9], dtype=np.uint64)
    index.add(keys, [1 << 40, 2 << 40, 3 << 40])
    for key, place in ((5, 7 << 40), (9, 7 << 40), (4, 1 << 40)):
        with pytest.raises(KeyError):
            index.discard(np.array([key], dtype=np.uint64), [place])
    positions, places = index.lookup(np.array([4, 5, 9], dtype=np.uint64))
    assert positions.tolist() == [1, 2] and places == [[1 << 40, 2 << 40], 3 << 40]
