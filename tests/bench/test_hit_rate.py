"""The append-only law against a simulated cache, and what the workloads promise."""

import pytest

from bench.hit_rate.law import Prices, Tokens, append_only_rate
from bench.hit_rate.workloads import Ids, Request, Session, Shape, append_only, cases

SMALL = Shape(turns=6, increment=20, system=30, tools=2, tool=10, users=3, document=40)


def play(session: Session) -> list[Request]:
    """All requests of a session whose model answers 1, 2, 3..."""
    requests = [next(session)]
    while True:
        try:
            requests.append(session.send(tuple(range(1, requests[-1].answer_tokens + 1))))
        except StopIteration:
            return requests


def prefix_hits(requests: list[Request]) -> int:
    """What a prefix cache with pages of one token has of each prompt, all but its last token."""
    held: list[tuple[str, Ids]] = []
    hits = 0
    for request in requests:
        prompt = request.prompt
        hits += max(
            (_common(prompt[:-1], one) for where, one in held if where == request.backend),
            default=0,
        )
        # The KV of an answer's last token is never computed.
        held.append((request.backend, prompt + tuple(range(1, request.answer_tokens))))
    return hits


def _common(one: Ids, other: Ids) -> int:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length


@pytest.mark.parametrize(
    ("turns", "increment", "answer"), [(10, 64, 1), (20, 96, 1), (40, 2, 1), (1, 5, 1), (7, 30, 8)]
)
def test_the_law_is_exact_to_the_token(turns: int, increment: int, answer: int) -> None:
    requests = play(append_only(3, turns, increment, answer))
    sent = sum(len(request.prompt) for request in requests)
    assert sent == increment * turns * (turns + 1) // 2
    law = append_only_rate(turns, increment, answer)
    assert prefix_hits(requests) == pytest.approx(law * sent, abs=1e-6)
    assert [request.last for request in requests] == [False] * (turns - 1) + [True]


def test_the_numbers_everyone_quotes() -> None:
    assert [round(100 * append_only_rate(turns), 1) for turns in (10, 20, 40)] == [81.8, 90.5, 95.1]
    for wrong in ((0, 2, 1), (3, 5, 5), (3, 5, 0)):
        with pytest.raises(ValueError, match="at least one"):
            append_only_rate(*wrong)


def test_cases_are_the_same_from_the_same_seed_and_collapse_as_named() -> None:
    hits = {}
    for case, again in zip(cases(1, SMALL), cases(1, SMALL), strict=True):
        requests = [request for session in case.sessions for request in play(session)]
        assert requests == [request for session in again.sessions for request in play(session)]
        sent = sum(len(request.prompt) for request in requests)
        hits[case.key] = prefix_hits(requests) / sent
    assert hits["clock"] == 0
    assert hits["short"] == pytest.approx(1 / 3)
    for collapsed in ("tools", "system", "truncation", "model", "scattered"):
        assert 0 < hits[collapsed] < hits["append"]


def test_truncation_drops_the_oldest_turns_and_keeps_the_front() -> None:
    case = next(case for case in cases(1, SMALL) if case.key == "truncation")
    prompts = [request.prompt for request in play(case.sessions[0])]
    front = SMALL.system + SMALL.tools * SMALL.tool
    assert len({prompt[:front] for prompt in prompts}) == 1
    assert len(prompts[-1]) == front + SMALL.window * SMALL.increment
    assert prompts[-1][front : -SMALL.increment] == prompts[-2][front + SMALL.increment :]


def test_cost_is_relative_to_no_cache() -> None:
    prices = Prices(read=0.1, shifted=0.2, write=1.25, uncached=2.0)
    assert Tokens(uncached=100).cost(prices) == {"read": 0.0, "write": 0.0, "uncached": 1.0}
    tokens = Tokens(read=50, shifted=25) + Tokens(write=20, uncached=5)
    assert (tokens.sent, tokens.computed, tokens.hit_rate) == (100, 25, 0.75)
    assert tokens.cost(prices) == {
        "read": pytest.approx(0.05),
        "write": pytest.approx(0.125),
        "uncached": pytest.approx(0.05),
    }
