"""`python -m bench.demo`: stock SGLang and radix_rope on the same prompts, one table.

Owns the order of the engine runs and the files that are written.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import accelerator

from bench.demo.calibration import Calibration, typical
from bench.demo.chart import draw
from bench.demo.process import EngineRunError, run_job
from bench.demo.prompts import MOVED, PromptBuilder
from bench.demo.records import EngineRun, Job, QuestionKey
from bench.demo.report import as_json, as_text, thresholds_text, write_docs
from bench.demo.results import Results, summarise
from bench.pages import setting_text
from radix_rope.models.catalog import DEFAULT_MODEL
from radix_rope.models.errors import FetchError
from radix_rope.models.fetch import fetch_model
from radix_rope.quality.machine import describe_machine
from radix_rope.quality.texts import fact_sheets

_NO_ROTATION = '{"rotate": false}'
_CPU_BACKENDS = ("torch_native", "radix_rope_cpu")
_CALIBRATIONS = 3
_UNBEATABLE = Calibration(0.0, 0.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; the exit code is 1 when an engine broke, or a promise did with `--strict`."""
    options = _parse(arguments)
    begin = time.monotonic()
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        results, setting = _run(options)
    except (EngineRunError, FetchError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    minutes = (time.monotonic() - begin) / 60
    _write(options, results, setting)
    print(f"\n{as_text(results)}\n\n{thresholds_text(results)}\n\n{setting_text(setting)}")
    print(f"\nResults, chart and logs are in {options.output} ({minutes:.1f} minutes).")
    return int(options.strict and not all(check.passed for check in results.thresholds))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=main.__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("out/demo"), help="folder for results (%(default)s)"
    )
    parser.add_argument(
        "--repetitions", type=int, default=5, help="timed requests a scenario (%(default)s)"
    )
    parser.add_argument(
        "--questions", type=int, default=12, help="questions a fact sheet (%(default)s)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="3 questions a fact sheet and 2 repetitions"
    )
    parser.add_argument(
        "--stock-backend",
        choices=("auto", *_CPU_BACKENDS),
        default="auto",
        help="attention backend of stock SGLang; auto takes the faster (%(default)s)",
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 when a promise is not kept"
    )
    parser.add_argument(
        "--write-docs", type=Path, metavar="PAGE", help="also write table and chart into this page"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.repetitions, options.questions = 2, 3
    sheets = fact_sheets()
    most = min(len(sheet.questions) for sheet in sheets)
    if not 1 <= options.questions <= most:
        parser.error(f"--questions {options.questions}: choose from 1 to {most}")
    if options.repetitions < len(sheets):
        parser.error(
            f"--repetitions {options.repetitions}: at least {len(sheets)}, one a fact sheet"
        )
    return options


def _run(options: argparse.Namespace) -> tuple[Results, dict[str, object]]:
    model = fetch_model(DEFAULT_MODEL, None, "float32")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    builder = PromptBuilder(lambda text: tokenizer.encode(text, add_special_tokens=False))
    sheets = fact_sheets()
    job = Job(
        engine_options={
            "model_path": str(model),
            "dtype": "float32",
            "max_total_tokens": 16_000,
            "disable_cuda_graph": True,
            "log_level": "warning",
        },
        config="",
        sheets={
            sheet.name: (
                builder.scenarios(sheet),
                tuple(builder.ask(q) for q in sheet.questions[: options.questions]),
            )
            for sheet in sheets
        },
        repetitions=options.repetitions,
    )
    print(
        f"Measuring {len(job.sheets)} fact sheets, {options.questions} questions each, "
        f"{options.repetitions} timed requests a scenario; one engine at a time."
    )
    stock, backend = _run_stock(job, options)
    support = {answer.key: answer.token_ids for answer in stock.answers}
    ours = run_job("radix_rope", _with_cache(job, "{}", support), options.output / "radix_rope.log")
    unrotated = run_job(
        "radix_rope, rotation off",
        _only_moved(_with_cache(job, _NO_ROTATION, support)),
        options.output / "radix_rope_rotation_off.log",
    )
    setting: dict[str, object] = {
        "model": f"{DEFAULT_MODEL} float32",
        "attention backend of stock": backend,
        "repetitions": options.repetitions,
        "questions": options.questions * len(sheets),
        **describe_machine(),
    }
    return summarise(stock, ours, unrotated, sheets), setting


def _run_stock(job: Job, options: argparse.Namespace) -> tuple[EngineRun, str]:
    """Stock SGLang on its faster attention backend, and which that is."""

    def run(backend: str | None, **changes: Any) -> EngineRun:
        return run_job(
            f"stock SGLang, {backend or 'default backend'}",
            dataclasses.replace(
                job, engine_options={**job.engine_options, "attention_backend": backend}, **changes
            ),
            options.output / f"stock_{backend or 'default'}.log",
        )

    if accelerator.is_available():
        return run(None), "SGLang's default"
    if options.stock_backend != "auto":
        return run(options.stock_backend), f"{options.stock_backend} (chosen by the user)"
    first, second = _CPU_BACKENDS
    calibrated = run(first, repetitions=0, calibrations=_CALIBRATIONS, rival=_UNBEATABLE)
    first_speed = typical(calibrated.calibrations)
    result = run(second, calibrations=_CALIBRATIONS, rival=first_speed)
    second_speed = typical(result.calibrations)
    if result.timings:
        return result, f"{second} ({second_speed}; {first} {first_speed})"
    return run(first), f"{first} ({first_speed}; {second} {second_speed})"


def _with_cache(job: Job, config: str, support: dict[QuestionKey, list[list[int]]]) -> Job:
    return dataclasses.replace(
        job,
        engine_options={**job.engine_options, "radix_cache_backend": "radix_rope"},
        config=config,
        support=support,
    )


def _only_moved(job: Job) -> Job:
    """Answers alone, in the scenarios where rotation matters."""
    sheets = {
        name: (tuple(s for s in scenarios if s.key in MOVED), questions)
        for name, (scenarios, questions) in job.sheets.items()
    }
    return dataclasses.replace(job, sheets=sheets, repetitions=0)


def _write(options: argparse.Namespace, results: Results, setting: dict[str, object]) -> None:
    (options.output / "results.json").write_text(as_json(results, setting), encoding="utf-8")
    (options.output / "table.txt").write_text(as_text(results) + "\n", encoding="utf-8")
    chart = options.output / "demo.png"
    draw(results, setting_text(setting), chart)
    if options.write_docs:
        write_docs(options.write_docs, results, setting, chart)


if __name__ == "__main__":
    sys.exit(main())
