"""The gate's rule: which settings pass, which one is recommended, for how many reuses in a row.

Pure functions of a measurement and limits. May not know files or engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from radix_rope.quality.records import Measurement
from radix_rope.quality.scenarios import SCENARIOS
from radix_rope.quality.settings import BY_KEY, DEFAULT, FLOOR, SETTINGS, Option
from radix_rope.quality.summary import Row, rows

MAX_KL_NATS = {
    "truncation": 0.01,
    "prefix_before": 0.03,
    "reorder": 0.07,
    "edit": 0.0005,
    "repeated": 0.01,
}
"""Largest mean KL over the gold answers by scenario. Independent documents have none: they are
reported, and count when the user gives a limit."""

MIN_KEPT_SHARE = 0.95
FLOOR_FACTOR = 2.0
"""Nobody can be asked to differ less from an exact run than twice what exact runs differ."""

MIN_TARGETS = 60
"""Fewer targets in a scenario are a try, not a verdict."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a setting must keep.

    Attributes:
        max_kl_nats: largest mean KL by scenario; scenarios without one do not count.
        min_kept_share: of the gold answers that the exact run gave, over all that count.
    """

    max_kl_nats: dict[str, float] = field(default_factory=lambda: dict(MAX_KL_NATS))
    min_kept_share: float = MIN_KEPT_SHARE

    def changes(self) -> list[str]:
        """Every limit that is not this package's own, as in "truncation 9 instead of 0.01"."""
        changed = [
            f"{name} {nats:g} instead of {MAX_KL_NATS.get(name, 'none')}"
            for name, nats in self.max_kl_nats.items()
            if nats != MAX_KL_NATS.get(name)
        ]
        changed += [f"{name} none instead of {MAX_KL_NATS[name]}" for name in self._dropped()]
        if self.min_kept_share != MIN_KEPT_SHARE:
            changed.append(f"gold answers kept {self.min_kept_share:g} instead of {MIN_KEPT_SHARE}")
        return changed

    def _dropped(self) -> list[str]:
        return [name for name in MAX_KL_NATS if name not in self.max_kl_nats]


