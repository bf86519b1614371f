"""The tables and sentences of one quality check, for a terminal and for a page.

Formats what was measured and decides nothing.
"""

from __future__ import annotations

from radix_rope.quality.records import Measurement
from radix_rope.quality.scenarios import SCENARIOS, TURNS_BEHIND_CUT
from radix_rope.quality.settings import BY_KEY, DEFAULT, NO_ATTENTION, SETTINGS
from radix_rope.quality.summary import Row, compared_mass, kl_by_variant, rows
from radix_rope.quality.verdict import Limits, Verdict, allowed_kl_nats

_HEADER = (
    "setting",
    "computed",
    "mean KL",
    "worst KL",
    "top-1",
    "gold log-lik.",
    "gold kept",
    "greedy equal",
)
_CACHED = {"all_turns": "all turns cached", "last_turn": "only the last turn cached"}


def as_text(measurement: Measurement, limits: Limits) -> str:
    """All tables for a terminal."""
    parts = []
    for title, lines in _tables(measurement, limits):
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        parts.append(title)
        parts += [
            "  "
            + "  ".join(
                _pad(cell, w, i) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        ]
        parts.append("")
    return "\n".join([*parts, *notes(measurement)])


def as_markdown(measurement: Measurement, limits: Limits) -> str:
    """All tables for a page."""
    parts = []
    for title, lines in _tables(measurement, limits):
        rule = tuple(":--" if i == 0 else "--:" for i in range(len(lines[0])))
        table = "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))
        parts += [f"### {title}", table]
    return "\n\n".join([*parts, *notes(measurement)])


def notes(measurement: Measurement) -> list[str]:
    """What must be known to read the tables."""
    mean, least = compared_mass(measurement)
    return [
        f"KL in nats over the gold answer's tokens, against a full exact prefill; the exact run's "
        f"{measurement.top_tokens} likeliest tokens are compared one by one (they hold {mean:.2%} "
        f"of its probability on average, {least:.1%} at least) and the rest as one, so it is a "
        f"lower bound. Gold kept: of the answers that the exact run got right. Greedy equal: the "
        f"first {measurement.greedy_tokens} tokens."
    ]


def verdict_text(verdict: Verdict) -> str:
    """Every candidate's fate, then the conclusion."""
    lines = []
    for judged in verdict.settings:
        title = BY_KEY[judged.setting].title
        if judged.failures:
            lines.append(f"MISS  {title}: {'; '.join(judged.failures)}")
        else:
            lines.append(f"pass  {title}: {judged.computed_share:.1%} computed")
    lines += _left_out(verdict)
    if verdict.changed_limits:
        lines.append(f"Limits other than the default: {', '.join(verdict.changed_limits)}.")
    if verdict.recommended is None:
        lines.append("VERDICT: failed. No setting keeps the limits; serve this model exactly.")
    else:
        lines.append(f"VERDICT: passed. Recommended: {BY_KEY[verdict.recommended].title}.")
        lines += _generations(verdict, verdict.recommended)
    if not verdict.complete:
        lines.append("Not every scenario was measured with enough targets: a try, not stored.")
    return "\n".join(lines)


def _left_out(verdict: Verdict) -> list[str]:
    judged = {one.setting for one in verdict.settings}
    why = verdict.environment.get(NO_ATTENTION)
    return [
        f"skip  {setting.title}: not measured"
        + (f", {why}" if setting.is_attention and why else "")
        for setting in SETTINGS
        if setting.candidate and setting.key not in judged
    ]


def _generations(verdict: Verdict, recommended: str) -> list[str]:
    """What `max_generations` rests on: one setting stands for all of them."""
    limit = verdict.options.get("max_generations")
    if not isinstance(limit, int):
        return []
    reuses = "1 reuse" if limit == 0 else f"{limit + 1} reuses"
    line = f"max_generations {limit}: {reuses} in a row kept the limit with {DEFAULT.title}"
    if recommended != DEFAULT.key:
        line += f"; repeated reuse was not measured with {BY_KEY[recommended].title}"
    return [f"{line}."]


def _tables(measurement: Measurement, limits: Limits) -> list[tuple[str, list[tuple[str, ...]]]]:
    table = rows(measurement)
    tables = []
    for scenario, title in SCENARIOS.items():
        own = [row for row in table if row.scenario == scenario]
        if not own:
            continue
        limit = "reported, no limit"
        if scenario in limits.max_kl_nats:
            limit = f"mean KL at most {allowed_kl_nats(scenario, table, limits):.2g}"
        if scenario == "repeated":
            title = f"{title} ({own[0].targets} targets a turn; {limit})"
            lines = [("reuses in a row", *_HEADER[1:]), *map(_repeated_line, own)]
        else:
            title = f"{title} ({own[0].targets} targets; {limit})"
            lines = [_HEADER, *map(_line, sorted(own, key=_place))]
        tables.append((f"{title[0].upper()}{title[1:]}", lines))
        if scenario == "truncation":
            tables.append(_by_distance(measurement))
    return tables


def _by_distance(measurement: Measurement) -> tuple[str, list[tuple[str, ...]]]:
    """Truncation again, by how far behind the cut the sheet stands."""
    by_setting = kl_by_variant(measurement, "truncation")
    measured = {variant for by_variant in by_setting.values() for variant in by_variant}
    order = sorted(measured, key=TURNS_BEHIND_CUT.__getitem__)
    lines = [("setting", *(str(TURNS_BEHIND_CUT[variant]) for variant in order))]
    for setting in SETTINGS:
        own = by_setting.get(setting.key)
        if own is not None:
            cells = (_nats(own[v]) if v in own else "" for v in order)
            lines.append((setting.title, *cells))
    return "Truncated history, mean KL by turns between the cut and the facts", lines


def _place(row: Row) -> int:
    return [setting.key for setting in SETTINGS].index(row.setting)


def _line(row: Row) -> tuple[str, ...]:
    return (BY_KEY[row.setting].title, *_figures(row))


def _repeated_line(row: Row) -> tuple[str, ...]:
    return (f"{row.generation}, {_CACHED[row.setting]}", *_figures(row))


def _figures(row: Row) -> tuple[str, ...]:
    return (
        f"{row.computed_share:.1%}",
        _nats(row.kl_nats),
        _nats(row.worst_kl_nats),
        f"{row.top1:.1%}",
        f"{row.gold_logprob_change:+.4f}",
        f"{row.kept} of {row.exact_gold}",
        f"{row.agreement:.0%}",
    )


def _nats(value: float) -> str:
    return f"{value:.4f}" if value >= 0.001 else f"{value:.0e}"


def _pad(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)
