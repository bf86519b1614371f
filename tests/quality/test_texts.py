"""The built-in texts: facts that can be found, in one place only."""

import pytest

from radix_rope.quality.texts import (
    DOCUMENTS,
    FactSheet,
    conversation,
    document,
    fact_sheet,
    fact_sheets,
)

SHEETS = fact_sheets()


def prose() -> str:
    turns = [part for turn in conversation() for part in turn]
    return "\n".join([*turns, *map(document, DOCUMENTS)])


def test_enough_questions_over_enough_sheets() -> None:
    assert len(SHEETS) >= 2
    assert all(len(sheet.questions) >= 10 for sheet in SHEETS)


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.name)
def test_lead_in_and_gold_are_one_sentence_of_the_sheet(sheet: FactSheet) -> None:
    for asked in (*sheet.questions, sheet.donor_question):
        assert f"{asked.lead_in} {asked.gold}." in sheet.sentences


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.name)
def test_a_gold_answer_stands_once_in_its_sheet_and_nowhere_else(sheet: FactSheet) -> None:
    others = prose() + "".join(other.text for other in SHEETS if other is not sheet)
    for asked in sheet.questions:
        assert sheet.text.count(asked.gold) == 1
        # A colour is an everyday word; names, codes and numbers must be unique.
        if not asked.gold.islower():
            assert asked.gold.casefold() not in others.casefold()
        assert asked.lead_in.casefold() not in others.casefold()


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.name)
def test_the_donor_question_gives_no_scored_answer_away(sheet: FactSheet) -> None:
    assert sheet.donor_question not in sheet.questions
    assert all(asked.gold not in sheet.donor_question.lead_in for asked in sheet.questions)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(KeyError, match="harbour"):
        fact_sheet("garden")
    with pytest.raises(KeyError, match="handbook"):
        document("novel")
