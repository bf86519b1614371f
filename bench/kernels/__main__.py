"""Measures, prints, and writes JSON and documentation where asked.

    python -m bench.kernels                      # CPU: our kernel, torch copy, three-step torch
    python -m bench.kernels --device cuda        # GPU: Triton, FlashInfer, device-to-device copy
    python -m bench.kernels --errors             # only the error after 1, 2, 4, 8 moves

Needs torch alone, and on a GPU Triton.
"""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.kernels import report
from bench.kernels.cases import SHAPES, Result, fitting, run_case
from bench.pages import setting_text
from radix_rope.quality.machine import processor, versions
from radix_rope.rotary.dtypes import CACHE_DTYPES
from radix_rope.rotary.roundings import error_after

MOVES = (1, 2, 4, 8)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    options = _parser().parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing was measured")
        return
    if not options.errors:
        results, setting = measure(options)
        if options.json:
            report.write_json(options.json, setting, results)
        if options.write_docs:
            report.write_docs(options.write_docs, options.device, setting, results)
    if options.errors or options.device == "cpu":
        table = report.errors_markdown(_errors(), MOVES)
        print("\nrms error of an element over the rms of the keys\n" + table)
        if options.write_docs:
            report.write_errors(options.write_docs, table)


def measure(options: argparse.Namespace) -> tuple[list[Result], dict[str, object]]:
    """All cases that the options name, printed as they come."""
    device = torch.device(options.device)
    setting = _setting(device, options.rounds, options.max_gib)
    print(setting_text(setting))
    print("ratio: time of the faster plain copy over own time, median (lowest to highest round)")
    results: list[Result] = []
    for shape in (shape for shape in SHAPES if shape.name in options.shapes):
        for dtype in (getattr(torch, name) for name in options.dtypes):
            for tokens in options.tokens:
                case = fitting(shape, dtype, tokens, options.max_gib)
                print(f"{case.name}, {case.layers} layers, {dtype}, {tokens} tokens")
                for result in run_case(case, dtype, tokens, device, options.rounds):
                    results.append(result)
                    print(report.as_line(result), flush=True)
    print("\n".join(report.verdicts(results)))
    return results, setting


def _errors() -> list[tuple[str, str, list[float]]]:
    rows = []
    for dtype in CACHE_DTYPES:
        for copies in (False, True):
            errors = [error_after(dtype, moves, copies).rms for moves in MOVES]
            origin = "the last copy" if copies else "the original"
            rows.append((str(dtype).removeprefix("torch."), origin, errors))
    return rows


def _setting(device: torch.device, rounds: int, max_gib: float) -> dict[str, object]:
    where = torch.cuda.get_device_name() if device.type == "cuda" else processor()
    return {
        "date": datetime.date.today().isoformat(),
        "device": where,
        "cores": len(os.sched_getaffinity(0)),
        "torch threads": torch.get_num_threads(),
        **versions("torch", "numba", "triton"),
        "rounds": rounds,
        "largest pool": f"{max_gib:g} GiB",
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 256, 2048, 16384, 32768])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--shapes", nargs="+", default=[shape.name for shape in SHAPES])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--max-gib", type=float, default=1.0, help="size of the pool")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    parser.add_argument(
        "--write-docs", type=Path, metavar="PAGE", help="also write the tables into this page"
    )
    parser.add_argument("--errors", action="store_true", help="the error table only")
    return parser


if __name__ == "__main__":
    main()