@dataclass(frozen=True, slots=True)
class Judged:
    """One setting against the limits; it passes when there are no failures.

    Attributes:
        setting: its key.
        options: what a server or a request is given for it.
        computed_share: of the prompt tokens, mean over the scenarios.
        failures: what it does not keep.
    """

    setting: str
    options: dict[str, Option]
    computed_share: float
    failures: list[str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was concluded about a model.

    Attributes:
        passed: some setting keeps every limit.
        complete: every scenario was measured, with enough targets.
        recommended: key of the cheapest setting that passes; None when none does.
        options: of `RadixRopeConfig`, for a server of this model.
        settings: every candidate.
        limits: what they were held against.
        changed_limits: those that are not this package's own, in words.
        model, fingerprint, date, environment: of the measurement.
    """

    passed: bool
    complete: bool
    recommended: str | None
    options: dict[str, Option]
    settings: list[Judged]
    limits: Limits
    changed_limits: list[str]
    model: str
    fingerprint: str
    date: str
    environment: dict[str, Any]


def judge(measurement: Measurement, limits: Limits) -> Verdict:
    """Hold every candidate against the limits; the cheapest of those that pass is recommended.

    Raises:
        ValueError: nothing was measured that has a limit.
    """
    table = rows(measurement)
    counted = [name for name in measurement.scenarios if name in limits.max_kl_nats]
    if not counted:
        raise ValueError(
            "none of the scenarios measured has a limit, so there is nothing to judge: measured "
            f"{', '.join(measurement.scenarios) or 'none'}, limits for "
            f"{', '.join(limits.max_kl_nats) or 'none'}"
        )
    judged = [
        _judge_setting(setting.key, table, counted, limits)
        for setting in SETTINGS
        if setting.candidate and any(row.setting == setting.key for row in table)
    ]
    generations = good_generations(table, limits)
    if generations == 0:
        judged = [replace(one, failures=[*one.failures, _REPEATED]) for one in judged]
    passing = [one for one in judged if not one.failures]
    best = min(passing, key=lambda one: one.computed_share, default=None)
    options: dict[str, Option] = {"mode": "exact"}
    if best is not None:
        options = dict(BY_KEY[best.setting].options)
        if generations is not None:
            # What is copied has one reuse more behind it than its donor, which the option bounds;
            # 0 leaves exact donors, which are reused for the first time.
            options["max_generations"] = generations - 1
    return Verdict(
        passed=best is not None,
        complete=_is_complete(table),
        recommended=None if best is None else best.setting,
        options=options,
        settings=judged,
        limits=limits,
        changed_limits=limits.changes(),
        model=measurement.model,
        fingerprint=measurement.fingerprint,
        date=measurement.date,
        environment=measurement.environment,
    )


def allowed_kl_nats(scenario: str, table: Sequence[Row], limits: Limits) -> float:
    """The limit of a scenario that counts, or twice its noise floor where that is higher."""
    floors = [r.kl_nats for r in table if r.scenario == scenario and r.setting == FLOOR.key]
    return max([limits.max_kl_nats[scenario], *(FLOOR_FACTOR * floor for floor in floors)])


def good_generations(table: Sequence[Row], limits: Limits) -> int | None:
    """How many reuses in a row stay within the limit; None when that was not measured.

    Measured with the default setting alone (`measure.Measurer`), whatever is recommended.
    """
    repeated = [row for row in table if row.scenario == "repeated"]
    if not repeated or "repeated" not in limits.max_kl_nats:
        return None
    allowed = allowed_kl_nats("repeated", table, limits)
    # Not `>`: a NaN is bad too.
    bad = [row.generation for row in repeated if not row.kl_nats <= allowed]
    return min(bad) - 1 if bad else max(row.generation for row in repeated)


def _judge_setting(key: str, table: Sequence[Row], counted: list[str], limits: Limits) -> Judged:
    own = [row for row in table if row.setting == key]
    counting = [row for row in own if row.scenario in counted]
    failures = _measured_in_part(own, table, counted)
    for row in counting:
        allowed = allowed_kl_nats(row.scenario, table, limits)
        # Not `>`: a NaN fails too.
        if not row.kl_nats <= allowed:
            failures.append(
                f"{row.scenario}: mean KL {row.kl_nats:.3g} nats is above {allowed:.3g}"
            )
    right, kept = sum(row.exact_gold for row in counting), sum(row.kept for row in counting)
    if kept < limits.min_kept_share * right:
        failures.append(f"{kept} of {right} gold answers kept, below {limits.min_kept_share:.0%}")
    share = fmean(row.computed_share for row in own)
    return Judged(key, dict(BY_KEY[key].options), share, failures)


def _measured_in_part(own: list[Row], table: Sequence[Row], counted: list[str]) -> list[str]:
    """An engine without a second pass leaves out `attention`; a resumed check may mix engines."""
    failures = []
    for scenario in counted:
        if scenario == "repeated":  # measured with the default setting, for all
            continue
        measured = sum(row.targets for row in own if row.scenario == scenario)
        most = max(row.targets for row in table if row.scenario == scenario)
        if measured < most:
            failures.append(f"{scenario}: {measured} of {most} targets measured")
    return failures


def _is_complete(table: Sequence[Row]) -> bool:
    targets: dict[tuple[str, str], int] = {}
    for row in table:
        key = row.scenario, row.setting
        targets[key] = targets.get(key, 0) + row.targets
    measured = {scenario for scenario, _ in targets}
    return measured == set(SCENARIOS) and min(targets.values()) >= MIN_TARGETS


_REPEATED = (
    f"repeated: the first reuse is already above the limit (measured with {DEFAULT.title} alone)"
)
