"""Who goes first, and who follows whom, when several take turns.

A server that always runs right behind the same other one meets the machine as that one left it
(clock speed, caches, a scheduler winding down), which looks like a property of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def turn_order(items: Sequence[T], number: int) -> list[T]:
    """The order of `items` in turn `number`, 0 and up; with 2 * len(items) turns it repeats.

    Over 2 * len(items) successive numbers every item has every place twice, and follows every
    other item directly within a turn exactly twice: rotations of a zigzag 0, 1, n-1, 2, n-2... and
    then of the zigzag backwards (Williams, "Experimental designs balanced for the estimation of
    residual effects of treatments", 1949). For three items these are all rotations and all
    reversed rotations.

    >>> ["".join(turn_order("ABC", number)) for number in range(6)]
    ['ABC', 'BCA', 'CAB', 'CBA', 'BAC', 'ACB']
    """
    count = len(items)
    order = [(place + 1) // 2 * (1 if place % 2 else -1) for place in range(count)]
    shift = number
    if number // count % 2:
        # The other way round in both, so that of three nobody follows himself across turns either.
        order.reverse()
        shift = -number
    return [items[(place + shift) % count] for place in order]
