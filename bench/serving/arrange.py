"""Cutting content into pieces and putting them in another order. Knows tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from bench.serving.writer import Tokens


def split(tokens: Tokens, pieces: int) -> list[Tokens]:
    """Cut into `pieces` of nearly equal length."""
    cuts = [len(tokens) * i // pieces for i in range(pieces + 1)]
    return [tokens[low:high] for low, high in pairwise(cuts)]


def shuffled(random: np.random.Generator, count: int) -> Sequence[int]:
    """An order of `count` things in which none stands where or behind what it stood before.

    Raises:
        ValueError: fewer than two things.
    """
    if count < 2:
        raise ValueError(f"{count} things cannot be put in another order; use at least 2 pieces")
    while True:
        order: list[int] = random.permutation(count).tolist()
        follows = any(b == a + 1 for a, b in pairwise(order))
        if order[0] != 0 and not follows:
            return order
