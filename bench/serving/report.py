"""The Markdown tables, the JSON and the section of the documentation page.

Formats results and decides nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.pages import markdown_table, setting_text, verdict_text, write_generated
from bench.serving.records import BASELINE, OURS, Cell, Load
from bench.serving.results import (
    Check,
    Shares,
    Spread,
    checks,
    limit_ratio,
    load_metric,
    load_ratio,
    prompt_tokens,
    shares,
    speed_up,
    ttft,
    unshifted_ratio,
)

Setting = Mapping[str, object]


def as_markdown(cells: Sequence[Cell], loads: Sequence[Load], setting: Setting) -> str:
    """Setting, tables and promises."""
    parts = [setting_text(setting)]
    if cells:
        parts.append(_cell_table(cells))
    if loads:
        parts.append(_load_table(loads))
    parts.append(f"```\n{checks_text(checks(cells, loads))}\n```")
    return "\n\n".join(parts)


def checks_text(found: Sequence[Check]) -> str:
    """One line per promise."""
    return "\n".join(
        verdict_text(check.passed, f"{check.promise}: {check.measured}") for check in found
    )


def as_json(cells: Sequence[Cell], loads: Sequence[Load], setting: Setting) -> str:
    """Everything measured, indented. An infinite rate is written as the text `inf`."""
    cell_records, load_records = as_records(cells, loads)
    return json.dumps(
        {
            "setting": dict(setting),
            "checks": [dataclasses.asdict(check) for check in checks(cells, loads)],
            "cells": cell_records,
            "loads": load_records,
        },
        indent=1,
    )


def as_records(cells: Sequence[Cell], loads: Sequence[Load]) -> tuple[list[Any], list[Any]]:
    """Cells and loads as JSON takes them."""
    return (
        [dataclasses.asdict(cell) for cell in cells],
        [{**dataclasses.asdict(load), "rate": f"{load.rate:g}"} for load in loads],
    )


def writer(preset: str) -> str:
    """Under which name a preset's results stand on a page."""
    return f"bench.serving --preset {preset}"


def write_docs(page: Path, preset: str, markdown: str, chart: Path) -> None:
    """Replace the part of a page that holds the results of `preset`; its chart goes beside it.

    Raises:
        ValueError: the page has no such part.
    """
    picture = f"![Time to first token, hit shares, requests per second]({chart.name})"
    write_generated(page, writer(preset), f"{markdown}\n\n{picture}", chart)


def _cell_table(cells: Sequence[Cell]) -> str:
    extra = [
        name
        for name in dict.fromkeys(s.server for cell in cells for s in cell.samples)
        if name not in (BASELINE, OURS)
    ]
    header = [
        "workload",
        "prompt",
        "reusable",
        "exact / shifted / computed",
        "stock exact",
        *(f"TTFT {name}, ms" for name in (BASELINE, *extra, OURS)),
        "ratio",
        "unshifted",
        "of limit",
    ]
    rows = []
    for cell in cells:
        stock = shares(cell, BASELINE)
        rows.append(
            [
                cell.title,
                f"{prompt_tokens(cell):,}",
                f"{cell.reusable_percent:g}%",
                _shares(shares(cell, OURS)),
                "" if stock is None else f"{stock.exact_tokens:,.0f}",
                *(_ms(ttft(cell, name, shifted=True)) for name in (BASELINE, *extra, OURS)),
                _ratio(speed_up(cell), 1),
                _ratio(unshifted_ratio([cell]), 2),
                _ratio(limit_ratio([cell]), 2),
            ]
        )
    return markdown_table([header, *rows])


def _load_table(loads: Sequence[Load]) -> str:
    header = [
        "workload under load",
        "requests/s offered",
        "server",
        "requests/s served",
        "TTFT median, ms",
        "p90",
        "p99",
        "ratio of requests/s",
    ]
    rows = []
    # One line for all bursts of a server at a rate, in the order in which they were first sent.
    for load in (load for load in loads if not load.burst):
        of = partial(load_metric, loads, load.workload, load.rate, load.server)
        rows.append(
            [
                load.title,
                f"{load.rate:g}",
                load.server,
                _ratio(of("request_throughput"), 2),
                *(_ms(of(f"{at}_ttft_ms")) for at in ("median", "p90", "p99")),
                _ratio(load_ratio(loads, load.workload, load.rate), 1)
                if load.server == OURS
                else "",
            ]
        )
    return markdown_table([header, *rows], left=(0, 2))


def _shares(found: Shares | None) -> str:
    if found is None:
        return ""
    values = (found.exact_tokens, found.shifted_tokens, found.computed_tokens)
    return " / ".join(f"{value:,.0f}" for value in values)


def _ms(found: Spread | None) -> str:
    if found is None:
        return ""
    return f"{found.median:,.0f} ({found.low:,.0f}-{found.high:,.0f})"


def _ratio(found: Spread | None, digits: int) -> str:
    if found is None:
        return ""
    return f"{found.median:.{digits}f} ({found.low:.{digits}f}-{found.high:.{digits}f})"
