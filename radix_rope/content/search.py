"""The search: all runs of a request's tokens that lie in the tree at some offset.

Owns verification, maximal extension and the bound of work per request. May not rank donors for
reuse (the planner does) nor change the tree.

Order of work, a pure function of tree and request: windows held by the fewest donors first (they
tell the best donor apart), then ascending position; of each the few best donors by `pack_place`,
and in a second round the others. Fingerprints propose, tokens decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from radix_rope.content import fingerprint
from radix_rope.content.index import Places, unpack_place
from radix_rope.content.plan import DonorPiece
from radix_rope.content.segment import Segment, Tokens

if TYPE_CHECKING:
    from radix_rope.content.tree import ContentTree

Positions = npt.NDArray[np.int64]

LEFT_CONTEXT_TOKENS = 512
"""Shared left context counts up to here; runs are not extended further left of the range."""

COMPARISONS_FIXED = 1024
COMPARISONS_PER_TOKEN = 0.125
"""The budget: slices compared per request, of at most `_LAST_SLICE_TOKENS` tokens each."""

_FIRST_SLICE_TOKENS = 64
_LAST_SLICE_TOKENS = 1 << 14
_FIRST_DONORS = 4
_BLOCK_TOKENS = 1 << 13
_BLOCK_WINDOWS = 256


@dataclass(frozen=True, slots=True)
class Candidate:
    """A maximal run: request tokens [begin, end) equal the donor's tokens from `donor_begin` on.

    It may begin before the range asked for (left context), by `LEFT_CONTEXT_TOKENS` at most, and
    ends within it. `pieces` cover [begin, end) in order along one path.
    """

    begin: int
    end: int
    donor_begin: int
    pieces: tuple[DonorPiece, ...]

    @property
    def delta(self) -> int:
        """Request position minus donor position."""
        return self.begin - self.donor_begin


class Search:
    """One search: the request, its bounds and what was found so far."""

    def __init__(
        self, tree: ContentTree, tokens: Tokens, namespace: object, begin: int, end: int
    ) -> None:
        """Set up the search for request positions [begin, end) of `tokens`."""
        self.tree = tree
        self.namespace = namespace
        self.tokens = tokens[:end]  # what comes after the range is never looked at
        self.begin = begin
        self.end = end
        self.leftmost = max(0, begin - max(LEFT_CONTEXT_TOKENS, 2 * tree.stride - 2))
        self.found: list[Candidate] = []
        self.comparisons = 0
        self.limit = COMPARISONS_FIXED + int(COMPARISONS_PER_TOKEN * (end - begin))
        # Runs found over each request position.
        self._depth = np.zeros(end, dtype=np.uint32)
        # (segment, delta) -> request intervals that lie in a run found there.
        self._known: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def run(self, salt: int) -> list[Candidate]:
        """Find the runs that touch [begin, end), sorted by begin, then by order of discovery."""
        tree, stride = self.tree, self.tree.stride
        # A run that touches the range and has 2 * stride - 1 tokens before `end` contains a
        # stored window that begins here or later.
        first = max(0, self.begin - (2 * stride - 2))
        proposed: list[Positions] = []
        places: list[Places] = []
        # Block by block: the arrays in between stay in the cache of one core.
        for low in range(first, self.end - stride + 1, _BLOCK_TOKENS):
            block = self.tokens[low : low + _BLOCK_TOKENS + stride - 1]
            offsets, held = tree.index.lookup(fingerprint.at_every_offset(block, stride, salt))
            proposed.append(offsets + low)
            places += held
        tree.stats.windows_proposed += len(places)
        if places:
            positions = np.concatenate(proposed)
            if not self._examine_all(positions, places):
                tree.stats.budget_exhausted += 1
                self._cover_rest(positions, places)
        tree.stats.comparisons += self.comparisons
        self.found.sort(key=lambda candidate: candidate.begin)
        return self.found

    def _examine_all(self, positions: Positions, places: list[Places]) -> bool:
        """Examine the donors of all proposed windows; False when the budget ran out before.

        The few best donors of every window come first, so that a spent budget is spread over the
        request, then the others of windows that have more.
        """
        donors = np.array([1 if isinstance(held, int) else len(held) for held in places])
        order = np.lexsort((positions, donors))
        cap = self.tree.max_candidates
        few = min(_FIRST_DONORS, cap)
        left = self._examine_round(positions, places, order, few)
        if left is not None and few < cap:
            left = self._examine_round(positions, places, left, cap)
        return left is not None

    def _examine_round(
        self, positions: Positions, places: list[Places], order: Positions, cap: int
    ) -> Positions | None:
        """Examine up to `cap` donors of each window in `order`.

        Returns the windows that have more donors or were skipped, in order; None when the budget
        ran out.
        """
        tail = self.tree.stride - 1
        depth = memoryview(self._depth)  # type: ignore[arg-type]
        left = np.zeros(len(places), dtype=bool)
        for block in range(0, len(order), _BLOCK_WINDOWS):
            chosen = order[block : block + _BLOCK_WINDOWS]
            where = positions[chosen]
            # A window whose first and last token lie in enough runs already is skipped: first all
            # at once, then again because its block's own runs count too.
            is_open = np.minimum(self._depth[where], self._depth[where + tail]) < cap
            left[chosen[~is_open]] = True
            for i, position in zip(chosen[is_open].tolist(), where[is_open].tolist(), strict=True):
                if depth[position] >= cap and depth[position + tail] >= cap:
                    left[i] = True
                    continue
                held = places[i]
                if isinstance(held, int):
                    self._examine(position, held)
                else:
                    left[i] = len(held) > cap
                    for place in held[: -cap - 1 : -1]:
                        self._examine(position, place)
                        if self.comparisons > self.limit:
                            return None
                if self.comparisons > self.limit:
                    return None
        remaining: Positions = order[left[order]]
        return remaining

    def _cover_rest(self, positions: Positions, places: list[Places]) -> None:
        """Past the budget: give each stretch that no run covers yet one donor, left to right.

        Every run found here covers at least `stride` new tokens, so at most range / stride more
        donors are extended, and only as far to the left as their context counts.
        """
        covered = self.begin
        for position, held in zip(positions.tolist(), places, strict=True):
            if position < covered or self._depth[position]:
                continue
            before = len(self.found)
            self.leftmost = max(0, position - LEFT_CONTEXT_TOKENS)
            self._examine(position, held if isinstance(held, int) else held[-1])
            if len(self.found) > before:
                covered = self.found[-1].end

    def _examine(self, position: int, place: int) -> None:
        """Verify the donor window at `place` against the request's at `position` and extend it."""
        tree = self.tree
        _, strip_id, window = unpack_place(place)
        donor_begin = window * tree.stride
        donor_last = donor_begin + tree.stride - 1
        delta = position - donor_begin
        segment = tree.strips[strip_id].piece_holding(donor_last)
        for low, high in self._known.get((segment.sequence, delta), ()):
            if low <= donor_last + delta < high:
                return
        tree.stats.candidates_verified += 1
        if segment.namespace != self.namespace:
            tree.stats.collisions += 1
            return
        pieces = self._extend_left(segment, donor_last + 1, delta)
        if not pieces or pieces[0].donor_begin > donor_begin:
            tree.stats.collisions += 1
            return
        self._extend_right(pieces, delta)
        begin = end = pieces[0].donor_begin + delta
        for piece in pieces:
            known = self._known.setdefault((piece.segment.sequence, delta), [])
            known.append((end, end + piece.length))
            end += piece.length
        self._depth[begin:end] += 1
        if end > self.begin:
            self.found.append(Candidate(begin, end, begin - delta, tuple(pieces)))
            tree.stats.runs_found += 1

    def _extend_left(self, segment: Segment, stop: int, delta: int) -> list[DonorPiece]:
        """Pieces of the longest equal stretch that ends before donor position `stop`, in order."""
        pieces: list[DonorPiece] = []
        node: Segment | None = segment
        leftmost = self.leftmost - delta
        while node is not None and stop > leftmost:
            low = max(node.start, leftmost)
            equal = self._equal_prefix(  # of the reversed arrays: the equal suffix
                node.tokens[low - node.start : stop - node.start][::-1],
                self.tokens[low + delta : stop + delta][::-1],
            )
            if equal:
                pieces.append(DonorPiece(node, stop - equal - node.start, equal))
            if equal < stop - node.start:
                break
            stop, node = node.start, node.parent
        pieces.reverse()
        return pieces

    def _extend_right(self, pieces: list[DonorPiece], delta: int) -> None:
        """Lengthen the last piece, then follow the children that agree longest."""
        last = pieces.pop()
        node, offset, length = last.segment, last.offset, last.length
        while True:
            stop = offset + length
            room = min(len(node.tokens) - stop, self.end - delta - node.start - stop)
            at = node.start + stop + delta
            if room > 0:
                length += self._equal_prefix(
                    node.tokens[stop : stop + room], self.tokens[at : at + room]
                )
            pieces.append(DonorPiece(node, offset, length))
            at = node.start + offset + length + delta
            if offset + length < len(node.tokens) or at >= self.end or node.children is None:
                return
            child = node.children.agreeing_longest(self.tokens[at : self.end])
            if child is None:
                return
            node, offset, length = child, 0, 0

    def _equal_prefix(self, left: Tokens, right: Tokens) -> int:
        """Equal tokens at the front of two arrays of equal length; slices grow geometrically."""
        low, width, size = 0, _FIRST_SLICE_TOKENS, len(left)
        while low < size:
            self.comparisons += 1
            differs = left[low : low + width] != right[low : low + width]
            first = int(differs.argmax())
            if differs[first]:
                return low + first
            low += width
            width = min(width * 8, _LAST_SLICE_TOKENS)
        return size
