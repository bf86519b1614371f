"""The built-in texts: fact sheets with known answers, and prose to put around them.

Owns reading the files in `texts/`, all of them written for this project, all facts invented. May
not know tokens, prompts or models.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

SHEETS = ("harbour", "observatory")
DOCUMENTS = ("handbook", "report_library", "report_waterworks")

Turn = tuple[str, str]
"""What the user said and what the assistant answered."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a fact sheet.

    Attributes:
        question: what is asked.
        lead_in: how the answer begins; a small model then continues with the fact.
        gold: the fact, as it stands in the sheet.
    """

    question: str
    lead_in: str
    gold: str


@dataclass(frozen=True, slots=True)
class FactSheet:
    """Invented facts, one a sentence, and questions about them.

    Attributes:
        name: one of `SHEETS`.
        title: its first line.
        sentences: the facts.
        questions: the questions that are scored.
        donor_question: one more, for filling a cache without asking what is scored.
    """

    name: str
    title: str
    sentences: tuple[str, ...]
    questions: tuple[Question, ...]
    donor_question: Question

    @property
    def text(self) -> str:
        """Title and sentences, one a line."""
        return "\n".join((self.title, *self.sentences))


@cache
def fact_sheet(name: str) -> FactSheet:
    """Read one fact sheet.

    Raises:
        KeyError: no sheet has this name; the message lists those that exist.
    """
    if name not in SHEETS:
        raise KeyError(f"there is no fact sheet {name!r}; there are {', '.join(SHEETS)}")
    raw = json.loads(_read(f"sheet_{name}.json"))
    return FactSheet(
        name=raw["name"],
        title=raw["title"],
        sentences=tuple(raw["sentences"]),
        questions=tuple(Question(**question) for question in raw["questions"]),
        donor_question=Question(**raw["donor_question"]),
    )


def fact_sheets() -> tuple[FactSheet, ...]:
    """All fact sheets, in the order of `SHEETS`."""
    return tuple(fact_sheet(name) for name in SHEETS)


@cache
def conversation() -> tuple[Turn, ...]:
    """A conversation about everyday things, about 100 tokens a turn; no fact of any sheet."""
    return tuple((user, assistant) for user, assistant in json.loads(_read("conversation.json")))


@cache
def document(name: str) -> str:
    """One of `DOCUMENTS`, 450 to 750 tokens of prose; no fact of any sheet.

    Raises:
        KeyError: no document has this name; the message lists those that exist.
    """
    if name not in DOCUMENTS:
        raise KeyError(f"there is no document {name!r}; there are {', '.join(DOCUMENTS)}")
    return _read(f"{name}.txt").strip()


def _read(file_name: str) -> str:
    return files("radix_rope.quality").joinpath("texts", file_name).read_text(encoding="utf-8")
