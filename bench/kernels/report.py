"""The results of one run as text for a terminal, as JSON and as parts of a documentation page.

Formats, and decides nothing but what is a miss of the target.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.kernels.cases import Result
from bench.pages import markdown_table, setting_text, verdict_text, write_generated

COPIES = ("torch buf[dst]=buf[src]", "torch index_copy_", "device copy")
# Of the speed of a plain copy of the same bytes.
TARGETS = {"cpu": 0.8, "triton": 0.85}
# The generated parts of a page, by what is in them.
PARTS = {
    "cpu": "bench.kernels",
    "cuda": "bench.kernels --device cuda",
    "errors": "bench.kernels --errors",
}


@dataclass(frozen=True)
class Case:
    """All contestants of one shape, dtype and number of tokens."""

    title: tuple[str, str, int, int]
    results: tuple[Result, ...]

    @property
    def copy(self) -> Result:
        """The faster plain copy: what the ratios are against."""
        return max((r for r in self.results if r.contestant in COPIES), key=lambda r: r.gb_per_s)

    @property
    def moves(self) -> tuple[Result, ...]:
        """Our kernels."""
        return tuple(r for r in self.results if r.contestant not in COPIES)


def cases(results: Sequence[Result]) -> list[Case]:
    """Results grouped by case, in the order they were measured."""
    grouped: dict[tuple[str, str, int, int], list[Result]] = {}
    for result in results:
        title = (result.shape, result.dtype, result.layers, result.tokens)
        grouped.setdefault(title, []).append(result)
    return [Case(title, tuple(own)) for title, own in grouped.items()]


def as_line(result: Result) -> str:
    """One contestant, for a terminal."""
    return (
        f"  {result.contestant:<24} {result.median_ms:9.3f} ms {result.gb_per_s:7.2f} GB/s  "
        f"{result.ratio_median:5.2f} ({result.ratio_low:.2f} to {result.ratio_high:.2f})"
    )


def as_markdown(results: Sequence[Result]) -> str:
    """One line per case: bandwidths, then how many times as fast as the copy and as torch."""
    grouped = cases(results)
    kernels = list(dict.fromkeys(r.contestant for case in grouped for r in case.moves))
    rated = [name for name in kernels if name != "move: torch"]
    rows = [
        [
            "shape",
            "layers",
            "dtype",
            "tokens",
            "plain copy GB/s",
            *(f"{_kernel(name)} GB/s" for name in kernels),
            *(f"{_kernel(name)} over copy (lowest to highest round)" for name in rated),
            *(f"{_kernel(name)} over three-step torch" for name in rated),
        ]
    ]
    for case in grouped:
        shape, dtype, layers, tokens = case.title
        moves = {r.contestant: r for r in case.moves}
        rows.append(
            [
                shape,
                str(layers),
                dtype,
                f"{tokens:,}",
                f"{case.copy.gb_per_s:.2f}",
                *(_bandwidth(moves.get(name)) for name in kernels),
                *(_ratio(moves.get(name)) for name in rated),
                *(_times(moves.get(name), moves.get("move: torch")) for name in rated),
            ]
        )
    return markdown_table(rows, left=(0, 2))


def verdicts(results: Sequence[Result]) -> list[str]:
    """For every kernel with a target: pass or MISS, and its worst case."""
    lines = []
    for kernel, target in TARGETS.items():
        rated = [r for r in results if r.contestant == f"move: {kernel}"]
        if not rated:
            continue
        worst = min(rated, key=lambda r: r.ratio_median)
        below = sum(r.ratio_median < target for r in rated)
        lines.append(
            verdict_text(
                not below,
                f"{kernel}: {target} of a plain copy's speed; worst median "
                f"{worst.ratio_median:.2f} ({worst.shape}, {worst.dtype}, {worst.tokens:,} "
                f"tokens), {below} of {len(rated)} cases below",
            )
        )
    return lines


def errors_markdown(rows: Sequence[tuple[str, str, Sequence[float]]], counts: Sequence[int]) -> str:
    """Error after repeated moves: (dtype, moved from, errors after `counts` moves)."""
    head = ["dtype", "from", *(f"{n} move{'s' if n > 1 else ''}" for n in counts)]
    lines = [[dtype, origin, *(f"{e:.2e}" for e in errors)] for dtype, origin, errors in rows]
    return markdown_table([head, *lines], left=(0, 1))


def write_json(path: Path, setting: dict[str, object], results: Sequence[Result]) -> None:
    """Everything measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = {"setting": setting, "results": [asdict(result) for result in results]}
    path.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


def write_docs(
    page: Path, device: str, setting: dict[str, object], results: Sequence[Result]
) -> None:
    """Replace the page's table of this device.

    Raises:
        ValueError: the page has no such part.
    """
    checked = "\n".join(verdicts(results))
    text = f"{setting_text(setting)}\n\n{as_markdown(results)}\n\n```\n{checked}\n```"
    write_generated(page, PARTS[device], text)


def write_errors(page: Path, table: str) -> None:
    """Replace the page's table of rounding errors.

    Raises:
        ValueError: the page has no such part.
    """
    write_generated(page, PARTS["errors"], table)


def _kernel(contestant: str) -> str:
    name = contestant.removeprefix("move: ")
    return "three-step torch" if name == "torch" else f"`{name}`"


def _bandwidth(result: Result | None) -> str:
    return "" if result is None else f"{result.gb_per_s:.2f}"


def _ratio(result: Result | None) -> str:
    if result is None:
        return ""
    return f"{result.ratio_median:.2f} ({result.ratio_low:.2f} to {result.ratio_high:.2f})"


def _times(result: Result | None, reference: Result | None) -> str:
    if result is None or reference is None:
        return ""
    return f"{result.gb_per_s / reference.gb_per_s:.1f}"
