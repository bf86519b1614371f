"""The chart of one run: time to first token, requests per second against rate, hit shares."""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf
from pathlib import Path
from textwrap import fill
from typing import Any

from bench.serving.records import BASELINE, EXACT_ONLY, OURS, Cell, Load
from bench.serving.results import load_metric, shares, speed_up, ttft

_COLOURS = {BASELINE: "#9aa5b1", EXACT_ONLY: "#5d6b78", OURS: "#1f77b4"}
_OTHERS = ("#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
_SHARES = (("exact", "#3b7d4f"), ("shifted", "#7fc8a9"), ("computed", "#d9a441"))


def draw(cells: Sequence[Cell], loads: Sequence[Load], subtitle: str, path: Path) -> None:
    """Write the chart as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = max(4.0, 0.42 * len(cells) + 2.2)
    figure, axes = pyplot.subplots(
        1, 4, figsize=(20, height), width_ratios=(4, 3, 3, 3), layout="constrained"
    )
    names = list(
        dict.fromkeys(
            [s.server for c in cells for s in c.samples] + [load.server for load in loads]
        )
    )
    others = iter(_OTHERS)
    colours = {name: _COLOURS.get(name) or next(others, "#444444") for name in names}
    _draw_ttft(axes[0], cells, colours)
    _draw_shares(axes[1], cells)
    _draw_load(axes[2], loads, colours, ("request_throughput",))
    axes[2].set_ylabel("requests per second served")
    axes[2].set_ylim(bottom=0)
    _draw_load(axes[3], loads, colours, ("median_ttft_ms", "p90_ttft_ms", "p99_ttft_ms"))
    axes[3].set_ylabel("time to first token under load, ms (median, p90, p99)")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(fill(subtitle, 200), fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _labels(cells: Sequence[Cell]) -> list[str]:
    return [f"{c.title}\n{c.prompt_tokens:,}, {c.reusable_percent:g}%" for c in cells]


def _draw_ttft(axis: Any, cells: Sequence[Cell], colours: dict[str, str]) -> None:
    asked = dict.fromkeys(s.server for cell in cells for s in cell.samples if s.shifted)
    names = sorted(asked, key=lambda name: name == OURS)
    width = 0.8 / max(1, len(names))
    drawn: list[float] = []
    for number, name in enumerate(names):
        at, middle, below, above = [], [], [], []
        for place, cell in enumerate(cells):
            if found := ttft(cell, name, shifted=True):
                at.append(place + (number - (len(names) - 1) / 2) * width)
                middle.append(found.median)
                below.append(found.median - found.low)
                above.append(found.high - found.median)
        axis.barh(
            at,
            middle,
            height=width,
            color=colours[name],
            label=name,
            xerr=[below, above],
            error_kw={"elinewidth": 1, "capsize": 1.5, "ecolor": "#444444"},
        )
        drawn += middle
    for place, cell in enumerate(cells):
        ratio, ours = speed_up(cell), ttft(cell, OURS, shifted=True)
        if ratio and ours:
            axis.annotate(
                f"{ratio.median:.1f}x",
                (ours.high, place + 0.4 - width / 2),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
    axis.set_yticks(range(len(cells)), _labels(cells), fontsize=8)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlabel("time to first token of shifted requests, ms (median, range)")
    if drawn:
        # A logarithmic axis has no zero to begin at; leave room for the shortest bar.
        axis.set_xlim(left=min(drawn) / 2)
        axis.legend(loc="lower right", fontsize=8)


def _draw_load(
    axis: Any, loads: Sequence[Load], colours: dict[str, str], metrics: Sequence[str]
) -> None:
    """Metrics against the offered rate, or side by side where there was one rate only."""
    rates = sorted({load.rate for load in loads})
    workloads = list(dict.fromkeys(load.workload for load in loads))
    by_rate = len(rates) > 1
    labels = [_rate(r) for r in rates] if by_rate else [_title(loads, w) for w in workloads]
    styled = list(zip(workloads, ("-", "--", ":", "-.") * 9, strict=False))
    for name, colour in colours.items():
        for workload, style in styled:
            for metric, marker, alpha in zip(metrics, "o^x", (1.0, 0.7, 0.5), strict=False):
                points = [
                    (rates.index(rate) if by_rate else workloads.index(workload), found.median)
                    for rate in rates
                    if (found := load_metric(loads, workload, rate, name, metric))
                ]
                axis.plot(
                    [place for place, _ in points],
                    [value for _, value in points],
                    style,
                    marker=marker,
                    alpha=alpha,
                    color=colour,
                )
        if any(load.server == name for load in loads):
            axis.plot([], [], "o", color=colour, label=name)
    if by_rate:
        for workload, style in styled:
            axis.plot([], [], style, color="#444444", label=_title(loads, workload))
    axis.set_xticks(range(len(labels)), labels, fontsize=8)
    axis.set_xlim(-0.5, max(0.5, len(labels) - 0.5))
    axis.set_xlabel("requests per second offered" if by_rate else "all requests at once")
    if loads:
        axis.legend(fontsize=7)


def _rate(rate: float) -> str:
    return "all at once" if isinf(rate) else f"{rate:g}"


def _title(loads: Sequence[Load], workload: str) -> str:
    return fill(next(load.title for load in loads if load.workload == workload), 14)


def _draw_shares(axis: Any, cells: Sequence[Cell]) -> None:
    """Prompt tokens by where their KV came from: the baseline above, ours below."""
    for name, offset in ((BASELINE, -0.2), (OURS, 0.2)):
        for place, cell in enumerate(cells):
            found = shares(cell, name)
            if found is None:
                continue
            values = (found.exact_tokens, found.shifted_tokens, found.computed_tokens)
            total, left = sum(values), 0.0
            for value, (_, colour) in zip(values, _SHARES, strict=True):
                part = 100 * value / total
                axis.barh(place + offset, part, left=left, height=0.36, color=colour)
                left += part
    for label, colour in _SHARES:
        axis.barh([0], [0], color=colour, label=label)
    axis.set_yticks(range(len(cells)), [""] * len(cells))
    axis.set_ylim(len(cells) - 0.5, -0.5)
    axis.set_xlabel("share of the prompt, %\n(upper bar stock, lower bar radix_rope)")
    if cells:
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=8)
