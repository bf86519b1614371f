"""The chart of one demo run: time to first token and error, by scenario."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill

from bench.demo.results import BOUNDED, MIN_RATIO, Results

_STOCK, _OURS, _UNROTATED = "#9aa5b1", "#1f77b4", "#d62728"
# Differences this small are rounding, and zero has no place on a logarithmic axis.
_SMALLEST_KL_NATS = 1e-6


def draw(results: Results, subtitle: str, path: Path) -> None:
    """Write the chart as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = results.rows
    places = list(range(len(rows)))
    figure, (time_axis, error_axis) = pyplot.subplots(
        1, 2, figsize=(12, 4.6), width_ratios=(3, 2), sharey=True, layout="constrained"
    )
    for side, colour, shift, label in (
        ("stock", _STOCK, -0.2, "stock SGLang"),
        ("ours", _OURS, 0.2, "radix_rope"),
    ):
        times = [getattr(row, side) for row in rows]
        time_axis.barh(
            [place + shift for place in places],
            [time.median_ms for time in times],
            height=0.38,
            color=colour,
            label=label,
            xerr=[
                [time.median_ms - time.min_ms for time in times],
                [time.max_ms - time.median_ms for time in times],
            ],
            error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#444444"},
        )
    for place, row in zip(places, rows, strict=True):
        bold = row.scenario in BOUNDED and row.ratio >= MIN_RATIO
        time_axis.annotate(
            f"{row.ratio:.1f}x",
            (row.ours.max_ms, place + 0.2),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold" if bold else "normal",
        )
    time_axis.set_yticks(places, [row.title for row in rows])
    time_axis.invert_yaxis()
    time_axis.set_xlabel("time to first token, ms (median, range)")
    time_axis.legend(loc="lower right", frameon=False)

    for place, row in zip(places, rows, strict=True):
        kl = max(row.kl_nats, _SMALLEST_KL_NATS)
        if row.unrotated_kl_nats is not None:
            error_axis.plot([kl, row.unrotated_kl_nats], [place, place], color="#dddddd", zorder=1)
            error_axis.scatter([row.unrotated_kl_nats], [place], color=_UNROTATED, zorder=2)
        error_axis.scatter([kl], [place], color=_OURS, zorder=2)
    error_axis.scatter([], [], color=_OURS, label="radix_rope")
    error_axis.scatter([], [], color=_UNROTATED, label="rotation off")
    error_axis.set_xscale("log")
    error_axis.set_xlabel(f"mean KL against stock, nats (below {_SMALLEST_KL_NATS:g} at the edge)")
    error_axis.legend(loc="upper right", frameon=False)
    for axis in (time_axis, error_axis):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(fill(subtitle, 150), fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
