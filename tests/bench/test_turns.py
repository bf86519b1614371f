"""Turns are balanced: places and neighbours."""

from collections import Counter
from itertools import pairwise, permutations

import pytest

from bench.turns import turn_order


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("first", [0, 1, 7])
def test_every_place_and_every_ordered_pair_of_neighbours_comes_twice(
    count: int, first: int
) -> None:
    items = "ABCDEF"[:count]
    orders = [turn_order(items, number) for number in range(first, first + 2 * count)]
    assert all(sorted(order) == list(items) for order in orders)
    places = Counter((place, item) for order in orders for place, item in enumerate(order))
    assert places == {(place, item): 2 for place in range(count) for item in items}
    pairs = Counter(pair for order in orders for pair in pairwise(order))
    assert pairs == dict.fromkeys(permutations(items, 2), 2)


def test_three_take_all_rotations_and_then_all_reversed_ones() -> None:
    orders = ["".join(turn_order("ABC", number)) for number in range(7)]
    assert set(orders[:3]) == {"ABC", "BCA", "CAB"}
    assert set(orders[3:6]) == {"CBA", "BAC", "ACB"}
    assert orders[6] == orders[0]
    # Across turns too, nobody follows himself.
    assert all(before[-1] != after[0] for before, after in pairwise(orders))
