"""What must hold of a content tree between any two calls, checked the slow way.

Owns assertions only: tests and the integration's debug mode call them. Everything is recomputed
from the segments' tokens, never from what the tree remembers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from radix_rope.content import fingerprint
from radix_rope.content.index import pack_place, unpack_place
from radix_rope.content.segment import Segment

if TYPE_CHECKING:
    from radix_rope.content.tree import ContentTree


def check_tree(tree: ContentTree) -> None:
    """Assert that segments, strips, children, counters and index of `tree` agree."""
    segments = list(tree.segments())
    held = set(map(id, segments))
    assert len(held) == len(segments), "a segment hangs in two places"
    assert len({s.sequence for s in segments}) == len(segments), "sequence numbers repeat"
    for segment in segments:
        _check_segment(tree, segment, held)
    _check_strips(tree, segments)
    _check_index(tree, segments)
    assert tree.stats.segments == len(segments), "segment counter is off"
    assert tree.stats.cached_tokens == sum(len(s.tokens) for s in segments), "token counter is off"
    assert tree.stats.entries == tree.index.entries, "entry counter is stale"
    assert set(tree._tops) == {s.namespace for s in segments}, "an empty namespace is kept"


def _check_segment(tree: ContentTree, segment: Segment, held: set[int]) -> None:
    size = len(segment.tokens)
    assert size > 0 and size % tree.page_size == 0, f"{segment} is not whole pages"
    assert segment.tokens.dtype == np.int64 and segment.tokens.ndim == 1
    parent = segment.parent
    assert segment.start == (0 if parent is None else parent.end), f"start of {segment} is off"
    if parent is not None:
        assert id(parent) in held, f"the parent of {segment} is gone"
        assert parent.namespace == segment.namespace, f"{segment} crosses a namespace"
    siblings = tree._siblings_of(segment)
    assert sum(s is segment for s in siblings) == 1, f"{segment} is not its parent's child"
    assert 0 < segment.last_used <= tree._clock
    if segment.children is not None:
        assert len(segment.children), f"{segment} keeps an empty set of children"
        entries = list(segment.children._ordered)
        assert entries == sorted(entries, key=lambda e: e[:2])
        for key, sequence, child in entries:
            assert key == child.tokens[: tree.page_size + 1].tobytes(), f"{child} is misfiled"
            assert sequence == child.sequence, f"{child} is misfiled"


def _check_strips(tree: ContentTree, segments: list[Segment]) -> None:
    pieces = [(strip, piece) for strip in tree.strips.values() for piece in strip.pieces]
    assert {id(piece) for _, piece in pieces} == set(map(id, segments)), "foreign pieces in strips"
    assert len(pieces) == len(segments), "a segment is in two strips"
    for number, strip in tree.strips.items():
        assert strip.strip_id == number and strip.pieces
        assert all(piece.strip is strip for piece in strip.pieces)
        for upper, lower in zip(strip.pieces, strip.pieces[1:], strict=False):
            assert lower.parent is upper, "pieces of a strip are not consecutive"


def _check_index(tree: ContentTree, segments: list[Segment]) -> None:
    """Every window that should be indexed is, and every indexed window lies where it says."""
    content = tree.index.check()
    stride = tree.stride
    expected: set[tuple[int, int]] = set()
    for segment in segments:
        path = segment.tokens
        node, begin = segment.parent, segment.start
        while node is not None and begin > segment.start - stride:
            path, begin = np.concatenate([node.tokens, path]), node.start
            node = node.parent
        salt = tree._tops[segment.namespace].salt
        keys = fingerprint.at_every_offset(path, stride, salt).tolist()
        for window in range(segment.end // stride):
            if window * stride + stride > segment.start:
                rank = segment.provenance.index_rank
                place = pack_place(rank, segment.strip.strip_id, window)
                expected.add((keys[window * stride - begin], place))
    indexed = {(key, place) for key, places in content.items() for place in places}
    assert indexed == expected, (
        f"{len(indexed - expected)} windows are indexed and should not be, "
        f"{len(expected - indexed)} should be indexed and are not"
    )
    for _, place in indexed:
        _, strip_id, window = unpack_place(place)
        last = window * stride + stride - 1
        piece = tree.strips[strip_id].piece_holding(last)
        assert piece.start <= last < piece.end, "an indexed window lies outside its strip"
