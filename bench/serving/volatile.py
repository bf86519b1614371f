"""Volatile lines where real agents put them: clocks, gauges, dates, reordered tools, reasoning.

Same rules as `workloads`: one function per kind of change, no sizes of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial

import numpy as np

from bench.serving.arrange import shuffled, split
from bench.serving.episode import Episode, Shape, Workload
from bench.serving.writer import Tokens, Writer

_EPOCH = datetime(2031, 3, 14, 9, 26)
_REASONING_TOKENS = 96


def clock(writer: Writer, shape: Shape, *, milliseconds: bool, same_length: bool) -> Episode:
    """A clock in the very first line.

    same_length: an ISO time with as many tokens as the donor's, so that what follows keeps its
    offset; else the time in words, with another number of tokens.
    """
    body = writer.block("body", shape.bulk_tokens)

    def text(moment: datetime) -> str:
        if same_length:
            spec = "milliseconds" if milliseconds else "minutes"
            return f"Current time: {moment.isoformat(' ', spec)}\n"
        fraction = f":{moment:%S}.{moment.microsecond // 1000}" if milliseconds else ""
        return (
            f"It is {moment:%A}, {moment:%B} {moment.day}, {moment.hour}:{moment:%M}{fraction}.\n"
        )

    donor_line = writer.line(text(_EPOCH))

    def draw(random: np.random.Generator) -> str:
        while True:
            moment = _EPOCH + timedelta(
                minutes=int(random.integers(1, 500_000)),
                milliseconds=int(random.integers(1, 60_000)) if milliseconds else 0,
            )
            line = text(moment)
            if (len(writer.line(line)) == len(donor_line)) == same_length:
                return line

    lines = writer.distinct("clock", draw, shape.requests)
    return _with_questions(
        writer, shape, (*donor_line, *body), [(*writer.line(line), *body) for line in lines]
    )


def memory_gauge(writer: Writer, shape: Shape) -> Episode:
    """A percentage of used memory in the middle of the system prompt."""
    first = writer.block("system 1", shape.bulk_tokens // 8)
    rest = writer.block("system 2", shape.bulk_tokens - len(first))

    def prompt(percent: int) -> Tokens:
        return (*first, *writer.line(f"Memory used: {percent}% of 64 GiB\n"), *rest)

    percents = [
        percent
        for percent in writer.distinct("percent", lambda random: int(random.integers(10, 100)), 81)
        if percent != 41
    ]
    return _with_questions(
        writer, shape, prompt(41), [prompt(percents[i]) for i in _first(shape, len(percents))]
    )


def date_line(writer: Writer, shape: Shape) -> Episode:
    """A line with the date between system prompt and history."""
    system = writer.block("system", shape.bulk_tokens // 4)
    history = writer.block("history", shape.bulk_tokens - len(system))

    def prompt(days: int) -> Tokens:
        day = _EPOCH + timedelta(days=days)
        line = f"Today is {day:%A}, {day:%B} {day.day}, {day.year}.\n"
        return (*system, *writer.line(line), *history)

    return _with_questions(writer, shape, prompt(0), [prompt(1 + i) for i in range(shape.requests)])


def reordered_tools(writer: Writer, shape: Shape) -> Episode:
    """The tool definitions in another order, as from a set or a registry that was reloaded."""
    system = writer.block("system", shape.bulk_tokens // 8)
    tools = split(writer.block("tools", shape.bulk_tokens // 2), shape.pieces)
    history = writer.block("history", shape.bulk_tokens - len(system) - shape.bulk_tokens // 2)

    def prompt(order: Sequence[int]) -> Tokens:
        return (*system, *(token for place in order for token in tools[place]), *history)

    orders = writer.distinct(
        "orders", lambda random: tuple(shuffled(random, shape.pieces)), shape.requests
    )
    return _with_questions(writer, shape, prompt(range(shape.pieces)), list(map(prompt, orders)))


def stripped_reasoning(writer: Writer, shape: Shape) -> Episode:
    """The reasoning block of an earlier turn is left out when the next turn is sent.

    Every request is another session: its own turn follows the shared system prompt, and is sent
    as a donor with its reasoning.
    """
    system = writer.block("system", shape.bulk_tokens // 4)
    donors, requests = [], []
    for i, fresh in enumerate(shape.fresh_tokens):
        later = writer.block(f"later {i}", shape.bulk_tokens - len(system))
        reasoning = writer.block(f"reasoning {i}", _REASONING_TOKENS)
        donors.append((*system, *reasoning, *later))
        requests.append((*system, *later, *writer.block(f"question {i}", fresh)))
    return Episode(donors=tuple(donors), requests=tuple(requests))


def _first(shape: Shape, available: int) -> range:
    if shape.requests > available:
        raise ValueError(
            f"{shape.requests} requests were asked for, there are {available} different ones; "
            "measure fewer"
        )
    return range(shape.requests)


def _with_questions(
    writer: Writer, shape: Shape, donor: Tokens, requests: Sequence[Tokens]
) -> Episode:
    return Episode(
        donors=((*donor, *writer.block("question donor", shape.fresh_tokens[0])),),
        requests=tuple(
            (*request, *writer.block(f"question {i}", fresh))
            for i, (request, fresh) in enumerate(zip(requests, shape.fresh_tokens, strict=True))
        ),
    )


def _clock(milliseconds: bool, same_length: bool) -> Workload:
    unit = "ms" if milliseconds else "minute"
    length = "same" if same_length else "other"
    build: Callable[[Writer, Shape], Episode] = partial(
        clock, milliseconds=milliseconds, same_length=same_length
    )
    return Workload(
        f"clock_{unit}_{length}", f"clock at the top, to the {unit}, {length} length", build
    )


VOLATILE = (
    _clock(milliseconds=False, same_length=True),
    _clock(milliseconds=False, same_length=False),
    _clock(milliseconds=True, same_length=True),
    _clock(milliseconds=True, same_length=False),
    Workload("memory_gauge", "memory usage in the system prompt", memory_gauge),
    Workload("date_line", "date behind the system prompt", date_line),
    Workload("tools", "reordered tool definitions", reordered_tools),
    Workload("reasoning", "stripped reasoning block", stripped_reasoning),
)
"""The volatile workloads, in the order of the tables."""
