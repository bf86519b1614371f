"""Measurements made up for tests: every number chosen, none measured."""

from collections.abc import Mapping
from typing import Any

from radix_rope.quality.records import Measurement, Target
from radix_rope.quality.scenarios import SCENARIOS
from radix_rope.quality.settings import SETTINGS

SHARES = {"none": 40, "head16": 80, "head64": 300, "attention5": 150, "attention15": 320}
"""Computed tokens of 1000, by setting."""


def target(scenario: str, setting: str, kl: float, **changes: Any) -> Target:
    """One target with a gold answer of two tokens, and the same error at both."""
    fields: dict[str, Any] = {
        "scenario": scenario,
        "setting": setting,
        "sheet": "harbour",
        "variant": 0,
        "generation": 1,
        "question": 0,
        "prompt_tokens": 1000,
        "computed_tokens": SHARES.get(setting, 1000),
        "kl_nats": [kl, kl],
        "same_top": 2,
        "gold_logprob_change": -0.01,
        "exact_gold": True,
        "gold": True,
        "agrees": True,
        "compared_mass": 0.99,
    }
    return Target(**{**fields, **changes})


def measurement(
    kl: Mapping[tuple[str, str], float] | None = None,
    repeated: tuple[float, ...] = (1e-4, 1e-4, 1e-4),
    floor: float = 1e-9,
    targets: int = 60,
) -> Measurement:
    """Every scenario and setting at 1e-4 nats, but what `kl` names by (scenario, setting)."""
    made: list[Target] = []
    for scenario in SCENARIOS:
        if scenario == "repeated":
            continue
        for setting in SETTINGS:
            value = (
                floor if setting.key == "floor" else (kl or {}).get((scenario, setting.key), 1e-4)
            )
            made += [target(scenario, setting.key, value, question=i) for i in range(targets)]
    for cached in ("all_turns", "last_turn"):
        for generation, value in enumerate(repeated, start=1):
            made += [
                target("repeated", cached, value, generation=generation, question=i)
                for i in range(targets)
            ]
    return Measurement("toy", "0123456789abcdef", "2031-03-14", {"dtype": "float32"}, 12, 100, made)
