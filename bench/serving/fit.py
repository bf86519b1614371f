"""Sizing: a workload with prompts of a wanted length of which a wanted share must be computed.

The computed tokens count everything: unique heads, questions, and the head of every run that
radix_rope computes again under the options listed with the results. May not know servers.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from bench.serving.episode import Episode, Shape, Workload
from bench.serving.forecast import Expected, Forecast
from bench.serving.writer import Tokens, Writer
from radix_rope.config import RadixRopeConfig

_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Size:
    """What is wanted of the first request: its length, and how much of it is in the cache.

    pieces: into how many documents or tools content falls, where it does.
    """

    prompt_tokens: int
    reusable_percent: float
    pieces: int = 2

    @property
    def computed_tokens(self) -> int:
        """Tokens that are to be computed."""
        return int(self.prompt_tokens * (100 - self.reusable_percent) / 100 + 1e-6)


@dataclass(frozen=True, slots=True)
class Fitted:
    """An episode, and for every request what radix_rope will do.

    Attributes:
        episode: what is sent.
        expected: for every request, what its planner reuses when the requests come in order.
    """

    episode: Episode
    expected: tuple[Expected, ...]

    def control(self, writer: Writer, request: int, repeat: int) -> Tokens:
        """The unshifted request beside a shifted one: as long, and as many tokens to compute.

        It repeats the donor's own beginning and ends in new tokens. (Late turns of a session are
        longer than the donor; their controls keep all of it and are shorter by what is missing.)
        """
        donor, known = self.episode.donors[0], self.expected[request]
        kept = min(len(donor), known.prompt_tokens - known.computed_tokens)
        return (
            *donor[:kept],
            *writer.block(f"control {request} {repeat}", known.computed_tokens),
        )


def fit(
    workload: Workload,
    writer: Writer,
    size: Size,
    requests: int,
    config: RadixRopeConfig,
    *,
    sequential: bool,
) -> Fitted:
    """Make a workload whose requests compute `size.computed_tokens`.

    Independent requests compute exactly as many. The turns of a session do on average, or a little
    less: early ones less, late ones more. The first request has exactly `size.prompt_tokens`
    tokens; others differ by a few where their volatile line is longer or shorter, and sessions
    grow.

    sequential: send requests as the turns of one session, where the workload has turns.

    Raises:
        ValueError: the share that is to be computed has no room for the unique parts.
    """
    sequential = sequential and workload.turns
    wanted = size.computed_tokens
    bulk, fresh = size.prompt_tokens - wanted, [max(1, wanted // 2)] * requests
    if sequential:
        fresh = _turns(requests, requests)
    for _ in range(_ROUNDS):
        shape = Shape(bulk, fresh, size.pieces, sequential)
        episode = workload.build(writer, shape)
        expected = _forecast(episode, config)
        computed = [each.computed_tokens for each in expected]
        if sequential:
            new_fresh = _longest_turns(workload, writer, shape, wanted, config)
        else:
            new_fresh = [f + wanted - c for f, c in zip(fresh, computed, strict=True)]
        if min(new_fresh) < 1:
            raise ValueError(
                f"{workload.title!r} with {size.prompt_tokens:,} tokens, {size.reusable_percent}% "
                f"reusable: {wanted} tokens may be computed, but its unique parts and the heads of "
                f"its runs need {wanted + 1 - min(new_fresh)}; make prompts longer, the share "
                "smaller or the pieces fewer"
            )
        grown = new_fresh[0] - fresh[0]
        keeps_length = sequential and len(episode.requests[0]) == len(episode.donors[0])
        missing = size.prompt_tokens - len(episode.requests[0]) - (0 if keeps_length else grown)
        if new_fresh == fresh and not missing:
            return Fitted(episode, expected)
        bulk, fresh = bulk + missing, new_fresh
    raise ValueError(
        f"{workload.title!r} could not be made {size.prompt_tokens:,} tokens long with "
        f"{size.reusable_percent}% reusable; make prompts longer or the share smaller"
    )


def _forecast(episode: Episode, config: RadixRopeConfig) -> tuple[Expected, ...]:
    forecast = Forecast(config)
    for donor in episode.donors:
        forecast.send(donor)
    return tuple(forecast.send(request) for request in episode.requests)


def _turns(last: int, turns: int) -> list[int]:
    """Fresh tokens since the donor, turn by turn, growing to `last`."""
    return [last * (turn + 1) // turns for turn in range(turns)]


def _longest_turns(
    workload: Workload, writer: Writer, shape: Shape, wanted: int, config: RadixRopeConfig
) -> list[int]:
    """The longest messages with which the turns compute at most `wanted` tokens on average."""
    turns = shape.requests

    def fits(last: int) -> bool:
        longer = Shape(shape.bulk_tokens, _turns(last, turns), shape.pieces, True)
        expected = _forecast(workload.build(writer, longer), config)
        return fmean(each.computed_tokens for each in expected) <= wanted

    low, high = 0, turns * wanted
    while low < high:
        middle = (low + high + 1) // 2
        if middle >= turns and not fits(middle):
            high = middle - 1
        else:
            low = middle
    return _turns(low, turns)
