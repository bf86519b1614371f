"""Token-exact text: blocks of random tokens and tokenised lines, both by name and seed.

Owns how a name becomes tokens. May not know what prompts are made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from zlib import crc32

import numpy as np

Tokens = tuple[int, ...]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Vocabulary:
    """What can be written: ordinary token ids, and text to token ids without special tokens."""

    ids: Sequence[int]
    encode: Callable[[str], Sequence[int]]


class Writer:
    """Writes the same tokens for the same seed and name, whatever else was written before.

    Bulk content is random tokens, as in SGLang's own `random-ids` and `generated-shared-prefix`
    datasets: no run of it occurs twice by chance, and prefill time does not depend on the words.
    Volatile lines are real text, since their token length matters.
    """

    def __init__(self, vocabulary: Vocabulary, seed: int) -> None:
        """Keep vocabulary and seed."""
        self._ids = np.asarray(vocabulary.ids, dtype=np.int64)
        self._encode = vocabulary.encode
        self._seed = seed

    def random(self, name: str) -> np.random.Generator:
        """The random stream of a name."""
        return np.random.default_rng([self._seed, crc32(name.encode())])

    def block(self, name: str, length: int) -> Tokens:
        """`length` random tokens; a shorter block of the same name is a prefix of a longer one."""
        if length < 0:
            raise ValueError(f"block {name!r} of {length} tokens: a length cannot be negative")
        places = self.random(name).integers(0, len(self._ids), size=length)
        return tuple(self._ids[places].tolist())

    def line(self, text: str) -> Tokens:
        """One line of text, tokenised alone."""
        return tuple(int(token) for token in self._encode(text))

    def distinct(
        self, name: str, draw: Callable[[np.random.Generator], _T], count: int
    ) -> list[_T]:
        """`count` different draws.

        Raises:
            ValueError: `draw` gave too few different values.
        """
        random, found = self.random(name), dict[_T, None]()
        for _ in range(1000 * count):
            if len(found) == count:
                return list(found)
            found.setdefault(draw(random))
        raise ValueError(
            f"{name!r} has only {len(found)} different values, {count} were asked for; "
            "measure fewer requests"
        )
