"""The workloads: how content that was computed once comes back at another offset.

One function per kind of traffic. Every request differs from its donors and from all other requests
within its first tokens, or directly behind the exact prefix it is meant to share, so that no
request becomes a prefix hit on another. May not know sizes (`fit`) nor how they are sent.
"""

from __future__ import annotations

from bench.serving.arrange import shuffled, split
from bench.serving.episode import Episode, Shape, Workload
from bench.serving.volatile import VOLATILE
from bench.serving.writer import Tokens, Writer

_HEAD_TOKENS = 6
_ROLES = ("planner", "reviewer", "tester", "editor", "translator", "release manager", "critic")


def shared_prefix(writer: Writer, shape: Shape) -> Episode:
    """A long shared prefix behind a head of its own per request (an id, a user's name)."""
    return _unique_before(writer, shape, (), "head", writer.block("shared", shape.bulk_tokens))


def permuted_documents(writer: Writer, shape: Shape) -> Episode:
    """The same documents retrieved in another order, an id in front and a question behind."""
    documents = split(writer.block("documents", shape.bulk_tokens), shape.pieces)
    requests = []
    for i, fresh in enumerate(shape.fresh_tokens):
        order = shuffled(writer.random(f"order {i}"), shape.pieces)
        requests.append(
            (
                *writer.block(f"id {i}", _HEAD_TOKENS - 2),
                *(token for place in order for token in documents[place]),
                *writer.block(f"question {i}", fresh),
            )
        )
    donor = (
        *writer.block("id donor", _HEAD_TOKENS - 2),
        *(token for document in documents for token in document),
        *writer.block("question donor", shape.fresh_tokens[0]),
    )
    return Episode(donors=(donor,), requests=tuple(requests))


def breaker(writer: Writer, shape: Shape) -> Episode:
    """A shared prefix, something unique (a user's profile), and a shared suffix."""
    prefix_tokens = shape.bulk_tokens // 4
    prefix = writer.block("prefix", prefix_tokens)
    suffix = writer.block("suffix", shape.bulk_tokens - prefix_tokens)
    return _unique_before(writer, shape, prefix, "breaker", suffix)


def _unique_before(
    writer: Writer, shape: Shape, prefix: Tokens, unique: str, shared: Tokens
) -> Episode:
    """`prefix`, then for every request something unique of another length, `shared`, a question."""

    def prompt(name: str, unique_tokens: int, fresh_tokens: int) -> Tokens:
        return (
            *prefix,
            *writer.block(f"{unique} {name}", unique_tokens),
            *shared,
            *writer.block(f"question {name}", fresh_tokens),
        )

    return Episode(
        donors=(prompt("donor", _HEAD_TOKENS, shape.fresh_tokens[0]),),
        requests=tuple(
            prompt(str(i), _HEAD_TOKENS + 1 + i % 3, fresh)
            for i, fresh in enumerate(shape.fresh_tokens)
        ),
    )


def agent_session(writer: Writer, shape: Shape) -> Episode:
    """Turns of an agent: a head line that changes, system prompt, tool list, growing history."""
    system_tokens = shape.bulk_tokens // 8
    tools_tokens = 3 * shape.bulk_tokens // 8
    body = (
        *writer.block("system", system_tokens),
        *writer.block("tools", tools_tokens),
        *writer.block("history", shape.bulk_tokens - system_tokens - tools_tokens),
    )
    requests = []
    for i, fresh in enumerate(shape.fresh_tokens):
        messages = "messages" if shape.sequential else f"messages {i}"
        head = writer.block(f"head {i}", _HEAD_TOKENS + 1 + i % 3)
        requests.append((*head, *body, *writer.block(messages, fresh)))
    first_turn = (*writer.block("head donor", _HEAD_TOKENS), *body)
    return Episode(donors=(first_turn,), requests=tuple(requests))


def truncated_history(writer: Writer, shape: Shape) -> Episode:
    """A chat at its context limit: the system prompt, and a window over the last messages.

    With every turn as many tokens leave at the front of the window as come in at its end. Where
    requests are independent, each is another branch of the chat, cut one token further.
    """
    system = writer.block("system", shape.bulk_tokens // 8)
    window = writer.block("history", shape.bulk_tokens - len(system))
    requests = []
    for i, fresh in enumerate(shape.fresh_tokens):
        messages = "messages" if shape.sequential else f"messages {i}"
        dropped = fresh if shape.sequential else fresh + i
        requests.append((*system, *window[dropped:], *writer.block(messages, fresh)))
    return Episode(donors=((*system, *window),), requests=tuple(requests))


def fan_out(writer: Writer, shape: Shape) -> Episode:
    """Agents that share one instruction block, each behind its own role and before its own task."""
    instructions = writer.block("instructions", shape.bulk_tokens)

    def prompt(number: int, fresh_tokens: int) -> Tokens:
        role = _ROLES[number % len(_ROLES)]
        return (
            *writer.line(f"You are agent {number}, the {role}.\n"),
            *instructions,
            *writer.block(f"task {number}", fresh_tokens),
        )

    # The coordinator's role is written longer, so that every agent's block moves.
    donor = (
        *writer.line("You are agent 0. You coordinate all the other agents and write nothing.\n"),
        *instructions,
        *writer.block("task 0", shape.fresh_tokens[0]),
    )
    return Episode(
        donors=(donor,),
        requests=tuple(prompt(i + 1, fresh) for i, fresh in enumerate(shape.fresh_tokens)),
    )


WORKLOADS: dict[str, Workload] = {
    workload.key: workload
    for workload in (
        Workload("shared_prefix", "shared prefix, unique head", shared_prefix),
        Workload("permuted", "permuted documents", permuted_documents),
        Workload("breaker", "prefix, unique breaker, suffix", breaker),
        Workload("session", "agent session, head line changes", agent_session, turns=True),
        Workload("truncation", "truncated history", truncated_history, turns=True),
        Workload("fan_out", "agents sharing instructions", fan_out),
        *VOLATILE,
    )
}
"""Every workload by key, in the order of the tables."""

CLAIMED = ("shared_prefix", "permuted", "session", "truncation")
"""Workloads that ratios are promised for."""
