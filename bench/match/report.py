"""The measurements as tables, verdicts and a part of a documentation page. Only formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.match.caches import NODE_TOKENS
from bench.match.timing import Timing
from bench.pages import markdown_table, setting_text, verdict_text, write_generated

WRITER = "bench.match"

# What was promised (issue 3).
GROWTH, INSERT_MS, BYTES_PER_TOKEN = 1.5, 1.0, 8.0
MATCH_MS = {8192: 2.0, 131_072: 30.0}
MATCH_CACHED = 1_000_000

Row = Mapping[str, Any]


def matches_table(rows: Sequence[Row]) -> str:
    """One line per cache size and kind of request."""
    head = ["request", "layout", "hits", "cached", "found", "stock", "ours", "ours / stock"]
    body = [
        [
            f"{r['request_tokens']:,}",
            r["layout"],
            f"{r['hit_share']:.0%}",
            f"{r['cached_tokens']:,}",
            f"{r['reused_share']:.0%}",
            spread(r["stock"]),
            spread(r["ours"]),
            f"{r['ratio']:.1f}",
        ]
        for r in rows
    ]
    return markdown_table([head, *body], left=(1,))


def inserts_table(rows: Sequence[Row]) -> str:
    """Inserts and the index's memory."""
    head = ["cached", "stock", "ours", "on top", "index bytes per token"]
    body = [
        [
            f"{r['cached_tokens']:,}",
            *(spread(r[side]) for side in ("stock", "ours", "on_top")),
            f"{r['bytes_per_token']:.2f}",
        ]
        for r in rows
    ]
    return markdown_table([head, *body])


def adversarial_table(rows: Sequence[Row]) -> str:
    """The bound at work."""
    head = ["input", "cached", "request", "ms", "CPU us per token", "comparisons"]
    head += ["budget", "runs found", "reused"]
    body = [
        [
            r["name"],
            f"{r['cached_tokens']:,}",
            f"{r['request_tokens']:,}",
            spread(r["ours"]),
            f"{r['us_per_token']:.2f}",
            f"{r['comparisons']:,}",
            f"{r['budget']:,}" + (" (spent)" if r["budget_exhausted"] else ""),
            f"{r['runs_found']:,}",
            f"{r['reused_share']:.0%}",
        ]
        for r in rows
    ]
    return markdown_table([head, *body])


def growths(rows: Sequence[Row]) -> dict[tuple[int, str, float], float]:
    """Per kind of request: our CPU time at the largest cache over that at the smallest."""
    sizes = sorted({r["cached_tokens"] for r in rows})
    cells = {
        (r["request_tokens"], r["layout"], r["hit_share"], r["cached_tokens"]): r["ours"]["cpu_ms"]
        for r in rows
    }
    kinds = dict.fromkeys(key[:3] for key in cells)
    return {kind: cells[(*kind, sizes[-1])] / cells[(*kind, sizes[0])] for kind in kinds}


def verdicts(numbers: Mapping[str, Any]) -> list[str]:
    """One line per promise: pass or MISS, and the worst that was measured."""
    matches, inserts, memory = numbers["matches"], numbers["inserts"], numbers["memory"]
    sizes = sorted({r["cached_tokens"] for r in matches})
    grown = growths(matches)
    kind = max(grown, key=lambda key: grown[key])
    lines = [
        verdict_text(
            grown[kind] <= GROWTH,
            f"CPU time grows at most {GROWTH} times from {sizes[0]:,} to {sizes[-1]:,} cached "
            f"tokens: {min(grown.values()):.2f} to {grown[kind]:.2f} ({_kind(kind)})",
        )
    ]
    for size, limit in MATCH_MS.items():
        asked = [
            r for r in matches if r["request_tokens"] == size and r["cached_tokens"] <= MATCH_CACHED
        ]
        if asked:
            cached = max(r["cached_tokens"] for r in asked)
            worst = max(
                (r for r in asked if r["cached_tokens"] == cached),
                key=lambda r: float(r["ours"]["median_ms"]),
            )
            lines.append(
                verdict_text(
                    worst["ours"]["median_ms"] <= limit,
                    f"{size:,} tokens against {cached:,} cached in at most {limit:g} ms: "
                    f"{spread(worst['ours'])} ({worst['layout']}, {worst['hit_share']:.0%} hits)",
                )
            )
    slowest = max(inserts, key=lambda r: float(r["on_top"]["median_ms"]))
    lines.append(
        verdict_text(
            slowest["on_top"]["median_ms"] <= INSERT_MS,
            f"inserting {NODE_TOKENS:,} tokens costs at most {INSERT_MS:g} ms on top of stock: "
            f"{spread(slowest['on_top'])} at {slowest['cached_tokens']:,} cached",
        )
    )
    worst_bytes = max(
        numbers["worst_index_bytes_per_token"],
        memory["allocated_bytes_per_token"],
        *(r["bytes_per_token"] for r in inserts),
    )
    lines.append(
        verdict_text(
            worst_bytes <= BYTES_PER_TOKEN,
            f"index at most {BYTES_PER_TOKEN:g} bytes per cached token: {worst_bytes:.2f} at worst "
            f"while filling; at {memory['cached_tokens']:,} tokens "
            f"{memory['allocated_bytes_per_token']:.2f} allocated for the whole tree, "
            f"{memory['reported_bytes_per_token']:.2f} reported for the index",
        )
    )
    return lines


def as_markdown(setting: Mapping[str, object], numbers: Mapping[str, Any]) -> str:
    """Everything, as it is printed and written."""
    checked = "\n".join(verdicts(numbers))
    return "\n\n".join(
        (
            setting_text(setting),
            f"```\n{checked}\n```",
            "Matching, ms (median [10th, 90th percentile]):",
            matches_table(numbers["matches"]),
            f"Inserting {NODE_TOKENS:,} new tokens below a path, ms:",
            inserts_table(numbers["inserts"]),
            "Inputs made to be expensive (the plan alone; the last columns show the bound at "
            "work):",
            adversarial_table(numbers["adversarial"]),
        )
    )


def write_docs(page: Path, text: str) -> None:
    """Replace the generated part of the page.

    Raises:
        ValueError: the page has none.
    """
    write_generated(page, WRITER, text)


def spread(timing: Mapping[str, float]) -> str:
    """Median and 10th to 90th percentile."""
    return str(Timing(**timing))


def _kind(kind: tuple[int, str, float]) -> str:
    return f"{kind[0]:,} tokens, {kind[1]}, {kind[2]:.0%} hits"
