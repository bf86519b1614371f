"""`python -m bench.router`: SGLang's router in front of two workers, policy by policy.

Owns the order of the runs and the files that are written. Everything is a count of tokens, so it
does not matter what else the machine does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version

import numpy as np
from tqdm import tqdm

from bench.counting import counting_parser, model_text
from bench.hit_rate.workloads import fresh_tokens
from bench.pages import around_generated, write_generated, write_incomplete, write_results
from bench.router.measure import POLICIES, Cell, measure
from bench.router.report import Results, as_json, as_markdown, draw
from bench.router.workloads import Size, workloads
from bench.servers import OUR_CACHE, ServerError, stopped_at_exit
from bench.workers import worker
from radix_rope.models.catalog import DEFAULT_MODEL
from radix_rope.models.errors import FetchError
from radix_rope.models.fetch import fetch_model
from radix_rope.quality.machine import describe_machine
from radix_rope.routing import WINDOW_TOKENS, routing_key

SEED = 11
POOL_TOKENS = 30_000
SHARES = (0.25, 0.5, 0.75, 0.9, 0.97)
PAIRS = 1000
PAIR_TOKENS = 1000

_NAME = "router"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; the exit code is 1 when a server broke."""
    options = _parse(arguments)
    cells: list[Cell] = []
    base = options.output / _NAME
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        if options.write_docs:
            around_generated(options.write_docs, "bench.router")
        _measure(options, cells)
    except (ServerError, FetchError, ValueError, OSError) as error:
        write_incomplete(base, error, {"cells": [asdict(cell) for cell in cells]})
        return 1
    setting: dict[str, object] = {
        "model": model_text(options.layers),
        "workers": "2, radix_rope with default options",
        "sglang-router": version("sglang-router"),
        "runs": options.repetitions,
        "seed": SEED,
        **describe_machine(),
    }
    results = Results(cells, [(share, *_agreement(share)) for share in SHARES], setting)
    text = as_markdown(results, f"{_NAME}.png")
    chart = write_results(base, as_json(results), text, partial(draw, results))
    if options.write_docs:
        write_generated(options.write_docs, "bench.router", text, chart)
    print(text)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = counting_parser("bench.router", main.__doc__)
    parser.add_argument(
        "--repetitions", type=int, default=2, help="workloads from other seeds (%(default)s)"
    )
    return parser.parse_args(arguments)


def _measure(options: argparse.Namespace, cells: list[Cell]) -> None:
    """Every policy with every workload, added to `cells`."""
    model = fetch_model(DEFAULT_MODEL, None, "float32")
    seeds, size = [SEED + number for number in range(options.repetitions)], Size()
    steps = 1 + len(POLICIES) * len(seeds) * len(workloads(SEED, size))
    with stopped_at_exit() as running, tqdm(total=steps, desc="router", mininterval=0) as bar:

        def progress(what: str) -> None:
            bar.set_postfix_str(what, refresh=False)
            bar.update()

        workers = []
        for name in ("worker-0", "worker-1"):
            log = options.output / f"{_NAME}_{name}.log"
            workers.append(
                worker(
                    model,
                    name,
                    OUR_CACHE,
                    log,
                    max_total_tokens=POOL_TOKENS,
                    layers=options.layers,
                )
            )
            running.append(workers[-1])
        for one in workers:
            one.wait_until_ready()
        progress("workers started")
        log = options.output / f"{_NAME}.log"
        measure(workers, seeds, size, POLICIES, log, cells, progress)


def _agreement(share: float) -> tuple[float, float]:
    """How often prompts with this share in common should agree, and do."""
    fresh, generator = fresh_tokens(SEED), np.random.default_rng(SEED)
    shared, same = int(share * PAIR_TOKENS), 0
    for _ in range(PAIRS):
        block, keys = fresh(shared), set()
        for _ in range(2):
            head = int(generator.integers(0, PAIR_TOKENS - shared + 1))
            keys.add(routing_key(fresh(head) + block + fresh(PAIR_TOKENS - shared - head)))
        same += len(keys) == 1
    common, windows = shared - WINDOW_TOKENS + 1, PAIR_TOKENS - WINDOW_TOKENS + 1
    return common / (2 * windows - common), same / PAIRS


if __name__ == "__main__":
    sys.exit(main())
