"""The gate's rule on made-up measurements, and that a server takes what it recommends."""

import json
import math

import pytest

from radix_rope.config import RadixRopeConfig, parse_config
from radix_rope.quality.records import Measurement, from_json, to_json
from radix_rope.quality.report import as_markdown, as_text, verdict_text
from radix_rope.quality.scenarios import SCENARIOS
from radix_rope.quality.settings import NO_ATTENTION, SETTINGS
from radix_rope.quality.summary import rows
from radix_rope.quality.verdict import MAX_KL_NATS, Limits, judge
from tests.quality.support import measurement, target


def test_the_cheapest_passing_setting_is_recommended() -> None:
    verdict = judge(measurement(), Limits())
    assert verdict.passed and verdict.complete
    assert verdict.recommended == "none"

    verdict = judge(measurement({("prefix_before", "none"): 0.031}), Limits())
    assert verdict.recommended == "head16"
    failed = {one.setting: one.failures for one in verdict.settings}
    assert "prefix_before: mean KL 0.031 nats is above 0.03" in failed["none"]
    assert not failed["head16"]


def test_independent_documents_count_only_when_asked() -> None:
    bad = {("independent", key): 0.2 for key in ("none", "head16", "head64", "attention5")}
    assert judge(measurement(bad), Limits()).recommended == "none"
    limits = Limits({**MAX_KL_NATS, "independent": 0.12})
    assert judge(measurement(bad), limits).recommended == "attention15"


def test_nothing_passes() -> None:
    verdict = judge(measurement(), Limits(dict.fromkeys(MAX_KL_NATS, 1e-6)))
    assert not verdict.passed and verdict.recommended is None
    assert parse_config(json.dumps(verdict.options)).mode == "exact"
    assert "VERDICT: failed" in verdict_text(verdict)


def test_not_a_number_does_not_pass() -> None:
    broken = {("edit", setting.key): math.nan for setting in SETTINGS}
    assert not judge(measurement(broken), Limits()).passed


def test_no_limit_below_twice_the_noise() -> None:
    """A model whose exact runs differ that much among themselves is not held to less."""
    errors = {("edit", setting.key): 0.0009 for setting in SETTINGS if setting.candidate}
    assert not judge(measurement(errors), Limits()).passed
    assert judge(measurement(errors, floor=0.0005), Limits()).passed


def test_lost_answers_fail_among_those_the_exact_run_got_right() -> None:
    def with_lost(lost: int, right: bool) -> Measurement:
        made = measurement()
        kept = [t for t in made.targets if t.scenario != "edit" or t.setting != "none"]
        for i in range(60):
            gone = {"exact_gold": right, "gold": False} if i < lost else {}
            kept.append(target("edit", "none", 1e-4, question=i, **gone))
        return Measurement(**{**to_json(made), "targets": kept})

    assert judge(with_lost(11, right=True), Limits()).recommended == "none"  # 229 of 240
    verdict = judge(with_lost(13, right=True), Limits())  # 227 of 240: below 95%
    assert verdict.recommended == "head16"
    assert "227 of 240 gold answers kept, below 95%" in verdict.settings[0].failures
    assert judge(with_lost(13, right=False), Limits()).recommended == "none"


@pytest.mark.parametrize(
    ("errors", "donor_generations"),
    [
        ((1e-4, 1e-4, 1e-4, 1e-4), 3),
        ((1e-4, 1e-4, 1e-4, 0.02), 2),
        ((1e-4, 0.02, 1e-4), 0),
        ((1e-4, math.nan), 0),
    ],
)
def test_the_generation_limit_is_what_was_measured_good(
    errors: tuple[float, ...], donor_generations: int
) -> None:
    """`n` reuses in a row are made from a donor with `n - 1` behind it."""
    verdict = judge(measurement(repeated=errors), Limits())
    assert verdict.options["max_generations"] == donor_generations
    # The planner takes donors of at most that many generations, and counts one more for the copy.
    assert parse_config(json.dumps(verdict.options)).max_generations == donor_generations


def test_a_bad_first_reuse_fails_every_setting() -> None:
    verdict = judge(measurement(repeated=(0.02, 1e-4)), Limits())
    assert not verdict.passed and all(one.failures for one in verdict.settings)
    assert "measured with head, 16 tokens (default) alone" in verdict.settings[0].failures[-1]


def test_the_generation_limit_names_the_setting_it_was_measured_with() -> None:
    said = verdict_text(judge(measurement(), Limits()))
    assert "max_generations 2: 3 reuses in a row kept the limit with head, 16 tokens" in said
    assert "repeated reuse was not measured with no repair" in said
    said = verdict_text(judge(measurement({("edit", "none"): 1.0}), Limits()))
    assert "Recommended: head, 16 tokens" in said and "was not measured" not in said


