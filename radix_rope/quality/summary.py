"""From single targets to one row per scenario and setting.

Pure arithmetic on records. May not know thresholds, files or pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from radix_rope.quality.records import Measurement, Target


@dataclass(frozen=True, slots=True)
class Row:
    """Mean figures of one setting in one scenario.

    Attributes:
        scenario: a key of `scenarios.SCENARIOS`.
        setting: as in `Target`.
        generation: reuses in a row, 1 outside of repeated reuse.
        targets: how many were measured.
        kl_nats: mean over targets of the mean over the gold answer's tokens.
        worst_kl_nats: largest of these means.
        top1: share of gold tokens at which both runs' likeliest tokens are equal.
        gold_logprob_change: mean change of the gold answer's log probability, nats.
        exact_gold: targets that the exact run answered with the gold answer.
        kept: those among them that this setting still does.
        agreement: share of targets whose greedy continuation is the exact run's.
        computed_share: of the prompt tokens, both passes counted.
        prompt_tokens: mean.
    """

    scenario: str
    setting: str
    generation: int
    targets: int
    kl_nats: float
    worst_kl_nats: float
    top1: float
    gold_logprob_change: float
    exact_gold: int
    kept: int
    agreement: float
    computed_share: float
    prompt_tokens: float


def rows(measurement: Measurement) -> list[Row]:
    """One per scenario, setting and generation, in the order measured."""
    groups: dict[tuple[str, str, int], list[Target]] = {}
    for target in measurement.targets:
        key = target.scenario, target.setting, target.generation
        groups.setdefault(key, []).append(target)
    return [_row(*key, targets) for key, targets in groups.items()]


def kl_by_variant(measurement: Measurement, scenario: str) -> dict[str, dict[int, float]]:
    """Mean KL in nats, by setting and variant of one scenario."""
    errors: dict[str, dict[int, list[float]]] = {}
    for target in measurement.targets:
        if target.scenario == scenario:
            by_variant = errors.setdefault(target.setting, {})
            by_variant.setdefault(target.variant, []).append(fmean(target.kl_nats))
    return {
        setting: {variant: fmean(values) for variant, values in by_variant.items()}
        for setting, by_variant in errors.items()
    }


def compared_mass(measurement: Measurement) -> tuple[float, float]:
    """Mean and smallest probability mass that was compared token by token."""
    masses = [target.compared_mass for target in measurement.targets]
    return fmean(masses), min(masses)


def _row(scenario: str, setting: str, generation: int, targets: Sequence[Target]) -> Row:
    errors = [fmean(target.kl_nats) for target in targets]
    right = [target for target in targets if target.exact_gold]
    return Row(
        scenario=scenario,
        setting=setting,
        generation=generation,
        targets=len(targets),
        kl_nats=fmean(errors),
        worst_kl_nats=max(errors),
        top1=sum(t.same_top for t in targets) / sum(len(t.kl_nats) for t in targets),
        gold_logprob_change=fmean(t.gold_logprob_change for t in targets),
        exact_gold=len(right),
        kept=sum(target.gold for target in right),
        agreement=fmean(target.agrees for target in targets),
        computed_share=sum(t.computed_tokens for t in targets)
        / sum(t.prompt_tokens for t in targets),
        prompt_tokens=fmean(t.prompt_tokens for t in targets),
    )
