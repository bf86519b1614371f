"""`python -m bench.serving`: shifted and unshifted workloads on several servers, side by side.

Owns the command line, the servers' life and the files that are written.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import requests
from torch import accelerator
from tqdm import tqdm

from bench.pages import around_generated, setting_text, write_incomplete, write_results
from bench.servers import (
    OUR_CACHE,
    STOCK_CACHE,
    Server,
    ServerError,
    sglang_server,
    stopped_at_exit,
)
from bench.serving.chart import draw
from bench.serving.client import Client, RequestError
from bench.serving.measure import Measurement
from bench.serving.presets import PRESETS, CellPlan, Preset
from bench.serving.records import BASELINE, EXACT_ONLY, OURS, Cell, Load
from bench.serving.report import as_json, as_markdown, as_records, write_docs, writer
from bench.serving.results import checks
from bench.serving.workloads import WORKLOADS
from bench.serving.writer import Vocabulary
from radix_rope.config import RadixRopeConfig, parse_config
from radix_rope.models.catalog import DEFAULT_MODEL
from radix_rope.models.errors import FetchError
from radix_rope.models.fetch import fetch_model
from radix_rope.quality.machine import describe_machine

_SPARE_TOKENS = 1024
_FAILURES = (FetchError, ServerError, RequestError, ValueError, requests.RequestException)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 when a server broke, or a promise with `--strict`."""
    options = _parse(arguments)
    begin = time.monotonic()
    cells, loads = list[Cell](), list[Load]()
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        if options.write_docs:
            around_generated(options.write_docs, writer(options.preset))
        setting = _run(options, cells, loads)
    except _FAILURES as error:
        cell_records, load_records = as_records(cells, loads)
        measured = {"cells": cell_records, "loads": load_records}
        write_incomplete(options.output / options.name, error, measured)
        return 1
    setting["minutes"] = round((time.monotonic() - begin) / 60, 1)
    _write(options, cells, loads, setting)
    return int(options.strict and not all(check.passed for check in checks(cells, loads)))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description=main.__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="short", help="(%(default)s)")
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, metavar="KEY", help=", ".join(WORKLOADS)
    )
    parser.add_argument("--requests", type=int, help="shifted requests a cell and server")
    parser.add_argument("--no-load", action="store_true", help="leave out the load phase")
    parser.add_argument("--seed", type=int, default=1, help="of all content (%(default)s)")
    parser.add_argument(
        "--model-path", help="folder of a model (default: the demo's model, fetched on first use)"
    )
    parser.add_argument(
        "--server-args", default="", help="more options for every server that is started"
    )
    parser.add_argument(
        "--radix-rope-config", default="{}", metavar="JSON", help="options of radix_rope"
    )
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="NAME=OPTIONS",
        help="also start this SGLang, for example 'torch_native=--attention-backend torch_native'",
    )
    parser.add_argument(
        "--url",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="also measure this running OpenAI-compatible server of the same model; its cache is "
        "not emptied, so use another --seed each time",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("bench/results"), help="folder (%(default)s)"
    )
    parser.add_argument("--name", help="of the result files (default: serving-PRESET)")
    parser.add_argument(
        "--logs", type=Path, default=Path("out/serving"), help="folder of logs (%(default)s)"
    )
    parser.add_argument(
        "--write-docs", type=Path, metavar="PAGE", help="also write the results into this page"
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 when a promise is broken"
    )
    options = parser.parse_args(arguments)
    names = {BASELINE, EXACT_ONLY, OURS}
    for given in (*options.server, *options.url):
        name, equals, _ = given.partition("=")
        if not (name and equals):
            parser.error(f"{given!r}: give a name, '=' and what it stands for")
        if name in names:
            parser.error(f"{given!r}: there is a server named {name} already; give another name")
        names.add(name)
    options.name = options.name or f"serving-{options.preset}"
    options.config = parse_config(options.radix_rope_config)
    return options


