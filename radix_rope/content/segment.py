"""Segments: the shadow of a prefix tree's nodes, token ids and bookkeeping only.

Owns what is known about one stretch of cached tokens and how it hangs in its tree. May not know
where the KV lies (`owner` is the integration's node and is never looked into) nor how content is
indexed beyond the strip a segment was cut from.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sortedcontainers import SortedList

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the KV of a segment came from. The default is plain, exact prefill."""

    exact: bool = True
    """The KV equals what a plain prefill of this path would give."""
    copied: bool = False
    """The KV was moved here from a donor (else it was computed here)."""
    generations: int = 0
    """Reuses that lie behind it: 0 for exact KV, at least 1 for approximate KV."""
    roundings: int = 0
    """How many times K was rotated and rounded since it was computed."""
    originals: tuple[tuple[int, int], ...] = ()
    """Of copied KV: (strip, end position) of the donors; it can be copied again while they live."""

    @property
    def index_rank(self) -> int:
        """Class by which the index keeps the best of too many donors: larger is better."""
        if self.exact:
            return 2
        return 0 if self.copied else 1


class Strip:
    """The tokens one `insert` brought. Splits cut it into pieces but never move a token.

    Index entries name a strip and an absolute position, so a split leaves the index untouched.
    `pieces` are the strip's segments in path order; leaves are removed last piece first.
    """

    __slots__ = ("pieces", "strip_id")

    def __init__(self, strip_id: int) -> None:
        """Make a strip without pieces."""
        self.strip_id = strip_id
        self.pieces: list[Segment] = []

    def piece_holding(self, position: int) -> Segment:
        """The segment that holds absolute `position`, which must lie in the strip."""
        return self.pieces[self.place_of(position)]

    def place_of(self, position: int) -> int:
        """Index in `pieces` of the segment that holds absolute `position`. O(log pieces)."""
        pieces = self.pieces
        low, high = 0, len(pieces) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if pieces[middle].start <= position:
                low = middle
            else:
                high = middle - 1
        return low


class Segment:
    """One tree node: its own tokens, not its path's. Made and changed by `ContentTree` only.

    `start` is the absolute position of `tokens[0]` on the path; `tokens` is int64 of shape (n,),
    n >= 1, possibly a view of the caller's memory, and must never change. `sequence` numbers
    segments in order of creation, so it names one where an address may not decide.
    """

    __slots__ = (
        "children",
        "last_used",
        "namespace",
        "owner",
        "parent",
        "provenance",
        "sequence",
        "start",
        "strip",
        "tokens",
    )

    def __init__(
        self,
        start: int,
        tokens: Tokens,
        parent: Segment | None,
        namespace: Hashable,
        provenance: Provenance,
        owner: object,
        sequence: int,
        last_used: int,
        strip: Strip,
    ) -> None:
        """Fill the fields; `ContentTree` does the linking."""
        self.start = start
        self.tokens = tokens
        self.parent = parent
        self.namespace = namespace
        self.provenance = provenance
        self.owner = owner
        self.sequence = sequence
        self.last_used = last_used
        self.strip = strip
        self.children: Children | None = None

    @property
    def end(self) -> int:
        """Absolute position after the last token."""
        return self.start + len(self.tokens)

    def __repr__(self) -> str:
        """Name the segment by number, place and origin, without its tokens."""
        return (
            f"Segment(#{self.sequence}, [{self.start}, {self.end}), "
            f"namespace={self.namespace!r}, {self.provenance})"
        )


class Children:
    """The segments below one parent, ordered by their first tokens.

    Siblings may share up to page_size - 1 first tokens, so the child that agrees longest with a
    request need not be found by one exact key. In lexicographic order it is a neighbour of the
    place where the request's own tokens would stand: every call is O(log siblings).
    """

    __slots__ = ("_depth_tokens", "_ordered")

    def __init__(self, depth_tokens: int) -> None:
        """Make an empty set, ordered by the first `depth_tokens` tokens."""
        self._depth_tokens = depth_tokens
        self._ordered: SortedList = SortedList()

    def __len__(self) -> int:
        """Number of children."""
        return len(self._ordered)

    def __iter__(self) -> Iterator[Segment]:
        """In the order of their first tokens."""
        return (segment for _, _, segment in self._ordered)

    def _entry(self, segment: Segment) -> tuple[bytes, int, Segment]:
        # Any fixed-width encoding gives a lexicographic order in which longest common prefixes
        # are neighbours; the machine's own bytes are the cheapest.
        return segment.tokens[: self._depth_tokens].tobytes(), segment.sequence, segment

    def add(self, segment: Segment) -> None:
        """Add a child."""
        self._ordered.add(self._entry(segment))

    def discard(self, segment: Segment) -> None:
        """Remove a child; ValueError when it is not one."""
        self._ordered.remove(self._entry(segment))

    def agreeing_longest(self, tokens: Tokens) -> Segment | None:
        """The child whose first tokens agree longest with `tokens`; None when no first token does.

        Equal agreement below one page is decided by the order of the children's tokens.
        """
        if len(tokens) == 0:
            return None
        wanted = tokens[: self._depth_tokens].tobytes()
        place = self._ordered.bisect_left((wanted,))
        best: Segment | None = None
        best_agreement = (0, False)
        for index in (place, place - 1):
            if 0 <= index < len(self._ordered):
                key, _, segment = self._ordered[index]
                shared = _shared_tokens(key, wanted)
                # A child used up entirely may go on into its own children.
                agreement = (shared, shared == len(segment.tokens))
                if shared and agreement > best_agreement:
                    best, best_agreement = segment, agreement
        return best


def _shared_tokens(left: bytes, right: bytes) -> int:
    """Whole equal tokens (8 bytes each) at the front of two keys."""
    limit = min(len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit // 8
    shared = 0
    while left[shared : shared + 8] == right[shared : shared + 8]:
        shared += 8
    return shared // 8
