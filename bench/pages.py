"""What all benchmarks write: result files, generated parts of pages, tables, verdicts.

Formats, and decides nothing.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def markdown_table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """A table whose first row is the header; columns not in `left` are aligned right."""
    header, *lines = rows
    rule = tuple(":--" if column in left else "--:" for column in range(len(header)))
    cells = [[cell.replace("|", "\\|") for cell in line] for line in (header, rule, *lines)]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def setting_text(setting: Mapping[str, object]) -> str:
    """What was run and where, one line."""
    return ", ".join(f"{name}: {value}" for name, value in setting.items())


def verdict_text(passed: bool, promise: str) -> str:
    """One line that says whether a promise was kept."""
    return f"{'pass' if passed else 'MISS'}  {promise}"


def write_results(
    base: Path, json_text: str, markdown: str, draw: Callable[[Path], None] | None = None
) -> Path:
    """Write `base`.json, `base`.md and, with `draw`, `base`.png; returns the chart's path."""
    base.parent.mkdir(parents=True, exist_ok=True)
    chart = base.with_suffix(".png")
    base.with_suffix(".incomplete.json").unlink(missing_ok=True)
    base.with_suffix(".json").write_text(json_text + "\n", encoding="utf-8")
    base.with_suffix(".md").write_text(markdown + "\n", encoding="utf-8")
    if draw is not None:
        draw(chart)
    return chart


def write_incomplete(base: Path, error: Exception, measured: Mapping[str, object]) -> None:
    """Say why a run failed, and keep what it had measured in `base`.incomplete.json.

    Nothing is written when nothing was measured. The results of an earlier, complete run stay.
    """
    print(f"{base.name}: {error}", file=sys.stderr)
    if any(measured.values()):
        path = base.with_suffix(".incomplete.json")
        record = json.dumps({"incomplete": str(error), **measured}, indent=2)
        path.write_text(record + "\n", encoding="utf-8")
        print(f"{base.name}: what was measured before that is in {path}", file=sys.stderr)


def marks(writer: str) -> tuple[str, str]:
    """The lines between which `writer` (a module name) puts what it generates."""
    line = f"<!-- written by python -m {writer} --write-docs: "
    return f"{line}begin -->", f"{line}end -->"


def write_generated(page: Path, writer: str, text: str, chart: Path | None = None) -> None:
    """Replace what `writer` generated on a page before; the chart is copied beside the page.

    Raises:
        ValueError: the page has no part of this writer.
    """
    begin, end = marks(writer)
    before, after = around_generated(page, writer)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")
    if chart is not None and chart.resolve() != page.with_name(chart.name).resolve():
        shutil.copyfile(chart, page.with_name(chart.name))


def around_generated(page: Path, writer: str) -> tuple[str, str]:
    """What stands before and after the part of `writer`; ask before a long run for nothing.

    Raises:
        ValueError: the page has no part of this writer.
    """
    begin_mark, end_mark = marks(writer)
    content = page.read_text(encoding="utf-8")
    before, begin, rest = content.partition(begin_mark)
    _, end, after = rest.partition(end_mark)
    if not begin or not end:
        raise ValueError(
            f"{page} has no part to write the results into; it must contain the lines "
            f"{begin_mark!r} and {end_mark!r}"
        )
    return before, after
