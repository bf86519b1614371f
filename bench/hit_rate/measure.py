"""Sends sessions to a server and counts what it reused. May not know what the counts should be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.hit_rate.law import Tokens, append_only_rate
from bench.hit_rate.workloads import Case, Session, append_only
from bench.workers import Answer, Worker


@dataclass(frozen=True, slots=True)
class Law:
    """One append-only session, as it was set and as it was measured."""

    turns: int
    increment_tokens: int
    answer_tokens: int
    tokens: Tokens


def law_rate(law: Law) -> float:
    """What the law says about a session, 0 to 1."""
    return append_only_rate(law.turns, law.increment_tokens, law.answer_tokens)


@dataclass(frozen=True, slots=True)
class Counted:
    """One case, all its sessions together."""

    key: str
    title: str
    tokens: Tokens


Progress = Callable[[str], None]


def measure_law(
    server: Worker,
    settings: list[tuple[int, int, int]],
    seed: int,
    found: list[Law],
    progress: Progress,
) -> None:
    """The append-only session of every (turns, increment, answer), against an empty cache.

    found: each is added when it was measured, so that those before a failure are kept.
    """
    for number, (turns, increment, answer) in enumerate(settings):
        server.flush()
        session = append_only(seed + number, turns, increment, answer)
        found.append(Law(turns, increment, answer, run_session(server, session)))
        progress(f"{turns} turns")


def measure_cases(
    server: Worker, made: list[Case], found: list[Counted], progress: Progress
) -> None:
    """Every case against an empty cache; its sessions are used up. found: as in `measure_law`."""
    for case in made:
        server.flush()
        tokens = sum((run_session(server, session) for session in case.sessions), Tokens())
        found.append(Counted(case.key, case.title, tokens))
        progress(case.title)


def run_session(server: Worker, session: Session) -> Tokens:
    """Send one session to its end."""
    counted = Tokens()
    request = next(session)
    while True:
        answer = server.generate(
            request.prompt, request.answer_tokens, extra_key=request.backend or None
        )
        counted += _counted(answer, request.last)
        try:
            request = session.send(answer.output)
        except StopIteration:
            return counted


def _counted(answer: Answer, last: bool) -> Tokens:
    computed = answer.computed_tokens
    return Tokens(
        answer.exact_tokens,
        answer.shifted_tokens,
        write=0 if last else computed,
        uncached=computed if last else 0,
    )
