"""Sends workloads through the router under every policy and counts what the workers reused.

May not know what the counts should be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.hit_rate.workloads import Ids
from bench.router.workloads import Size, workloads
from bench.workers import Answer, Worker, router
from radix_rope.routing import HEADER, RoutingMemory, routing_key

ANSWER_TOKENS = 8
"""Long enough that the requests of a wave are under way together, so that workers have a load."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy of the router.

    Attributes:
        title: for the table.
        name: the router's `--policy`.
        keys: makes the source of routing keys, for a policy that reads them.
        options: more of the router's options.
    """

    title: str
    name: str
    keys: Callable[[], Callable[[Ids], str]] | None = None
    options: tuple[str, ...] = ()


POLICIES = (
    Policy("random", "random"),
    Policy("round_robin", "round_robin"),
    Policy("power_of_two", "power_of_two"),
    Policy("cache_aware", "cache_aware"),
    Policy("manual, no key", "manual"),
    Policy("manual, routing_key", "manual", lambda: routing_key),
    Policy("manual, RoutingMemory", "manual", lambda: RoutingMemory().key),
    Policy(
        "manual min_group, RoutingMemory",
        "manual",
        lambda: RoutingMemory().key,
        ("--assignment-mode", "min_group"),
    ),
)


@dataclass(frozen=True, slots=True)
class Shares:
    """One workload under one policy, once; prompt tokens of all its requests.

    Attributes:
        busiest: share of the requests that went to the worker with the most, 0.5 to 1.
    """

    prompt_tokens: int
    exact_tokens: int
    shifted_tokens: int
    busiest: float

    @property
    def computed(self) -> float:
        """Share of the prompt tokens that went through the model, 0 to 1."""
        return 1 - (self.exact_tokens + self.shifted_tokens) / self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload under one policy, repeated."""

    workload: str
    policy: str
    runs: list[Shares]


def measure(
    workers: Sequence[Worker],
    seeds: Sequence[int],
    size: Size,
    policies: Sequence[Policy],
    log: Path,
    found: list[Cell],
    progress: Callable[[str], None],
) -> None:
    """Every policy with every workload, once a seed.

    The router starts anew for each policy, and caches are empty for each workload. Tokens of
    different workloads and seeds have nothing in common, so what the router remembers of one says
    nothing about another.

    found: cells and their runs are added as they are measured, so that those before a failure are
        kept.
    """
    cells: dict[tuple[str, str], Cell] = {}
    for policy in policies:
        with router(workers, policy.name, log, *policy.options) as front:
            for seed in seeds:
                for workload in workloads(seed, size):
                    for one in workers:
                        one.flush()
                    shares = send(front, workload.waves, policy)
                    where = policy.title, workload.key
                    if where not in cells:
                        cells[where] = Cell(workload.title, policy.title, [])
                        found.append(cells[where])
                    cells[where].runs.append(shares)
                    progress(f"{policy.title}, {workload.key}")


def send(front: Worker, waves: Sequence[Sequence[Ids]], policy: Policy) -> Shares:
    """One pass over a workload."""
    key = policy.keys() if policy.keys else None
    answers: list[Answer] = []
    with ThreadPoolExecutor(max(map(len, waves))) as pool:
        for wave in waves:
            headers = [{HEADER: key(prompt)} if key else {} for prompt in wave]
            answers += pool.map(
                lambda prompt, header: front.generate(prompt, ANSWER_TOKENS, headers=header),
                wave,
                headers,
            )
    return Shares(
        sum(answer.prompt_tokens for answer in answers),
        sum(answer.exact_tokens for answer in answers),
        sum(answer.shifted_tokens for answer in answers),
        max(Counter(answer.worker for answer in answers).values()) / len(answers),
    )
