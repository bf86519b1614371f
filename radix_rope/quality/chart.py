"""The chart of one quality check: error against computed share, and error over repeated reuse."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Any

from radix_rope.quality.records import Measurement
from radix_rope.quality.scenarios import SCENARIOS
from radix_rope.quality.settings import FLOOR
from radix_rope.quality.summary import Row, rows
from radix_rope.quality.verdict import Limits, allowed_kl_nats

_FAMILIES = (
    ("head: none, first 16, first 64 of each run", ("none", "head16", "head64"), "#1f77b4", "o"),
    ("attention: 5%, 15%", ("attention5", "attention15"), "#d62728", "s"),
    ("better donor, first 16", ("better_donor",), "#2ca02c", "D"),
)
_COLUMNS = 3
# Zero has no place on a logarithmic axis.
_SMALLEST_KL_NATS = 1e-7


def draw(measurement: Measurement, limits: Limits, subtitle: str, path: Path) -> None:
    """Write the chart as PNG (or what else the name ends in): a panel per measured scenario.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    table = rows(measurement)
    measured = {row.scenario for row in table}
    shown = [scenario for scenario in SCENARIOS if scenario in measured]
    columns = min(_COLUMNS, max(1, len(shown)))
    lines = max(1, -(-len(shown) // columns))
    size = (13 * columns / _COLUMNS, 3.2 * lines + 0.8)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=size, layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis, scenario in zip(axes.flat, shown, strict=False):
        own = [row for row in table if row.scenario == scenario]
        axis.set_title(SCENARIOS[scenario], fontsize=9)
        axis.set_yscale("log")
        axis.spines[["top", "right"]].set_visible(False)
        if scenario == "repeated":
            _draw_repeated(axis, own)
        else:
            _draw_frontier(axis, own)
        if scenario in limits.max_kl_nats:
            allowed = allowed_kl_nats(scenario, table, limits)
            axis.axhline(allowed, color="#999999", linewidth=0.8, linestyle=":")
            axis.annotate(
                "limit",
                (1, allowed),
                xycoords=("axes fraction", "data"),
                fontsize=7,
                ha="right",
                va="bottom",
                color="#777777",
            )
    for axis in axes[:, 0]:
        axis.set_ylabel("mean KL over the gold answer, nats")
    legend = {
        label: handle
        for axis in axes.flat
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        legend.values(),
        legend.keys(),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=8,
    )
    figure.suptitle(fill(subtitle, 150), fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_frontier(axis: Any, own: list[Row]) -> None:
    by_setting = {row.setting: row for row in own}
    for label, keys, colour, marker in _FAMILIES:
        points = [by_setting[key] for key in keys if key in by_setting]
        axis.plot(
            [100 * row.computed_share for row in points],
            [max(row.kl_nats, _SMALLEST_KL_NATS) for row in points],
            color=colour,
            marker=marker,
            label=label,
        )
    if FLOOR.key in by_setting:
        _draw_floor(axis, by_setting[FLOOR.key].kl_nats)
    axis.set_xlabel("prompt tokens computed, % (both passes)")


def _draw_repeated(axis: Any, own: list[Row]) -> None:
    for cached, label, colour in (
        ("all_turns", "all turns cached", "#9467bd"),
        ("last_turn", "only the last turn cached", "#ff7f0e"),
    ):
        points = [row for row in own if row.setting == cached]
        axis.plot(
            [row.generation for row in points],
            [max(row.kl_nats, _SMALLEST_KL_NATS) for row in points],
            color=colour,
            # The first is wider, for the second may lie on it.
            linewidth=4 if cached == "all_turns" else 1.5,
            marker=".",
            label=label,
        )
    axis.set_xlabel("reuses in a row")


def _draw_floor(axis: Any, kl_nats: float) -> None:
    axis.axhline(
        max(kl_nats, _SMALLEST_KL_NATS),
        color="#444444",
        linewidth=0.8,
        linestyle="--",
        label="noise floor",
    )
