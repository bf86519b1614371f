"""`python -m bench.quality`: writes what `radix-rope check --json` measured into docs/quality.md.

Formats results that are there; measures nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from radix_rope.quality import records
from radix_rope.quality.chart import draw
from radix_rope.quality.command import subtitle
from radix_rope.quality.report import as_markdown, verdict_text
from radix_rope.quality.verdict import Limits, judge

BEGIN_MARK = "<!-- written by python -m bench.quality: begin -->"
END_MARK = "<!-- written by python -m bench.quality: end -->"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the generated part of the page, and the chart beside it."""
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=main.__doc__)
    parser.add_argument("json", type=Path, help="what `radix-rope check --json` wrote")
    parser.add_argument("--page", type=Path, default=Path("docs/quality.md"))
    options = parser.parse_args(arguments)
    measurement = records.read(options.json.read_text(encoding="utf-8"))
    text = options.page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN_MARK)
    _, end, after = rest.partition(END_MARK)
    if not begin or not end:
        parser.error(f"{options.page} must contain the lines {BEGIN_MARK!r} and {END_MARK!r}")
    chart = options.page.with_suffix(".png")
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
    options.page.write_text(f"{before}{BEGIN_MARK}\n\n{generated}\n\n{END_MARK}{after}", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
