"""Tables, JSON and chart of the hit rates. Formats results and decides nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from textwrap import fill

from bench.hit_rate.law import Prices, append_only_rate
from bench.hit_rate.measure import Counted, Law, law_rate
from bench.pages import markdown_table, setting_text

_STOCK, _OURS = "stock RadixCache", "radix_rope"
_EXACT, _SHIFTED, _COMPUTED = "#1f77b4", "#7fb3d9", "#e3e6ea"


@dataclass(frozen=True, slots=True)
class Side:
    """What one server measured."""

    laws: list[Law]
    cases: list[Counted]


@dataclass(frozen=True, slots=True)
class Results:
    """Both servers on the same sessions, in the same order."""

    stock: Side
    ours: Side
    prices: Prices
    setting: dict[str, object]


def as_json(results: Results) -> str:
    """Everything measured, indented."""
    return json.dumps(asdict(results), indent=2)


def as_markdown(results: Results, chart: str, checked: Sequence[str]) -> str:
    """The generated part of a page.

    chart: the chart's address as seen from the page.
    checked: a line for every promise, see `verdict`.
    """
    return "\n\n".join(
        (
            setting_text(results.setting),
            "The append-only law: a session of T turns that grow alike hits (T-1)/(T+1). Answers "
            "longer than one token add what prefill never paid for (bench/hit_rate/law.py).",
            _law_table(results),
            "What happens to the law in practice; shares of all prompt tokens of the case:",
            _case_table(results),
            f"![Hit rates]({chart})",
            _price_text(results.prices),
            _cost_table(results),
            "```\n" + "\n".join(checked) + "\n```",
        )
    )


def _law_table(results: Results) -> str:
    rows = [
        ("turns", "increment", "answer", "prompt tokens", "law", _STOCK, _OURS, "ours shifted"),
        *(
            (
                str(stock.turns),
                f"{stock.increment_tokens}",
                f"{stock.answer_tokens}",
                f"{stock.tokens.sent:,}",
                _percent(law_rate(stock), 2),
                _percent(stock.tokens.hit_rate, 2),
                _percent(ours.tokens.hit_rate, 2),
                f"{ours.tokens.shifted:,}",
            )
            for stock, ours in zip(results.stock.laws, results.ours.laws, strict=True)
        ),
    ]
    return markdown_table(rows, left=())


def _case_table(results: Results) -> str:
    rows = [
        ("case", "prompt tokens", f"{_STOCK} keeps", f"{_OURS} keeps", "exact", "shifted"),
        *(
            (
                stock.title,
                f"{stock.tokens.sent:,}",
                _percent(stock.tokens.hit_rate),
                _percent(ours.tokens.hit_rate),
                _percent(ours.tokens.read / ours.tokens.sent),
                _percent(ours.tokens.shifted / ours.tokens.sent),
            )
            for stock, ours in _pairs(results)
        ),
    ]
    return markdown_table(rows)


def _price_text(prices: Prices) -> str:
    return (
        "A hit rate says little about cost. Below, every prompt token has one of three prices, "
        "relative to sending the same prompts without a cache: read from the cache "
        f"({prices.read:g}, shifted ones {prices.shifted:g}), computed and kept because the "
        f"session goes on ({prices.write:g}), computed in a session's last request "
        f"({prices.uncached:g}). These prices are plain examples, nobody's price list; "
        "`--price-read`, `--price-shifted`, `--price-write` and `--price-uncached` set others."
    )


def _cost_table(results: Results) -> str:
    def parts(counted: Counted) -> tuple[str, str]:
        cost = counted.tokens.cost(results.prices)
        return " + ".join(f"{part:.2f}" for part in cost.values()), f"{sum(cost.values()):.2f}"

    rows = [
        (
            "case",
            f"{_STOCK}: read + write + uncached",
            "sum",
            f"{_OURS}: read + write + uncached",
            "sum",
        ),
        *((stock.title, *parts(stock), *parts(ours)) for stock, ours in _pairs(results)),
    ]
    return markdown_table(rows)


def draw(results: Results, path: Path) -> None:
    """Write the chart as PNG: the law with what was measured, and every case on both sides."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (law_axis, case_axis) = pyplot.subplots(
        1, 2, figsize=(12, 5.2), width_ratios=(2, 3), layout="constrained"
    )
    plain = [law for law in results.stock.laws if law.answer_tokens == 1]
    turns = list(range(1, max(law.turns for law in plain) + 1))
    law_axis.plot(
        turns, [100 * append_only_rate(count) for count in turns], color="#444444", label="law"
    )
    for side, marker, size, label in (
        (results.stock, "s", 9, _STOCK),
        (results.ours, "o", 5, _OURS),
    ):
        laws = [law for law in side.laws if law.answer_tokens == 1]
        law_axis.plot(
            [law.turns for law in laws],
            [100 * law.tokens.hit_rate for law in laws],
            linestyle="none",
            marker=marker,
            markersize=size,
            label=label,
        )
    law_axis.set_xlabel("turns of an append-only session")
    law_axis.set_ylabel("hit rate, %")
    law_axis.set_ylim(0, 100)
    law_axis.legend(frameon=False, loc="lower right")

    places = list(range(len(results.stock.cases)))
    for side, shift in ((results.stock, -0.2), (results.ours, 0.2)):
        left = [0.0] * len(places)
        for colour, share in (
            (_EXACT, attrgetter("read")),
            (_SHIFTED, attrgetter("shifted")),
            (_COMPUTED, attrgetter("computed")),
        ):
            widths = [100 * share(case.tokens) / case.tokens.sent for case in side.cases]
            at = [place + shift for place in places]
            case_axis.barh(at, widths, left=left, height=0.36, color=colour)
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
    for colour, label in ((_EXACT, "exact"), (_SHIFTED, "shifted"), (_COMPUTED, "computed")):
        case_axis.barh([0], [0], color=colour, label=label)
    case_axis.set_yticks(places, [fill(case.title, 34) for case in results.stock.cases])
    case_axis.invert_yaxis()
    case_axis.set_xlim(0, 100)
    case_axis.set_xlabel("% of all prompt tokens (upper bar: stock, lower: radix_rope)")
    figure.legend(*case_axis.get_legend_handles_labels(), ncols=3, loc="outside upper right")
    for axis in (law_axis, case_axis):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _pairs(results: Results) -> Sequence[tuple[Counted, Counted]]:
    return list(zip(results.stock.cases, results.ours.cases, strict=True))


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f}%"
