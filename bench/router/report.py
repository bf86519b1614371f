"""Table, JSON and chart of the router benchmark. Formats results and decides nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from textwrap import fill

from bench.pages import markdown_table, setting_text
from bench.router.measure import Cell

_COLOURS = ("#d9dde2", "#bcc3cb", "#9aa5b1", "#e0a458", "#76818d", "#7fb3d9", "#1f77b4", "#0b3c5d")


@dataclass(frozen=True, slots=True)
class Results:
    """Every cell, the agreement of keys, and what it was measured on.

    Attributes:
        agreement: (share of the prompt that is common, expected, measured), each 0 to 1.
    """

    cells: list[Cell]
    agreement: list[tuple[float, float, float]]
    setting: dict[str, object]


def as_json(results: Results) -> str:
    """Everything measured, indented."""
    return json.dumps(asdict(results), indent=2)


def as_markdown(results: Results, chart: str) -> str:
    """The generated part of a page. chart: the chart's address as seen from the page."""
    return "\n\n".join(
        (
            setting_text(results.setting),
            _table(results.cells),
            f"![Computed share by policy]({chart})",
            "How often two prompts of 1,000 tokens get the same `routing_key`:",
            markdown_table(
                [
                    ("shared", "expected", "measured"),
                    *(tuple(f"{100 * part:.0f}%" for part in row) for row in results.agreement),
                ],
                left=(),
            ),
        )
    )


def _table(cells: list[Cell]) -> str:
    rows: list[tuple[str, ...]] = [
        ("workload", "policy", "exact", "shifted", "computed", "busiest worker")
    ]
    for cell in cells:
        rows.append(
            (
                cell.workload,
                cell.policy,
                _mean([run.exact_tokens / run.prompt_tokens for run in cell.runs]),
                _mean([run.shifted_tokens / run.prompt_tokens for run in cell.runs]),
                _range([run.computed for run in cell.runs]),
                _range([run.busiest for run in cell.runs]),
            )
        )
    return markdown_table(_by_workload(rows), left=(0, 1))


def _by_workload(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Header first, then workload by workload in the order of their first appearance."""
    order = list(dict.fromkeys(row[0] for row in rows))
    return sorted(rows, key=lambda row: order.index(row[0]))


def draw(results: Results, path: Path) -> None:
    """Write the chart as PNG: the computed share, by workload and policy, with its range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    workloads = list(dict.fromkeys(cell.workload for cell in results.cells))
    policies = list(dict.fromkeys(cell.policy for cell in results.cells))
    figure, axis = pyplot.subplots(figsize=(11, 4.8), layout="constrained")
    width = 0.8 / len(policies)
    for number, policy in enumerate(policies):
        cells = [cell for cell in results.cells if cell.policy == policy]
        means = [100 * fmean(run.computed for run in cell.runs) for cell in cells]
        low = [100 * min(run.computed for run in cell.runs) for cell in cells]
        high = [100 * max(run.computed for run in cell.runs) for cell in cells]
        axis.bar(
            [place + (number - len(policies) / 2 + 0.5) * width for place in range(len(cells))],
            means,
            width=0.92 * width,
            label=policy,
            color=_COLOURS[number % len(_COLOURS)],
            yerr=[
                [mean - one for mean, one in zip(means, low, strict=True)],
                [one - mean for mean, one in zip(means, high, strict=True)],
            ],
            error_kw={"elinewidth": 1, "capsize": 2},
        )
    axis.set_xticks(range(len(workloads)), [fill(workload, 26) for workload in workloads])
    axis.set_ylabel("computed, % of all prompt tokens (mean, range)")
    figure.legend(frameon=False, ncols=4, loc="outside upper center")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _mean(shares: list[float]) -> str:
    return f"{100 * fmean(shares):.1f}%"


def _range(shares: list[float]) -> str:
    low, high = min(shares), max(shares)
    text = _mean(shares)
    return text if high - low < 5e-4 else f"{text} ({100 * low:.1f}-{100 * high:.1f})"
