"""The window index: from a fingerprint to the places where such a window is cached.

Owns the table and its order of donors; a filter stands in front of it. May not know segments or
tokens: a place is a number (`pack_place`), and what it means is the tree's business.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from sys import getsizeof

import numpy as np
import numpy.typing as npt

from radix_rope.content.filter import KeyFilter
from radix_rope.content.fingerprint import Keys

Places = int | list[int]
"""One place, or several in ascending order; the best place is the last."""

_WINDOW_BITS = 24
_STRIP_BITS = 32
MAX_WINDOWS_PER_PATH = 1 << _WINDOW_BITS
MAX_STRIPS = 1 << _STRIP_BITS
_LAST_WINDOW = MAX_WINDOWS_PER_PATH - 1
_INT_BYTES = 32  # a Python int between 2**30 and 2**60


def pack_place(rank: int, strip_id: int, window: int) -> int:
    """Number of the place of window `window` (its position // stride) of a strip.

    A greater number is a better donor where only some can be examined: the higher rank, then the
    strip inserted last, then the lowest position.
    """
    return (rank << _STRIP_BITS | strip_id) << _WINDOW_BITS | (_LAST_WINDOW - window)


def unpack_place(place: int) -> tuple[int, int, int]:
    """(rank, strip_id, window) of a place."""
    rest = place >> _WINDOW_BITS
    return rest >> _STRIP_BITS, rest & (MAX_STRIPS - 1), _LAST_WINDOW - (place & _LAST_WINDOW)


class WindowIndex:
    """Fingerprint -> places. Adding and removing cost O(1) per window, plus O(donors) memmove."""

    __slots__ = ("_filter", "_list_bytes", "_table", "entries")

    def __init__(self) -> None:
        """Make an empty index."""
        self._table: dict[int, Places] = {}
        self._filter = KeyFilter()
        self._list_bytes = 0
        self.entries = 0

    def __len__(self) -> int:
        """Distinct fingerprints."""
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """Bytes of table, keys, places, lists and filter together. O(1)."""
        return (
            getsizeof(self._table)
            + (len(self._table) + self.entries) * _INT_BYTES
            + self._list_bytes
            + self._filter.nbytes
        )

    def add(self, keys: Keys, places: list[int]) -> None:
        """Add windows; keys uint64 (n,), places of equal length."""
        table = self._table
        fresh: list[int] = []
        for key, place in zip(keys.tolist(), places, strict=True):
            held = table.get(key)
            if held is None:
                table[key] = place
                fresh.append(key)
            elif isinstance(held, int):
                pair = [held, place] if held < place else [place, held]
                table[key] = pair
                self._list_bytes += getsizeof(pair)
            else:
                before = getsizeof(held)
                if place > held[-1]:
                    held.append(place)
                else:
                    insort(held, place)
                self._list_bytes += getsizeof(held) - before
        self.entries += len(places)
        if fresh:
            self._filter.add(np.array(fresh, dtype=np.uint64), table, len(table))

    def discard(self, keys: Keys, places: list[int]) -> None:
        """Remove windows that were added before with these keys and places; KeyError otherwise."""
        table = self._table
        gone: list[int] = []
        for key, place in zip(keys.tolist(), places, strict=True):
            held = table[key]
            if isinstance(held, int):
                if held != place:
                    raise KeyError(f"window {unpack_place(place)} is not under key {key:#x}")
                del table[key]
                gone.append(key)
                continue
            at = bisect_left(held, place)
            if at == len(held) or held[at] != place:
                raise KeyError(f"window {unpack_place(place)} is not under key {key:#x}")
            before = getsizeof(held)
            del held[at]
            if len(held) == 1:
                table[key] = held[0]
                self._list_bytes -= before
            else:
                self._list_bytes += getsizeof(held) - before
        self.entries -= len(places)
        if gone:
            self._filter.discard(np.array(gone, dtype=np.uint64))

    def lookup(self, keys: Keys) -> tuple[npt.NDArray[np.int64], list[Places]]:
        """The keys that are in the table: (their ascending indices, their places).

        The lists are the index's own: read them before the next change and never write them.
        """
        passed = self._filter.passing(keys)
        get = self._table.get
        found = [get(key) for key in keys.take(passed).tolist()]
        hits = [places for places in found if places is not None]
        if len(hits) < len(found):
            passed = passed[np.array([places is not None for places in found], dtype=bool)]
        return passed, hits

    def check(self) -> dict[int, list[int]]:
        """Assert the index's own invariants and return its content as key -> places."""
        content = {k: [p] if isinstance(p, int) else list(p) for k, p in self._table.items()}
        assert sum(map(len, content.values())) == self.entries, "entry counter is off"
        for key, places in content.items():
            assert places == sorted(set(places)), f"places of {key:#x} unordered or repeated"
            assert isinstance(self._table[key], int) == (len(places) == 1)
        self._filter.check(np.fromiter(content, dtype=np.uint64, count=len(content)))
        lists = sum(getsizeof(p) for p in self._table.values() if isinstance(p, list))
        assert lists == self._list_bytes, "byte counter of lists is off"
        return content