def test_limits_other_than_the_default_are_part_of_the_verdict() -> None:
    assert judge(measurement(), Limits()).changed_limits == []
    loose = {**MAX_KL_NATS, "truncation": 9.0, "independent": 0.12}
    del loose["edit"]
    verdict = judge(measurement(), Limits(loose, min_kept_share=0.5))
    assert verdict.changed_limits == [
        "truncation 9 instead of 0.01",
        "independent 0.12 instead of none",
        "edit none instead of 0.0005",
        "gold answers kept 0.5 instead of 0.95",
    ]
    assert "Limits other than the default: truncation 9 instead of 0.01" in verdict_text(verdict)


def without_attention(measured: Measurement, *scenarios: str) -> Measurement:
    kept = [
        one
        for one in measured.targets
        if not (one.setting.startswith("attention") and one.scenario in scenarios)
    ]
    return Measurement(
        **{
            **to_json(measured),
            "environment": {"dtype": "float32", NO_ATTENTION: "the engine has --tp-size 2"},
            "targets": kept,
        }
    )


def test_settings_that_the_engine_cannot_give_are_left_out_by_name() -> None:
    verdict = judge(without_attention(measurement(), *SCENARIOS), Limits())
    assert verdict.passed and verdict.complete
    assert {one.setting for one in verdict.settings} == {"none", "head16", "head64"}
    said = verdict_text(verdict)
    assert "skip  attention, 5%: not measured, the engine has --tp-size 2" in said


def test_a_setting_measured_in_part_does_not_pass() -> None:
    """A resumed check may have had another engine before."""
    bad = {("edit", key): 1.0 for key in ("none", "head16", "head64")}
    assert judge(measurement(bad), Limits()).recommended == "attention5"
    verdict = judge(without_attention(measurement(bad), "truncation"), Limits())
    assert not verdict.passed
    failed = {one.setting: one.failures for one in verdict.settings}
    assert failed["attention15"] == ["truncation: 0 of 60 targets measured"]


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.candidate], ids=lambda s: s.key)
def test_a_server_takes_what_is_recommended(setting: object) -> None:
    key = setting.key  # type: ignore[attr-defined]
    others = {
        ("edit", other.key): 1.0 for other in SETTINGS if other.candidate and other.key != key
    }
    verdict = judge(measurement(others), Limits())
    assert verdict.recommended == key
    config = parse_config(json.dumps(verdict.options))
    assert isinstance(config, RadixRopeConfig) and config.mode == "shifted"
    assert config.repair == verdict.options["repair"]
    assert config.max_generations == 2


def test_a_try_is_no_verdict() -> None:
    assert not judge(measurement(targets=59), Limits()).complete
    made = measurement()
    part = [t for t in made.targets if t.scenario == "edit"]
    some = Measurement(**{**to_json(made), "targets": part})
    assert not judge(some, Limits()).complete
    with pytest.raises(ValueError, match="nothing to judge"):
        judge(some, Limits({"reorder": 0.1}))


def test_rows_average_over_targets_and_their_tokens() -> None:
    made = measurement(targets=1)
    two = [
        target("edit", "none", 0.0, kl_nats=[0.1, 0.3], same_top=1, agrees=False),
        target("edit", "none", 0.0, kl_nats=[0.4], same_top=1, computed_tokens=500, gold=False),
    ]
    (row,) = rows(Measurement(**{**to_json(made), "targets": two}))
    assert (row.targets, row.exact_gold, row.kept) == (2, 2, 1)
    assert row.kl_nats == pytest.approx(0.3)
    assert row.worst_kl_nats == pytest.approx(0.4)
    assert row.top1 == pytest.approx(2 / 3)
    assert row.agreement == pytest.approx(0.5)
    assert row.computed_share == pytest.approx((40 + 500) / 2000)


def test_json_and_back() -> None:
    made = measurement(targets=2)
    assert from_json(json.loads(json.dumps(to_json(made)))) == made


def test_every_scenario_and_setting_is_in_the_report() -> None:
    made = measurement(targets=2)
    for text in (as_text(made, Limits()), as_markdown(made, Limits())):
        for title in SCENARIOS.values():
            assert title.casefold() in text.casefold()
        for setting in SETTINGS:
            # Truncation has a second table, by distance from the cut.
            assert text.count(setting.title) == len(SCENARIOS)
        assert "3, only the last turn cached" in text


def test_truncation_is_shown_by_distance_from_the_cut() -> None:
    made = measurement(targets=1)
    # Variants in the order measured; 5, 0, 4 turns stand between the cut and the facts.
    own = [target("truncation", "none", kl, variant=v) for v, kl in enumerate((0.5, 0.25, 0.125))]
    own.append(target("truncation", "none", 0.75, variant=1, question=1))
    some = Measurement(**{**to_json(made), "targets": own})
    table = as_markdown(some, Limits()).partition("between the cut and the facts")[2].splitlines()
    assert table[2] == "| setting | 0 | 4 | 5 |"
    assert table[4] == "| no repair | 0.5000 | 0.1250 | 0.5000 |"
