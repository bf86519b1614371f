"""The generators: equal by seed, exact in length and share, and really shifted."""

from itertools import pairwise

import numpy as np
import pytest

from bench.serving.arrange import shuffled, split
from bench.serving.fit import Size
from bench.serving.workloads import CLAIMED, WORKLOADS
from bench.serving.writer import Vocabulary, Writer
from tests.bench.serving.made import SIZES, Encode, common_prefix, make, plan_alone

# What follows the line that changed stands where it stood before.
IN_PLACE = {"clock_minute_same", "clock_ms_same", "memory_gauge", "date_line"}


@pytest.mark.parametrize("key", WORKLOADS)
def test_equal_for_equal_seeds_only(key: str, encode: Encode) -> None:
    one, _ = make(key, encode, SIZES["1k"], sequential=True)
    again, _ = make(key, encode, SIZES["1k"], sequential=True)
    other, _ = make(key, encode, SIZES["1k"], seed=2, sequential=True)
    assert one == again
    assert one.episode.requests[0] != other.episode.requests[0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("key", WORKLOADS)
def test_length_and_share_are_as_claimed(key: str, size: str, encode: Encode) -> None:
    wanted = SIZES[size]
    made, _ = make(key, encode, wanted, sequential=False)
    assert len(made.episode.requests[0]) == wanted.prompt_tokens
    prefix, plan = plan_alone(made, made.episode.requests[0])
    assert plan is not None
    assert plan.computed_tokens == wanted.computed_tokens
    assert made.expected[0].prefix_tokens == prefix
    for request, expected in zip(made.episode.requests, made.expected, strict=True):
        assert expected.computed_tokens == wanted.computed_tokens
        # A volatile line may be longer; a tool that stays in place needs no repair.
        assert abs(len(request) - wanted.prompt_tokens) <= 20


@pytest.mark.parametrize("key", WORKLOADS)
def test_runs_really_move(key: str, encode: Encode) -> None:
    made, _ = make(key, encode, SIZES["1k"], sequential=False)
    for request, expected in zip(made.episode.requests, made.expected, strict=True):
        prefix, plan = plan_alone(made, request)
        assert plan is not None
        # A prefix cache keeps little of it, and more than the prefix is reused.
        assert prefix < len(request) // 3
        moved = sum(len(run) for run in plan.runs if run.delta)
        assert plan.reused_tokens > len(request) // 2
        assert moved == expected.moved_tokens
        if key in IN_PLACE:
            assert moved == 0
        else:
            assert moved >= len(request) // 4


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("key", WORKLOADS)
def test_no_request_is_a_prefix_of_another(key: str, sequential: bool, encode: Encode) -> None:
    made, _ = make(key, encode, SIZES["1k"], sequential=sequential)
    one, other = made.episode.requests
    donors = made.episode.donors
    shared_with_donors = max(common_prefix(other, donor) for donor in donors)
    # A few characters of a date or of a clock may be equal by chance.
    assert common_prefix(one, other) <= shared_with_donors + 16


@pytest.mark.parametrize("key", CLAIMED)
def test_turns_compute_on_average_what_is_claimed(key: str, encode: Encode) -> None:
    size = Size(1024, 95)
    made, _ = make(key, encode, size, requests=3, sequential=True)
    computed = [each.computed_tokens for each in made.expected]
    assert size.computed_tokens - 3 < sum(computed) / 3 <= size.computed_tokens
    assert computed == sorted(computed)
    assert all(len(r) >= size.prompt_tokens for r in made.episode.requests)


def test_a_session_grows_behind_its_head_line(encode: Encode) -> None:
    made, _ = make("session", encode, SIZES["1k"], requests=3, sequential=True)
    # The head lines have 7, 8 and 9 tokens.
    first, second, third = (r[7 + i :] for i, r in enumerate(made.episode.requests))
    assert len(first) < len(second) < len(third)
    assert second[: len(first)] == first
    assert third[: len(second)] == second


def test_a_window_slides_behind_the_system_prompt(encode: Encode) -> None:
    made, _ = make("truncation", encode, SIZES["1k"], requests=3, sequential=True)
    donor = made.episode.donors[0]
    system = common_prefix(donor, made.episode.requests[0])
    assert system == made.expected[0].prefix_tokens > 64
    last = donor
    for request in made.episode.requests:
        assert request[:system] == donor[:system]
        dropped = last.index(request[system], system) - system
        assert dropped > 0
        assert request[system : len(last) - dropped] == last[system + dropped :]
        assert len(request) == 1024
        last = request


@pytest.mark.parametrize("key", WORKLOADS)
def test_controls_are_prefix_hits_that_compute_as_much(key: str, encode: Encode) -> None:
    made, writer = make(key, encode, SIZES["1k"], sequential=False)
    donor = made.episode.donors[0]
    seen = set()
    for i, (request, expected) in enumerate(zip(made.episode.requests, made.expected, strict=True)):
        for repeat in range(2):
            control = made.control(writer, i, repeat)
            assert len(control) == len(request)
            assert common_prefix(control, donor) == len(control) - expected.computed_tokens
            seen.add(control)
    assert len(seen) == 4


@pytest.mark.parametrize("unit", ["minute", "ms"])
def test_clocks_of_equal_and_of_other_length(unit: str, encode: Encode) -> None:
    from bench.serving.episode import Shape
    from bench.serving.volatile import clock

    writer = Writer(Vocabulary(range(100, 40_000), encode), 3)
    shape = Shape(200, [20] * 12, 2, False)
    for same in (True, False):
        episode = clock(writer, shape, milliseconds=unit == "ms", same_length=same)
        length = len(episode.donors[0])
        assert len(set(episode.requests)) == 12
        assert all((len(r) == length) == same for r in episode.requests)


def test_a_gauge_shows_other_percentages_with_every_seed(encode: Encode) -> None:
    from bench.serving.episode import Shape
    from bench.serving.volatile import memory_gauge

    for seed in range(30):
        writer = Writer(Vocabulary(range(100, 40_000), encode), seed)
        episode = memory_gauge(writer, Shape(200, [20] * 12, 2, False))
        assert len({*episode.donors, *(r[:-20] for r in episode.requests)}) == 13


def test_a_share_without_room_is_refused(encode: Encode) -> None:
    with pytest.raises(ValueError, match=r"12 tokens may be computed, but .* need"):
        make("permuted", encode, Size(1024, 98.8, pieces=3), sequential=False)


def test_too_few_different_values_are_refused(encode: Encode) -> None:
    with pytest.raises(ValueError, match="measure fewer requests"):
        make("tools", encode, Size(1024, 90, pieces=2), requests=2, sequential=False)


def test_blocks_are_prefixes_of_longer_ones(encode: Encode) -> None:
    writer = Writer(Vocabulary(range(100, 40_000), encode), 1)
    assert writer.block("a", 900)[:300] == writer.block("a", 300)
    assert writer.block("a", 300) != writer.block("b", 300)
    with pytest.raises(ValueError, match="cannot be negative"):
        writer.block("a", -1)


def test_another_order_breaks_every_neighbourhood() -> None:
    for seed in range(50):
        order = list(shuffled(np.random.default_rng(seed), 5))
        assert sorted(order) == [0, 1, 2, 3, 4]
        assert order[0] != 0
        assert all(b != a + 1 for a, b in pairwise(order))
    pieces = split(tuple(range(10)), 3)
    assert [len(piece) for piece in pieces] == [3, 3, 4]
    assert sum(pieces, ()) == tuple(range(10))
    with pytest.raises(ValueError, match="at least 2 pieces"):
        shuffled(np.random.default_rng(0), 1)
