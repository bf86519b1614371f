"""The content tree: segments mirroring a prefix tree, with every anchored window indexed.

Owns the lifecycle (insert, split, remove, provenance, logical clock) and keeps the index in step
with it. May not know KV, devices or SGLang: the integration calls it beside each change of its own
tree and finds its nodes again through `Segment.owner`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from time import perf_counter

import numpy as np
import numpy.typing as npt

from radix_rope.content import fingerprint
from radix_rope.content.index import MAX_STRIPS, MAX_WINDOWS_PER_PATH, WindowIndex, pack_place
from radix_rope.content.search import Candidate, Search
from radix_rope.content.segment import Children, Provenance, Segment, Strip, Tokens
from radix_rope.content.stats import MatchStats

_EXACT = Provenance()


class _Top:
    """The top of one namespace: its first segments and its fingerprint salt."""

    __slots__ = ("children", "salt")

    def __init__(self, salt: int, depth_tokens: int) -> None:
        self.salt = salt
        self.children = Children(depth_tokens)


class ContentTree:
    """Cached tokens by content.

    On the tree side the window of `stride` tokens at every multiple of `stride` along every path
    is indexed; `candidates` looks up the request's window at every offset. Any run of at least
    `2 * stride - 1` tokens that a request shares with a path of its namespace contains an indexed
    window, so it is found (docs/matching.md names the one exception).

    Not thread-safe. Every result is a pure function of the calls made before.
    """

    def __init__(self, stride: int = 32, page_size: int = 1, max_candidates: int = 16) -> None:
        """Make an empty tree.

        Args:
            stride: tokens per window and between windows. Smaller finds shorter runs and costs
                memory: about 5 bytes per cached token at 32, inversely proportional.
            page_size: every segment holds a multiple of this many tokens.
            max_candidates: donors examined per window and runs followed per request position.
        """
        for name, value in (
            ("stride", stride),
            ("page_size", page_size),
            ("max_candidates", max_candidates),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}, it must be at least 1")
        self.stride = stride
        self.page_size = page_size
        self.max_candidates = max_candidates
        # Siblings differ within their first page; where keys are pairs of tokens (bigrams), only
        # one token later.
        self._depth_tokens = page_size + 1
        self.stats = MatchStats()
        # Grows whenever a plan could come out differently: not with splits and uses.
        self.version = 0
        self.reset()

    def reset(self) -> None:
        """Forget all segments. Segments handed out before must not be used again."""
        self.index = WindowIndex()
        self.strips: dict[int, Strip] = {}
        self._tops: dict[Hashable, _Top] = {}
        self._clock = 0
        self._next_sequence = 0
        self._next_strip = 0
        self._next_namespace = 0
        self.version += 1
        self.stats.cached_tokens = 0
        self.stats.segments = 0
        self._note_size()

    def insert(
        self,
        parent: Segment | None,
        tokens: npt.ArrayLike,
        *,
        namespace: Hashable,
        provenance: Provenance = _EXACT,
        owner: object = None,
    ) -> Segment:
        """Hang new tokens below `parent` (None: at the top of `namespace`). O(tokens).

        tokens: integers of shape (n,), n a positive multiple of the page size. An int64 array is
        kept, not copied, and must never change. The new segment counts as used now.
        """
        array = as_tokens(tokens)
        if len(array) == 0 or len(array) % self.page_size:
            raise ValueError(
                f"cannot insert {len(array)} tokens: a segment holds a positive multiple of the "
                f"page size, {self.page_size}"
            )
        if parent is not None:
            self._require_held(parent)
            if parent.namespace != namespace:
                raise ValueError(
                    f"cannot insert into namespace {namespace!r} below a segment of namespace "
                    f"{parent.namespace!r}"
                )
        start = 0 if parent is None else parent.end
        if (start + len(array)) // self.stride > MAX_WINDOWS_PER_PATH:
            raise ValueError(
                f"a path of {start + len(array)} tokens is longer than the index can number, "
                f"{MAX_WINDOWS_PER_PATH} windows; use a greater stride than {self.stride}"
            )
        if self._next_strip >= MAX_STRIPS:
            raise RuntimeError(f"the tree is worn out after {MAX_STRIPS} inserts; reset it")
        top = self._tops.get(namespace)
        if top is None:
            salt = fingerprint.namespace_salt(self._next_namespace)
            self._next_namespace += 1
            top = self._tops[namespace] = _Top(salt, self._depth_tokens)
        strip = Strip(self._next_strip)
        self._next_strip += 1
        segment = Segment(
            start=start,
            tokens=array,
            parent=parent,
            namespace=namespace,
            provenance=provenance,
            owner=owner,
            sequence=self._take_sequence(),
            last_used=self._tick(),
            strip=strip,
        )
        strip.pieces.append(segment)
        self.strips[strip.strip_id] = strip
        self._siblings_of(segment, create=True).add(segment)
        self.index.add(*self._windows(segment))
        self.version += 1
        self.stats.cached_tokens += len(array)
        self.stats.segments += 1
        self._note_size()
        return segment

    def split(self, segment: Segment, at: int, owner: object = None) -> Segment:
        """Cut `segment` after its first `at` tokens and return the new upper part.

        `segment` keeps its identity, children and owner and becomes the lower part; the upper part
        gets `owner` and copies provenance and last use. No window moves. O(log siblings + pieces).
        """
        self._require_held(segment)
        if not 0 < at < len(segment.tokens) or at % self.page_size:
            raise ValueError(
                f"cannot split a segment of {len(segment.tokens)} tokens at {at}: the cut must "
                f"lie inside, at a multiple of the page size, {self.page_size}"
            )
        place = segment.strip.place_of(segment.start)
        siblings = self._siblings_of(segment)
        siblings.discard(segment)
        upper = Segment(
            start=segment.start,
            tokens=segment.tokens[:at],
            parent=segment.parent,
            namespace=segment.namespace,
            provenance=segment.provenance,
            owner=owner,
            sequence=self._take_sequence(),
            last_used=segment.last_used,
            strip=segment.strip,
        )
        segment.tokens = segment.tokens[at:]
        segment.start += at
        segment.parent = upper
        siblings.add(upper)
        upper.children = Children(self._depth_tokens)
        upper.children.add(segment)
        segment.strip.pieces.insert(place, upper)
        self.stats.segments += 1
        return upper

    def remove(self, segment: Segment) -> None:
        """Forget a leaf. O(its tokens). ValueError when it has children."""
        self._require_held(segment)
        if segment.children is not None and len(segment.children):
            raise ValueError(
                f"cannot remove {segment}: {len(segment.children)} children hang below it; remove "
                "them first"
            )
        self.index.discard(*self._windows(segment))
        siblings = self._siblings_of(segment)
        siblings.discard(segment)
        strip = segment.strip
        strip.pieces.pop()  # its lower pieces hung below it and went first
        if not strip.pieces:
            del self.strips[strip.strip_id]
        if segment.parent is None:
            if not len(siblings):
                del self._tops[segment.namespace]
        elif not len(siblings):
            segment.parent.children = None
        self.version += 1
        self.stats.cached_tokens -= len(segment.tokens)
        self.stats.segments -= 1
        self._note_size()

    def touch(self, segment: Segment) -> None:
        """Mark `segment` and everything above it as used now, by the logical clock. O(depth)."""
        self._require_held(segment)
        now = self._tick()
        node: Segment | None = segment
        while node is not None:
            node.last_used = now
            node = node.parent

    def set_provenance(self, segment: Segment, provenance: Provenance) -> None:
        """Say anew where the KV of `segment` came from.

        O(1), or O(its tokens) where `Provenance.index_rank` changes.
        """
        self._require_held(segment)
        self.version += 1
        if provenance.index_rank != segment.provenance.index_rank:
            self.index.discard(*self._windows(segment))
            segment.provenance = provenance
            self.index.add(*self._windows(segment))
            self._note_size()
        else:
            segment.provenance = provenance

    def can_be_copied_again(self, segment: Segment) -> bool:
        """Whether `segment` is a copy whose originals are all still here. O(originals)."""
        originals = segment.provenance.originals
        return bool(originals) and all(
            (strip := self.strips.get(strip_id)) is not None and strip.pieces[-1].end >= end
            for strip_id, end in originals
        )

    def candidates(
        self, tokens: npt.ArrayLike, namespace: Hashable, begin: int, end: int
    ) -> list[Candidate]:
        """All runs that request tokens [begin, end) share with paths of `namespace`.

        tokens: integers of shape (n,), the request from its position 0 on; only [0, end) is looked
        at. Runs are maximal: to the left up to 512 tokens before `begin`, to the right up to `end`.
        Sorted by begin. O(end - begin) plus a bounded number of comparisons (docs/matching.md).
        """
        array = as_tokens(tokens)
        if not 0 <= begin <= end <= len(array):
            raise ValueError(
                f"cannot match [{begin}, {end}) of a request of {len(array)} tokens: the range "
                "must lie within it"
            )
        started = perf_counter()
        top = self._tops.get(namespace)
        found: list[Candidate] = []
        if top is not None and begin < end:
            found = Search(self, array, namespace, begin, end).run(top.salt)
        elapsed = perf_counter() - started
        self.stats.matches += 1
        self.stats.last_match_seconds = elapsed
        self.stats.total_match_seconds += elapsed
        return found

    def segments(self) -> Iterator[Segment]:
        """All segments, parents before children, in a fixed order."""
        for top in self._tops.values():
            stack = list(top.children)[::-1]
            while stack:
                segment = stack.pop()
                yield segment
                if segment.children is not None:
                    stack.extend(list(segment.children)[::-1])

    def check_invariants(self) -> None:
        """Assert that tree, index and counters agree, both ways. O(cached tokens); for tests."""
        from radix_rope.content.invariants import check_tree

        check_tree(self)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _take_sequence(self) -> int:
        self._next_sequence += 1
        return self._next_sequence - 1

    def _note_size(self) -> None:
        self.stats.entries = self.index.entries
        self.stats.index_bytes = self.index.nbytes

    def _siblings_of(self, segment: Segment, create: bool = False) -> Children:
        """The children among which `segment` stands (or will stand)."""
        if segment.parent is None:
            return self._tops[segment.namespace].children
        children = segment.parent.children
        if children is None:
            assert create, "a held segment is among its parent's children"
            children = segment.parent.children = Children(self._depth_tokens)
        return children

    def _require_held(self, segment: Segment) -> None:
        strip = self.strips.get(segment.strip.strip_id)
        if strip is not segment.strip or strip.piece_holding(segment.start) is not segment:
            raise ValueError(f"{segment} is not in this tree: it was removed, or the tree reset")

    def _windows(self, segment: Segment) -> tuple[fingerprint.Keys, list[int]]:
        """Keys and places of the windows whose last token lies in `segment`, last window first."""
        stride = self.stride
        first = -(-max(0, segment.start - stride + 1) // stride)  # window number, rounded up
        stop = segment.end // stride
        if stop <= first:
            return np.empty(0, dtype=np.uint64), []
        tokens = self._path_slice(segment, first * stride, stop * stride)
        keys = fingerprint.at_multiples(tokens, stride, self._tops[segment.namespace].salt)
        best = pack_place(segment.provenance.index_rank, segment.strip.strip_id, first)
        # A later window has a smaller place; ascending places append to lists without moving them.
        places = list(range(best - (stop - first) + 1, best + 1))
        return keys[::-1], places

    def _path_slice(self, segment: Segment, begin: int, end: int) -> Tokens:
        """Tokens [begin, end) of the path down to `segment`; `end` lies within `segment`."""
        if begin >= segment.start:
            return segment.tokens[begin - segment.start : end - segment.start]
        parts = [segment.tokens[: end - segment.start]]
        node, stop = segment.parent, segment.start
        while stop > begin:
            assert node is not None
            parts.append(node.tokens[max(0, begin - node.start) :])
            stop, node = node.start, node.parent
        parts.reverse()
        return np.concatenate(parts)


def as_tokens(tokens: npt.ArrayLike | Sequence[int]) -> Tokens:
    """Tokens as a contiguous int64 array of shape (n,), not copied where they are one already."""
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise ValueError(f"tokens must be one-dimensional, got shape {array.shape}")
    if array.dtype == np.int64 and array.flags.c_contiguous:
        return array
    if len(array) and not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"tokens must be integers, got {array.dtype}")
    return np.ascontiguousarray(array, dtype=np.int64)
