"""What one workload sends: donors that fill the cache, then the requests that are timed.

Plain data, and the form of the functions that make it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.serving.writer import Tokens, Writer


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes a workload is made with.

    Attributes:
        bulk_tokens: content that donor and requests share.
        fresh_tokens: for every request, new tokens at its end (its question or new messages).
        pieces: into how many documents or tools the content falls, where it does.
        sequential: whether requests are the turns of one session, each containing the fresh
            tokens of the one before, or independent of one another.
    """

    bulk_tokens: int
    fresh_tokens: Sequence[int]
    pieces: int
    sequential: bool

    @property
    def requests(self) -> int:
        """How many requests are timed."""
        return len(self.fresh_tokens)


@dataclass(frozen=True, slots=True)
class Episode:
    """Donors are sent before, untimed; then the requests, each different from its donors' start."""

    donors: tuple[Tokens, ...]
    requests: tuple[Tokens, ...]


Build = Callable[[Writer, Shape], Episode]


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of traffic.

    Attributes:
        key: its name on the command line.
        title: its name in tables.
        build: makes its requests. They are the shifted variant; the unshifted control repeats the
            donor's own beginning (`fit.control`).
        turns: whether its requests are turns of a session when they are sent one after another.
    """

    key: str
    title: str
    build: Build
    turns: bool = False
