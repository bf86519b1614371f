"""Sends sessions to a server and counts what it reused. May not know what the counts should be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.hit_rate.law import Tokens
from bench.hit_rate.workloads import Case, Session, append_only
from bench.workers import Answer, Worker


@dataclass(frozen=True, slots=True)
class Law:
    """One append-only session, as it was set and as it was measured."""

    turns: int
    increment_tokens: int
    answer_tokens: int
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Counted:
    """One case, all its sessions together."""

    key: str
    title: str
    tokens: Tokens


Progress = Callable[[str], None]


def measure_law(
    server: Worker, settings: list[tuple[int, int, int]], seed: int, progress: Progress
) -> list[Law]:
    """The append-only session of every (turns, increment, answer), against an empty cache."""
    found = []
    for number, (turns, increment, answer) in enumerate(settings):
        server.flush()
        session = append_only(seed + number, turns, increment, answer)
        found.append(Law(turns, increment, answer, run_session(server, session)))
        progress(f"{turns} turns")
    return found


def measure_cases(server: Worker, made: list[Case], progress: Progress) -> list[Counted]:
    """Every case against an empty cache; its sessions are used up."""
    found = []
    for case in made:
        server.flush()
        tokens = sum((run_session(server, session) for session in case.sessions), Tokens())
        found.append(Counted(case.key, case.title, tokens))
        progress(case.title)
    return found


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
