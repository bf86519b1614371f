"""`python -m bench.hit_rate`: the append-only law and its collapses, stock SGLang and radix_rope.

Owns the order of the runs and the files that are written. Everything is a count of tokens, so it
does not matter what else the machine does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

from tqdm import tqdm

from bench.counting import counting_parser, model_text
from bench.hit_rate.law import Prices
from bench.hit_rate.measure import measure_cases, measure_law
from bench.hit_rate.report import Results, Side, as_json, as_markdown, draw
from bench.hit_rate.verdict import verdicts
from bench.hit_rate.workloads import Shape, cases
from bench.pages import (
    around_generated,
    verdict_text,
    write_generated,
    write_incomplete,
    write_results,
)
from bench.servers import OUR_CACHE, STOCK_CACHE, ServerError, stopped_at_exit
from bench.workers import worker
from radix_rope.models.catalog import DEFAULT_MODEL
from radix_rope.models.errors import FetchError
from radix_rope.models.fetch import fetch_model
from radix_rope.quality.machine import describe_machine

LAWS = [(10, 64, 1), (20, 64, 1), (40, 64, 1), (10, 64, 16)]
"""Turns, increment and answer of the append-only sessions; the last shows what answers add."""

SEED = 7
POOL_TOKENS = 20_000
_NAME = "hit_rate"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; the exit code is 1 when a server broke or a promise did."""
    options = _parse(arguments)
    stock, ours = Side([], []), Side([], [])
    base = options.output / _NAME
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        if options.write_docs:
            around_generated(options.write_docs, "bench.hit_rate")
        model = fetch_model(DEFAULT_MODEL, None, "float32")
        _measure(model, STOCK_CACHE, options, stock)
        _measure(model, OUR_CACHE, options, ours)
    except (ServerError, FetchError, ValueError, OSError) as error:
        measured = {"stock": asdict(stock), "ours": asdict(ours)} if stock.laws else {}
        write_incomplete(base, error, measured)
        return 1
    setting: dict[str, object] = {
        "model": model_text(options.layers),
        "radix_rope": "default options",
        "seed": SEED,
        **describe_machine(),
    }
    results = Results(stock, ours, options.prices, setting)
    found = verdicts(results)
    text = as_markdown(results, f"{_NAME}.png", [verdict_text(*verdict) for verdict in found])
    chart = write_results(base, as_json(results), text, partial(draw, results))
    if options.write_docs:
        write_generated(options.write_docs, "bench.hit_rate", text, chart)
    print(text)
    return int(not all(passed for passed, _ in found))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = counting_parser("bench.hit_rate", main.__doc__)
    for price in fields(Prices):
        parser.add_argument(
            f"--price-{price.name}",
            type=float,
            default=price.default,
            help="an example: %(default)s",
        )
    options = parser.parse_args(arguments)
    options.prices = Prices(
        **{price.name: getattr(options, f"price_{price.name}") for price in fields(Prices)}
    )
    return options


def _measure(model: Path, cache: str, options: argparse.Namespace, side: Side) -> None:
    """Everything on one server, added to `side`."""
    title = "radix_rope" if cache == OUR_CACHE else "stock"
    log = options.output / f"{_NAME}_{title}.log"
    made = cases(SEED + 1000, Shape())
    with (
        stopped_at_exit() as running,
        tqdm(total=1 + len(LAWS) + len(made), desc=title, mininterval=0) as bar,
    ):
        server = worker(
            model, title, cache, log, max_total_tokens=POOL_TOKENS, layers=options.layers
        )
        running.append(server)
        server.wait_until_ready()
        bar.update()

        def progress(what: str) -> None:
            bar.set_postfix_str(what, refresh=False)
            bar.update()

        measure_law(server, LAWS, SEED, side.laws, progress)
        measure_cases(server, made, side.cases, progress)


if __name__ == "__main__":
    sys.exit(main())
