"""What radix_rope costs where nothing is shared: `python -m bench.overhead`.

Three servers on the same attention backend take turns, round by round: SGLang's default tree, its
`RadixCache`, and radix_rope. Owns the two workloads, the ratios and their table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tqdm import tqdm
from transformers import AutoTokenizer

from bench.pages import (
    around_generated,
    markdown_table,
    setting_text,
    verdict_text,
    write_generated,
    write_incomplete,
    write_results,
)
from bench.servers import (
    OUR_CACHE,
    STOCK_CACHE,
    Server,
    ServerError,
    sglang_server,
    stopped_at_exit,
)
from bench.serving.client import Client, RequestError
from bench.turns import turn_order
from radix_rope.models.catalog import DEFAULT_MODEL
from radix_rope.models.errors import FetchError
from radix_rope.models.fetch import fetch_model
from radix_rope.quality.machine import describe_machine

OURS = "radix_rope"
STOCK = "RadixCache"
DEFAULT = "default tree"
IMPLS = {
    DEFAULT: (),
    STOCK: ("--radix-cache-impl", STOCK_CACHE),
    OURS: ("--radix-cache-impl", OUR_CACHE),
}
MIN_SPEED = 0.98
"""Promised ratio of speeds where nothing is shared: requests per second, and 1 / TTFT."""
WORKLOADS = {"unique": "unique prompts", "chats": "append-only chats"}

_FAILURES = (FetchError, ServerError, RequestError, ValueError, OSError, psutil.Error)

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Size:
    """How much is sent in a round, per server and workload."""

    rounds: int
    prompts: int
    prompt_tokens: int
    turns: int
    output_tokens: int
    singles: int


# Many short rounds: the machine's speed drifts, and only neighbours in time are compared.
FULL = Size(rounds=18, prompts=4, prompt_tokens=192, turns=3, output_tokens=4, singles=1)
QUICK = Size(rounds=2, prompts=3, prompt_tokens=96, turns=2, output_tokens=2, singles=1)


@dataclass(frozen=True)
class Contestant:
    """A running server: who speaks to it, and the process whose time is read."""

    client: Client
    scheduler: psutil.Process

    def cpu_seconds(self) -> float:
        """Processor time of the scheduler so far."""
        times = self.scheduler.cpu_times()
        return float(times.user + times.system)


@dataclass(frozen=True)
class Sample:
    """One round of one workload on one server."""

    workload: str
    server: str
    round: int
    requests_per_second: float
    ttft_ms: float
    """Median over requests sent one at a time."""
    reused_tokens: int
    """From exact prefixes; moved ones would be a mistake of the workload."""
    cpu_seconds: float
    """Processor time of the scheduler for all of it: steadier than the clock, and what costs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; exit code 1 when a server broke or, with `--strict`, a ratio misses its target."""
    options = _parse(arguments)
    size = QUICK if options.quick else FULL
    if options.rounds:
        size = dataclasses.replace(size, rounds=options.rounds)
    load_before, samples = os.getloadavg()[0], list[Sample]()
    base = options.output / "overhead"
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        if options.write_docs is not None:
            around_generated(options.write_docs, "bench.overhead")
        _measure_all(options, size, samples)
    except _FAILURES as error:
        write_incomplete(base, error, {"samples": [dataclasses.asdict(one) for one in samples]})
        return 1
    record = summarise(samples)
    setting = {
        "model": f"{DEFAULT_MODEL} float32",
        "seed": options.seed,
        "attention_backend": options.attention_backend,
        **dataclasses.asdict(size),
        **describe_machine(),
        "load average before the start": round(load_before, 2),
    }
    raw = [dataclasses.asdict(sample) for sample in samples]
    everything = json.dumps({"setting": setting, "summary": record, "samples": raw}, indent=1)
    text = as_markdown(record, setting)
    write_results(base, everything, text)
    print(text)
    if options.write_docs is not None:
        write_generated(options.write_docs, "bench.overhead", text)
    kept = all(row["throughput_within_target"] and row["ttft_within_target"] for row in record)
    return int(options.strict and not kept)


def _measure_all(options: argparse.Namespace, size: Size, samples: list[Sample]) -> None:
    """Start the servers and measure all rounds into `samples`."""
    model = fetch_model(DEFAULT_MODEL, None, "float32")
    tokenizer = AutoTokenizer.from_pretrained(model)
    common = [
        *("--dtype", "float32", "--attention-backend", options.attention_backend),
        *("--max-total-tokens", "16000", "--max-running-requests", "16", "--random-seed", "1"),
    ]
    with tempfile.TemporaryDirectory() as logs, stopped_at_exit() as running:
        contestants = []
        # One after the other, so that no two load the model at once.
        for name, impl in IMPLS.items():
            log = Path(logs) / f"{name.replace(' ', '-')}.log"
            server = sglang_server(name, model, [*common, *impl], log)
            running.append(server)
            server.wait_until_ready()
            client = Client(name, server.url, "sglang", str(model), tokenizer)
            contestants.append(Contestant(client, _scheduler(server)))
        measure(contestants, size, options.seed, samples)


def _scheduler(server: Server) -> psutil.Process:
    for process in psutil.Process(server.pid).children(recursive=True):
        if "scheduler" in " ".join(process.cmdline()):
            return process
    raise ServerError(f"{server.name} has no scheduler among its processes")


def measure(
    contestants: Sequence[Contestant], size: Size, seed: int, samples: list[Sample]
) -> None:
    """All rounds; the servers take turns within each, in the orders of `turn_order`.

    samples: each round's are added when it is over, so that those before a failure are kept.
    """
    rng = np.random.default_rng(seed)
    with tqdm(total=(size.rounds + 1) * len(WORKLOADS), file=sys.stderr) as progress:
        # Round 0 warms up what is compiled or allocated on first use, and is not counted.
        for turn in range(size.rounds + 1):
            for workload in WORKLOADS:
                bursts = (_unique if workload == "unique" else _chats)(rng, size)
                singles = [_tokens(rng, size.prompt_tokens) for _ in range(size.singles)]
                if workload == "chats":
                    # The next turn of each chat, alone.
                    singles = [
                        (*chat, *one) for chat, one in zip(bursts[-1], singles, strict=False)
                    ]
                found = _round(contestants, workload, turn, bursts, singles, size)
                progress.update()
                if turn:
                    samples += found


def _round(
    contestants: Sequence[Contestant],
    workload: str,
    turn: int,
    bursts: Sequence[Sequence[Tokens]],
    singles: Sequence[Tokens],
    size: Size,
) -> list[Sample]:
    """The bursts of each server, then the single requests, server by server for each of them."""
    speed, reused, cpu, ttft = {}, {}, dict[str, float](), dict[str, list[float]]()
    for contestant in turn_order(contestants, turn):
        name = contestant.client.name
        contestant.client.flush()
        before = contestant.cpu_seconds()
        speed[name], reused[name] = _bursts(contestant.client, bursts, turn, size)
        cpu[name] = contestant.cpu_seconds() - before
    for number, prompt in enumerate(singles):
        for contestant in turn_order(contestants, turn * len(singles) + number):
            name, before = contestant.client.name, contestant.cpu_seconds()
            ttft.setdefault(name, []).append(contestant.client.one(prompt).ttft_ms)
            cpu[name] += contestant.cpu_seconds() - before
    return [
        Sample(
            workload,
            name,
            turn,
            speed[name],
            statistics.median(ttft[name]),
            reused[name],
            cpu[name],
        )
        for name in speed
    ]


def _bursts(
    client: Client, bursts: Sequence[Sequence[Tokens]], turn: int, size: Size
) -> tuple[float, int]:
    """Requests per second over all bursts, and how many tokens came from exact prefixes."""
    seconds, requests, reused = 0.0, 0, 0
    for prompts in bursts:
        burst = client.burst(prompts, float("inf"), size.output_tokens, seed=turn)
        seconds += burst.metrics["completed"] / burst.metrics["request_throughput"]
        requests += len(prompts)
        reused += sum(answer.exact_tokens or 0 for answer in burst.answers)
        moved = sum(answer.shifted_tokens or 0 for answer in burst.answers)
        if moved:
            raise ValueError(f"{client.name} moved {moved} tokens of prompts that share none")
    return requests / seconds, reused


def _tokens(rng: np.random.Generator, count: int) -> Tokens:
    # Random ids share no window with anything; the model's work does not depend on them.
    return tuple(int(token) for token in rng.integers(100, 40000, count))


def _unique(rng: np.random.Generator, size: Size) -> list[list[Tokens]]:
    return [[_tokens(rng, size.prompt_tokens) for _ in range(size.prompts)]]


def _chats(rng: np.random.Generator, size: Size) -> list[list[Tokens]]:
    """Turn by turn: every chat's prompt is its last one and something new behind it."""
    chats: list[Tokens] = [()] * (size.prompts // 2 + 1)
    turns = []
    for _ in range(size.turns):
        chats = [(*chat, *_tokens(rng, size.prompt_tokens // 2)) for chat in chats]
        turns.append(chats)
    return turns


def summarise(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Ratios of radix_rope to each other server within a round: median and quartiles."""
    rows = []
    for workload in WORKLOADS:
        by = {(s.server, s.round): s for s in samples if s.workload == workload}
        rounds = sorted({turn for _, turn in by})
        for other in (STOCK, DEFAULT):
            speed = [
                by[OURS, t].requests_per_second / by[other, t].requests_per_second for t in rounds
            ]
            ttft = [by[OURS, t].ttft_ms / by[other, t].ttft_ms for t in rounds]
            cpu = [by[OURS, t].cpu_seconds / by[other, t].cpu_seconds for t in rounds]
            rows.append(
                {
                    "workload": workload,
                    "against": other,
                    "requests_per_second": statistics.median(
                        by[OURS, t].requests_per_second for t in rounds
                    ),
                    "throughput_ratio": _spread(speed),
                    "ttft_ratio": _spread(ttft),
                    "cpu_ratio": _spread(cpu),
                    "throughput_within_target": statistics.median(speed) >= MIN_SPEED,
                    "ttft_within_target": 1 / statistics.median(ttft) >= MIN_SPEED,
                }
            )
    return rows


def _spread(values: Sequence[float]) -> list[float]:
    """First quartile, median, third quartile."""
    return [round(float(q), 4) for q in np.quantile(values, [0.25, 0.5, 0.75])]


def as_markdown(rows: Sequence[dict[str, Any]], setting: dict[str, Any]) -> str:
    """The table as it stands in the docs."""
    head = ("workload", "against", "requests/s", "TTFT", "processor time", "our requests/s")
    table = [
        (
            WORKLOADS[row["workload"]],
            row["against"],
            *(_shown(row[name]) for name in ("throughput_ratio", "ttft_ratio", "cpu_ratio")),
            f"{row['requests_per_second']:.2f}",
        )
        for row in rows
    ]
    checked = [line for row in rows for line in _verdicts(row)]
    return "\n\n".join(
        (
            setting_text(setting),
            markdown_table([head, *table], left=(0, 1)),
            "Ratios of radix_rope to the other server in the same round: median and quartiles over "
            "the rounds. For requests/s more than 1 is better, for TTFT and for the scheduler's "
            "processor time less than 1.",
            "```\n" + "\n".join(checked) + "\n```",
        )
    )


def _verdicts(row: dict[str, Any]) -> tuple[str, str]:
    """What is promised of a row: requests per second, and time to first token."""
    what, against = WORKLOADS[row["workload"]], row["against"]
    return (
        verdict_text(
            row["throughput_within_target"],
            f"{what}: at least {MIN_SPEED} of the requests/s of the {against}: "
            f"{row['throughput_ratio'][1]:.4f}",
        ),
        verdict_text(
            row["ttft_within_target"],
            f"{what}: at most 1/{MIN_SPEED} = {1 / MIN_SPEED:.4f} of the TTFT of the {against}: "
            f"{row['ttft_ratio'][1]:.4f}",
        ),
    )


def _shown(spread: Sequence[float]) -> str:
    low, middle, high = spread
    return f"**{middle:.3f}** ({low:.3f} to {high:.3f})"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=main.__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("bench/results"), help="folder (%(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="a small run, to see that it works")
    parser.add_argument(
        "--rounds",
        type=int,
        help="instead of the default number; the order is balanced over multiples of 6",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (%(default)s)")
    parser.add_argument(
        "--attention-backend", default="radix_rope_cpu", help="of all servers (%(default)s)"
    )
    parser.add_argument("--strict", action="store_true", help="fail when a target is missed")
    parser.add_argument(
        "--write-docs", type=Path, help="put the table into this file, e.g. docs/overhead.md"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
