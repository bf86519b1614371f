"""Requests for several workers, token by token and from a seed.

Owns what is sent and in which order. May not know where anything is sent. All requests of a
workload share large blocks in groups; what differs is where the blocks stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.hit_rate.workloads import Fresh, Ids, fresh_tokens


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of the workloads, in tokens where nothing else is said.

    Attributes:
        groups: how many blocks, document sets or sessions there are.
        members: requests a group; turns a session.
        block: what the requests of a group share.
        unique: longest part in front of it, and length of the part behind it.
        window: turns that a truncated session keeps.
        wave: requests under way at a time; divides `groups`.
    """

    groups: int = 8
    members: int = 5
    block: int = 480
    unique: int = 96
    window: int = 3
    wave: int = 4


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts in the order in which they are sent.

    Attributes:
        waves: prompts of one wave are sent together and come from different groups, so none of
            them finds what another one is still computing; the next wave waits for all of them.
    """

    key: str
    title: str
    waves: tuple[tuple[Ids, ...], ...]


def workloads(seed: int, size: Size) -> list[Workload]:
    """All of them, each with tokens of its own."""
    makers = {
        "prefix": ("shared prefix, unique tail", _prefix),
        "shifted": ("unique head, shared block, unique tail", _shifted),
        "documents": ("three documents in any order, unique question", _documents),
        "sessions": (f"sessions cut to the last {size.window} turns", _sessions),
    }
    made = []
    for number, (key, (title, make)) in enumerate(makers.items()):
        generator = np.random.default_rng((seed, number))
        groups = [
            make(generator, fresh_tokens(seed * 1000 + number * 100 + group), size)
            for group in range(size.groups)
        ]
        made.append(Workload(key, title, _waves(generator, groups, size.wave)))
    return made


def _prefix(generator: np.random.Generator, fresh: Fresh, size: Size) -> list[Ids]:
    block = fresh(size.block)
    return [block + fresh(size.unique) for _ in range(size.members)]


def _shifted(generator: np.random.Generator, fresh: Fresh, size: Size) -> list[Ids]:
    block = fresh(size.block)
    heads = generator.integers(1, size.unique + 1, size.members)
    return [fresh(int(head)) + block + fresh(size.unique) for head in heads]


def _documents(generator: np.random.Generator, fresh: Fresh, size: Size) -> list[Ids]:
    documents = [fresh(size.block // 3) for _ in range(3)]
    prompts = []
    for _ in range(size.members):
        order = generator.permutation(3)
        prompts.append(sum((documents[i] for i in order), ()) + fresh(size.unique))
    return prompts


def _sessions(generator: np.random.Generator, fresh: Fresh, size: Size) -> list[Ids]:
    front = fresh(size.unique)
    turns = [fresh(size.block // size.window) for _ in range(size.members + 1)]
    kept = (turns[max(0, end - size.window) : end] for end in range(2, size.members + 2))
    return [front + sum(history, ()) for history in kept]


def _waves(
    generator: np.random.Generator, groups: Sequence[Sequence[Ids]], wave: int
) -> tuple[tuple[Ids, ...], ...]:
    """The first member of every group in a random order, then the second of every group, ..."""
    waves = []
    for members in zip(*groups, strict=True):
        order = generator.permutation(len(members))
        waves += [
            tuple(members[i] for i in order[begin : begin + wave])
            for begin in range(0, len(order), wave)
        ]
    return tuple(waves)
