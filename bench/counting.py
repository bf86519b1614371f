"""What benchmarks that count tokens have in common: their options, and the model they take.

Counts do not depend on weights, so a few layers with random ones do.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from radix_rope.models.catalog import DEFAULT_MODEL


def counting_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with `--output`, `--layers` and `--write-docs`."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument(
        "--output", type=Path, default=Path("bench/results"), help="folder (%(default)s)"
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=2,
        metavar="N",
        help="only N layers with random weights; 0 takes the whole model, to the same counts "
        "(%(default)s)",
    )
    parser.add_argument(
        "--write-docs", type=Path, metavar="PAGE", help="also write tables and chart into this page"
    )
    return parser


def model_text(layers: int) -> str:
    """What `--layers` made of the model."""
    what = f"{layers} layers, random weights" if layers else "whole"
    return f"{DEFAULT_MODEL} float32 ({what})"