def _run(options: argparse.Namespace, cells: list[Cell], loads: list[Load]) -> dict[str, object]:
    """Measure into `cells` and `loads`; returns the setting."""
    from transformers import AutoTokenizer

    model = options.model_path or str(fetch_model(DEFAULT_MODEL, None, "float32"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    preset = _preset(options)
    with tqdm(bar_format="{n_fmt}/{total_fmt} {bar} [{elapsed}]{postfix}", mininterval=0) as bar:

        def progress(done: str) -> None:
            bar.set_postfix_str(done, refresh=False)
            bar.update()

        measurement = Measurement(
            preset, _vocabulary(tokenizer), options.config, options.seed, progress
        )
        started = _servers(options)
        bar.reset(measurement.steps(len(started) + len(options.url)))
        bar.set_postfix_str("starting servers")
        common = _common_options(options, measurement.cache_tokens + _SPARE_TOKENS)
        load_before = os.getloadavg()[0]
        with stopped_at_exit() as running:
            clients = _start(running, started, model, common, options.logs, tokenizer)
            clients += _running(options.url, tokenizer)
            backends = {client.attention_backend() for client in clients} - {None}
            measurement.warm_up(clients)
            measurement.one_by_one(clients, cells)
            measurement.under_load(clients, loads)
    setting: dict[str, object] = {
        "date": date.today().isoformat(),
        "model": Path(model).name,
        "preset": options.preset,
        "seed": options.seed,
        "options of radix_rope": _changed(options.config),
        "options of every server": shlex.join(common),
        "attention backend": ", ".join(sorted(map(str, backends))),
        "servers": ", ".join(
            [
                *(shlex.join([name, *own]) for name, own in started.items()),
                *(given.replace("=", " ", 1) for given in options.url),
            ]
        ),
        **describe_machine(),
        "load average before the start": round(load_before, 2),
    }
    return setting


def _preset(options: argparse.Namespace) -> Preset:
    preset = PRESETS[options.preset]
    keep = options.workloads or list(WORKLOADS)
    if not any(plan.workload in keep for plan in preset.cells):
        measured = ", ".join(dict.fromkeys(plan.workload for plan in preset.cells))
        raise ValueError(
            f"preset {options.preset} has none of {', '.join(keep)}; it measures {measured}"
        )
    return dataclasses.replace(
        preset,
        cells=tuple(
            _with_requests(plan, options.requests) for plan in preset.cells if plan.workload in keep
        ),
        loads=tuple(p for p in preset.loads if p.workload in keep and not options.no_load),
    )


def _with_requests(plan: CellPlan, requests: int | None) -> CellPlan:
    if requests is None:
        return plan
    radix_cache = requests if plan.radix_cache_requests else 0
    return dataclasses.replace(
        plan, requests=requests, stock_requests=requests, radix_cache_requests=radix_cache
    )


def _vocabulary(tokenizer: Any) -> Vocabulary:
    special = set(tokenizer.all_special_ids)
    ids = sorted(token for token in tokenizer.get_vocab().values() if token not in special)
    return Vocabulary(ids, lambda text: tokenizer.encode(text, add_special_tokens=False))


def _servers(options: argparse.Namespace) -> dict[str, list[str]]:
    """Names and options of the servers to start."""
    servers = {
        BASELINE: [],
        EXACT_ONLY: ["--radix-cache-impl", STOCK_CACHE],
        OURS: [
            "--radix-cache-impl",
            OUR_CACHE,
            "--radix-rope-config",
            options.radix_rope_config,
        ],
    }
    for given in options.server:
        name, _, rest = given.partition("=")
        servers[name] = shlex.split(rest)
    return servers


def _common_options(options: argparse.Namespace, cache_tokens: int) -> list[str]:
    # A pool of this size and no larger: the servers share one machine's memory.
    common = [
        "--enable-cache-report",
        "--random-seed",
        "1",
        "--max-total-tokens",
        str(cache_tokens),
    ]
    if not accelerator.is_available():
        # Every prompt in one chunk, also the last turn of a session.
        common += ["--dtype", "float32", "--disable-cuda-graph", "--chunked-prefill-size", "8192"]
        # The pool is limited above; a small fraction fails where others use the memory too.
        common += ["--mem-fraction-static", "0.9"]
    return [*common, *shlex.split(options.server_args)]


def _start(
    running: list[Server],
    servers: dict[str, list[str]],
    model: str,
    common: list[str],
    logs: Path,
    tokenizer: Any,
) -> list[Client]:
    logs.mkdir(parents=True, exist_ok=True)
    for name, own in servers.items():
        server = sglang_server(name, model, [*common, *own], logs / f"{name}.log")
        running.append(server)
        # One after the other: SGLang measures the memory that is free before and after it loads.
        server.wait_until_ready()
    return [Client(s.name, s.url, "sglang", "default", tokenizer) for s in running]


def _running(urls: Sequence[str], tokenizer: Any) -> list[Client]:
    clients = []
    for given in urls:
        name, _, url = given.partition("=")
        url = url.rstrip("/").removesuffix("/v1")
        listed = requests.get(f"{url}/v1/models", timeout=30)
        listed.raise_for_status()
        model = listed.json()["data"][0]["id"]
        clients.append(Client(name, url, "openai", model, tokenizer))
    return clients


def _changed(config: RadixRopeConfig) -> str:
    """The options that decide what is computed again, and those that are not at their default."""
    default = RadixRopeConfig()
    listed = ("min_run_tokens", "recompute_tokens", "repair")
    values = dataclasses.asdict(config)
    return " ".join(
        f"{name}={value}"
        for name, value in values.items()
        if name in listed or value != getattr(default, name)
    )


def _write(
    options: argparse.Namespace,
    cells: list[Cell],
    loads: list[Load],
    setting: dict[str, object],
) -> None:
    markdown = as_markdown(cells, loads, setting)
    base = options.output / options.name
    chart = write_results(
        base,
        as_json(cells, loads, setting),
        markdown,
        partial(draw, cells, loads, setting_text(setting)),
    )
    if options.write_docs:
        write_docs(options.write_docs, options.preset, markdown, chart)
    print(f"\n{markdown}\n\nWritten: {base}.json, .md, .png")


if __name__ == "__main__":
    sys.exit(main())
