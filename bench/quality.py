"""`python -m bench.quality`: writes what `radix-rope check --json` measured into docs/quality.md.

Formats results that are there; measures nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.pages import write_generated
from radix_rope.quality import records
from radix_rope.quality.chart import draw
from radix_rope.quality.command import subtitle
from radix_rope.quality.report import as_markdown, verdict_text
from radix_rope.quality.verdict import Limits, judge


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the generated part of the page, and the chart beside it."""
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=main.__doc__)
    parser.add_argument("json", type=Path, help="what `radix-rope check --json` wrote")
    parser.add_argument(
        "--write-docs",
        type=Path,
        default=Path("docs/quality.md"),
        metavar="PAGE",
        help="the page that is written (%(default)s)",
    )
    options = parser.parse_args(arguments)
    measurement = records.read(options.json.read_text(encoding="utf-8"))
    chart = options.write_docs.with_suffix(".png")
    draw(measurement, Limits(), subtitle(measurement), chart)
    verdict = judge(measurement, Limits())
    generated = "\n\n".join(
        (
            f"{subtitle(measurement)}.",
            f"![Error against computed share]({chart.name})",
            as_markdown(measurement, Limits()),
            f"```\n{verdict_text(verdict)}\n```",
        )
    )
    write_generated(options.write_docs, "bench.quality", generated)
    return 0


if __name__ == "__main__":
    sys.exit(main())
