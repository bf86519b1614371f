"""The key filter: which of many fingerprints are surely not in the index, all asked at once.

Owns a counting Bloom filter laid out for lookups from a cold cache. Knows keys only.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from radix_rope.content.fingerprint import KEY_BITS, Keys

Cells = npt.NDArray[np.int64]

_MIN_CELLS = 1 << 10
_CELLS_PER_KEY = 16  # at least, so of foreign keys one in 16 * 16 passes at most
_FULL = 255  # a cell that reached this is never counted down again: it only costs lookups
_SECOND_HASH = np.uint64(0x9FB21C651E98DF25)
_IN_BYTE = np.uint8(7)
_LOWEST = np.uint8(1)


class _CountedBits:
    """A bit per cell for lookups, and a count per cell (one byte) so that keys can leave.

    Lookups read the bits alone: eight times fewer cache lines than counts, which is what a lookup
    of 8,192 keys from a cold cache costs.
    """

    __slots__ = ("_bits", "_counts")

    def __init__(self, cells: int) -> None:
        self._counts = np.zeros(cells, dtype=np.uint8)
        self._bits = np.zeros(cells // 8, dtype=np.uint8)

    @property
    def nbytes(self) -> int:
        return int(self._counts.nbytes + self._bits.nbytes)

    def holds(self, cells: Cells) -> npt.NDArray[np.bool_]:
        bits = self._bits.take(cells >> 3)
        bits >>= cells.astype(np.uint8) & _IN_BYTE
        bits &= _LOWEST
        return bits.view(np.bool_)

    def add(self, cells: Cells) -> None:
        touched, times = np.unique(cells, return_counts=True)
        self._counts[touched] = np.minimum(self._counts[touched] + times, _FULL)
        np.bitwise_or.at(self._bits, touched >> 3, _LOWEST << (touched & 7).astype(np.uint8))

    def discard(self, cells: Cells) -> None:
        touched, times = np.unique(cells, return_counts=True)
        before = self._counts[touched]
        after = np.where(before == _FULL, _FULL, before - np.minimum(times, before))
        self._counts[touched] = after
        empty = touched[after == 0]
        np.bitwise_and.at(self._bits, empty >> 3, ~(_LOWEST << (empty & 7).astype(np.uint8)))

    def check(self) -> None:
        assert np.array_equal(self._bits, np.packbits(self._counts != 0, bitorder="little"))


class KeyFilter:
    """Says quickly, for many keys at once, which are surely not in the table.

    Two tables of `cells` cells each, one cell per key in each. Few keys get as far as the second.
    `cells` is a power of two and at least `_CELLS_PER_KEY` times the keys; the filter grows by
    being rebuilt and never shrinks.
    """

    __slots__ = ("_first", "_second", "_shift_first", "_shift_second", "cells", "keys")

    def __init__(self, cells: int = _MIN_CELLS) -> None:
        """Make an empty filter of two tables of `cells` cells, a power of two, at least 8."""
        self.keys = 0
        self._allocate(cells)

    def _allocate(self, cells: int) -> None:
        self.cells = cells
        self._first = _CountedBits(cells)
        self._second = _CountedBits(cells)
        bits = cells.bit_length() - 1
        self._shift_first = np.uint64(KEY_BITS - bits)
        self._shift_second = np.uint64(64 - bits)

    @property
    def nbytes(self) -> int:
        """Memory of the tables."""
        return self._first.nbytes + self._second.nbytes

    def _cells_first(self, keys: Keys) -> Cells:
        return (keys >> self._shift_first).view(np.int64)

    def _cells_second(self, keys: Keys) -> Cells:
        cells: Keys = (keys * _SECOND_HASH) >> self._shift_second
        return cells.view(np.int64)

    def passing(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Ascending indices of the keys that may be in the table. O(keys), vectorised."""
        passed = self._first.holds(self._cells_first(keys)).nonzero()[0]
        if len(passed):
            passed = passed[self._second.holds(self._cells_second(keys.take(passed)))]
        return passed

    def add(self, keys: Keys, table: Iterable[int], table_size: int) -> None:
        """Add distinct keys that are new; `table` yields all keys including them, for a rebuild."""
        self.keys += len(keys)
        if self.keys * _CELLS_PER_KEY > self.cells:
            cells = self.cells
            while self.keys * _CELLS_PER_KEY > cells:
                cells *= 2
            self._allocate(cells)
            keys = np.fromiter(table, dtype=np.uint64, count=table_size)
        self._first.add(self._cells_first(keys))
        self._second.add(self._cells_second(keys))

    def discard(self, keys: Keys) -> None:
        """Remove distinct keys that were added before."""
        self.keys -= len(keys)
        self._first.discard(self._cells_first(keys))
        self._second.discard(self._cells_second(keys))

    def check(self, keys: Keys) -> None:
        """Assert that the filter is consistent and passes all of `keys`, its whole content."""
        assert self.keys == len(keys), "filter's key counter is off"
        assert len(self.passing(keys)) == len(keys), "filter denies a key of the table"
        self._first.check()
        self._second.check()
