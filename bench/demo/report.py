"""The table, the JSON and the documentation page of one demo run.

Formats results and decides nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from bench.demo.results import Results, Row
from bench.pages import markdown_table, setting_text, verdict_text, write_generated

WRITER = "bench.demo"

_HEADER = (
    "scenario",
    "prompt",
    "exact",
    "shifted",
    "computed",
    "TTFT stock, ms",
    "TTFT radix_rope, ms",
    "ratio",
    "KL, nats",
    "correct (stock)",
    "answer",
)
_LEFT_ALIGNED = (0, len(_HEADER) - 1)


def table_rows(results: Results) -> list[tuple[str, ...]]:
    """Header, one line per scenario, and the counter-example."""
    return [_HEADER, *map(_table_row, results.rows), _unrotated_row(results.rows)]


def as_text(results: Results) -> str:
    """The table for a terminal."""
    lines = table_rows(results)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        "  ".join(
            cell.ljust(width) if column in _LEFT_ALIGNED else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([padded[0], "-" * max(map(len, padded)), *padded[1:]])


def as_markdown(results: Results) -> str:
    """The table for a page."""
    return markdown_table(table_rows(results), _LEFT_ALIGNED)


def thresholds_text(results: Results) -> str:
    """One line per promise, then the answers that were lost."""
    lines = [
        verdict_text(check.passed, f"{check.promise}: {check.measured}")
        for check in results.thresholds
    ]
    lines += [
        f"lost  {lost.scenario}, {lost.sheet}: {lost.question} {lost.gold!r} expected, "
        f"stock said {lost.stock_answer!r}, radix_rope {lost.our_answer!r}"
        for lost in results.questions
        if lost.lost
    ]
    return "\n".join(lines)


def as_json(results: Results, setting: dict[str, object]) -> str:
    """Everything measured, indented."""
    return json.dumps({"setting": setting, **dataclasses.asdict(results)}, indent=2)


def write_docs(page: Path, results: Results, setting: dict[str, object], chart: Path) -> None:
    """Replace the generated part of a page, and copy the chart beside it.

    Raises:
        ValueError: the page has no generated part.
    """
    generated = "\n\n".join(
        (
            setting_text(setting),
            as_markdown(results),
            f"![Time to first token by scenario]({chart.name})",
            f"```\n{thresholds_text(results)}\n```",
        )
    )
    write_generated(page, WRITER, generated, chart)


def _table_row(row: Row) -> tuple[str, ...]:
    return (
        row.title,
        f"{row.prompt_tokens:,}",
        f"{row.exact_tokens:,}",
        f"{row.shifted_tokens:,}",
        f"{row.computed_tokens:,}",
        _spread(row.stock.median_ms, row.stock.min_ms, row.stock.max_ms),
        _spread(row.ours.median_ms, row.ours.min_ms, row.ours.max_ms),
        f"{row.ratio:.1f}",
        _kl(row.kl_nats),
        f"{row.our_correct} ({row.stock_correct}) of {row.questions}",
        row.our_answer,
    )


def _unrotated_row(rows: Sequence[Row]) -> tuple[str, ...]:
    moved = [row for row in rows if row.unrotated_kl_nats is not None]
    correct = sum(row.unrotated_correct or 0 for row in moved)
    stock_correct = sum(row.stock_correct for row in moved)
    return (
        "ROTATION OFF, where the offset moved",
        *[""] * 7,
        _kl(fmean(row.unrotated_kl_nats or 0.0 for row in moved)),
        f"{correct} ({stock_correct}) of {sum(row.questions for row in moved)}",
        moved[0].unrotated_answer or "",
    )


def _spread(middle: float, low: float, high: float) -> str:
    return f"{middle:,.0f} ({low:,.0f}-{high:,.0f})"


def _kl(value: float) -> str:
    return f"{value:.4f}" if value >= 5e-5 else f"{value:.0e}"
