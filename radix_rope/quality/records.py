"""What the quality check measures, as plain records that go into its JSON and come back from it.

May not know how they are measured nor what is concluded from them.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Target:
    """One question in one context under one setting.

    Attributes:
        scenario: a key of `scenarios.SCENARIOS`.
        setting: a key of `settings.BY_KEY`; for repeated reuse what stayed in the cache,
            `all_turns` or `last_turn`.
        sheet: name of the fact sheet.
        variant: of the scenario.
        generation: reuses in a row; 1 outside of repeated reuse.
        question: its number in the sheet.
        prompt_tokens: length of the prompt.
        computed_tokens: prompt tokens that went through the model, both passes of `attention`
            counted.
        kl_nats: per gold token, the lower bound of the KL divergence from the exact run.
        same_top: gold tokens at which both runs' likeliest tokens are equal.
        gold_logprob_change: log probability of the whole gold answer, minus the exact run's.
        exact_gold: whether the exact run's greedy answer begins with the gold answer.
        gold: whether this run's does.
        agrees: whether both greedy continuations are equal.
        compared_mass: mean probability that the exact run gives to the tokens compared one by one.
    """

    scenario: str
    setting: str
    sheet: str
    variant: int
    generation: int
    question: int
    prompt_tokens: int
    computed_tokens: int
    kl_nats: list[float]
    same_top: int
    gold_logprob_change: float
    exact_gold: bool
    gold: bool
    agrees: bool
    compared_mass: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """Everything measured on one model.

    Attributes:
        model: name of the folder.
        fingerprint: of the model's files.
        date: of the last scenario measured, ISO, UTC.
        environment: dtype, versions, machine.
        greedy_tokens: length of the continuations that are compared.
        top_tokens: tokens compared one by one in a KL.
        targets: in the order measured.
    """

    model: str
    fingerprint: str
    date: str
    environment: dict[str, Any]
    greedy_tokens: int
    top_tokens: int
    targets: list[Target] = field(default_factory=list)

    @property
    def scenarios(self) -> list[str]:
        """Keys of the scenarios measured, in their order."""
        return list(dict.fromkeys(target.scenario for target in self.targets))


def to_json(measurement: Measurement) -> dict[str, Any]:
    """As what `json.dumps` takes."""
    return dataclasses.asdict(measurement)


def from_json(raw: dict[str, Any]) -> Measurement:
    """Back from `to_json`.

    Raises:
        TypeError, KeyError: it is from another version.
    """
    return Measurement(**{**raw, "targets": [Target(**target) for target in raw["targets"]]})


def read(text: str) -> Measurement:
    """The measurement in the JSON that `radix-rope check --json` wrote."""
    return from_json(json.loads(text)["measurement"])
