"""Scenarios are token-exact: what a target shares with its donors is what the title says."""

from collections.abc import Callable

import pytest

from bench.demo.prompts import MOVED, SCENARIOS, PromptBuilder, Scenario
from radix_rope.quality.texts import document, fact_sheet, fact_sheets
from tests.demo.words import SharedRun, WordTokenizer, shared_runs

WORDS = WordTokenizer()
BUILDER = PromptBuilder(WORDS.encode)
BUILT = {
    (sheet.name, scenario.key): scenario
    for sheet in fact_sheets()
    for scenario in BUILDER.scenarios(sheet)
}
RUNS = {key: shared_runs(scenario.context, scenario.donors) for key, scenario in BUILT.items()}
SHEETS = sorted({name for name, _ in BUILT})


def runs_of(sheet: str, key: str) -> tuple[Scenario, list[SharedRun]]:
    return BUILT[sheet, key], RUNS[sheet, key]


def test_every_sheet_has_every_scenario_in_order() -> None:
    for name in SHEETS:
        assert [key for sheet, key in BUILT if sheet == name] == list(SCENARIOS)


@pytest.mark.parametrize("key", BUILT, ids="-".join)
def test_the_facts_are_in_the_target_once(key: tuple[str, str]) -> None:
    text = WORDS.decode(BUILT[key].context)
    for asked in fact_sheet(key[0]).questions:
        assert text.count(f"{asked.lead_in} {asked.gold}.") == 1


@pytest.mark.parametrize("key", BUILT, ids="-".join)
def test_few_tokens_of_a_target_are_new(key: tuple[str, str]) -> None:
    reused = sum(run.end - run.begin for run in RUNS[key])
    assert len(BUILT[key].context) - reused <= 75
    assert len(RUNS[key]) <= 4


@pytest.mark.parametrize("key", BUILT, ids="-".join)
def test_offsets_move_where_the_demo_says_so(key: tuple[str, str]) -> None:
    deltas = {run.delta for run in RUNS[key]}
    assert any(deltas) if key[1] in MOVED else deltas == {0}


@pytest.mark.parametrize("sheet", SHEETS)
def test_aligned_context_is_a_prefix_of_its_donor(sheet: str) -> None:
    scenario, _ = runs_of(sheet, "aligned")
    assert scenario.donors[0][: len(scenario.context)] == scenario.context


@pytest.mark.parametrize("sheet", SHEETS)
def test_truncation_moves_the_rest_of_the_history_forward(sheet: str) -> None:
    scenario, runs = runs_of(sheet, "truncated")
    # The system prompt stays, one block behind it is gone.
    assert [run.delta == 0 for run in runs] in ([True, False], [False])
    assert runs[-1].delta < -400
    assert runs[-1].end == len(scenario.context)


@pytest.mark.parametrize("sheet", SHEETS)
def test_report_stands_in_front_of_everything(sheet: str) -> None:
    scenario, runs = runs_of(sheet, "report")
    report = tuple(WORDS.encode(document("report_waterworks")))
    assert len(scenario.donors) == 2
    assert runs[0].begin == 0 and runs[0].delta < 0 and runs[0].end > len(report)
    assert runs[-1].delta > len(report) and runs[-1].end == len(scenario.context)


@pytest.mark.parametrize("sheet", SHEETS)
def test_agents_share_all_but_their_role(sheet: str) -> None:
    scenario, runs = runs_of(sheet, "agents")
    donor, target = scenario.donors[0], scenario.context
    assert runs[-1].end == len(target)
    assert len(target) - (runs[-1].end - runs[-1].begin) < 75
    assert WORDS.decode(donor[:12]) != WORDS.decode(target[:12])


@pytest.mark.parametrize("sheet", SHEETS)
def test_documents_are_the_same_in_another_order(sheet: str) -> None:
    scenario, _ = runs_of(sheet, "documents")

    def messages(tokens: tuple[int, ...]) -> list[str]:
        return WORDS.decode(tokens).split("<|im_start|>")[1:]

    target = messages(scenario.context)
    donor = messages(scenario.donors[0])[: len(target)]
    assert donor[0] == target[0]
    assert donor != target
    assert sorted(donor) == sorted(target)


@pytest.mark.parametrize("sheet", SHEETS)
def test_a_timestamp_of_equal_length_is_all_that_changes(sheet: str) -> None:
    scenario, _ = runs_of(sheet, "timestamp")
    before = scenario.donors[0][: len(scenario.context)]
    changed = [i for i, (a, b) in enumerate(zip(before, scenario.context, strict=True)) if a != b]
    assert 0 < len(changed) <= 6
    assert max(changed) < 40


def test_a_question_ends_where_its_answer_begins() -> None:
    asked = fact_sheet("harbour").questions[0]
    built = BUILDER.ask(asked)
    assert WORDS.decode(built.prompt).endswith(f"assistant\n{asked.lead_in}")
    assert WORDS.decode(built.gold) == f" {asked.gold}"


def test_a_block_has_the_same_tokens_wherever_it_stands() -> None:
    def merging(text: str) -> list[int]:
        # A tokeniser that would merge across the border of two blocks.
        return [hash(pair) for pair in zip(text[::2], text[1::2] + " ", strict=False)]

    builder = PromptBuilder(merging)
    shared, end = builder.tokens("shared block"), builder.tokens("<|im_end|>\n")
    for before in ("odd", "even"):
        assert builder.message("user", before, "shared block")[-len(shared + end) :] == shared + end


def test_lengths_with_the_tokenizer_of_the_demo(encode: Callable[[str], list[int]]) -> None:
    builder = PromptBuilder(encode)
    for sheet in fact_sheets():
        for asked in map(builder.ask, (*sheet.questions, sheet.donor_question)):
            assert len(asked.prompt) <= 25
            assert asked.gold
        for scenario in builder.scenarios(sheet):
            assert 1000 <= len(scenario.context) <= 1950
