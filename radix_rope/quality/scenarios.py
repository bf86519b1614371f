"""The scenarios of the quality check: what is in the cache, and what is asked after it moved.

Every scenario comes in several variants (other fillers, orders, positions, heads) for each of the
two fact sheets. May not know settings or engines.
"""

from __future__ import annotations

from dataclasses import dataclass

from radix_rope.quality.chat import ChatBlocks, Tokens
from radix_rope.quality.texts import FactSheet, Turn, conversation, document

SCENARIOS = {
    "truncation": "truncated history",
    "prefix_before": "report before the fact sheet (donor at position 0)",
    "reorder": "documents in another order",
    "independent": "independent documents joined",
    "edit": "edit at the head of a long history",
    "repeated": "conversation whose head changes every turn",
}
"""Key and title, in the order of the report."""

VARIANTS = {
    "truncation": 6,
    "prefix_before": 3,
    "reorder": 3,
    "independent": 3,
    "edit": 3,
    "repeated": 1,
}
"""How many variants of a scenario there are for each sheet."""

TURNS_BEHIND_CUT = (5, 0, 4, 1, 2, 3)
"""By variant of `truncation`: turns that are left between the cut and the sheet. What stands right
behind the cut misses its context most, so every distance counts alike."""

_ASSISTANT = "You are a helpful assistant. Answer briefly from what you were told."
_RETRIEVER = "You are a helpful assistant. Answer from the documents below."
_SYSTEMS = (
    _ASSISTANT,
    "You help the people of a small town. Say only what you know.",
    "You are a patient companion on the telephone. Keep every answer short and plain.",
)
_HEADS = (
    ("Current time: 2031-03-14 09:26:53.", "Current time: 2031-03-14 09:41:07."),
    (
        "Current time: 2031-03-14 09:26:53.",
        "Current time: 2031-03-14 09:41:07. Two tools are offline: calendar, maps.",
    ),
    (
        "Visitor: Marta Lindqvist, third visit this week. Current time: 17:05.",
        "Visitor: Ole. Current time: 8:30.",
    ),
)
"""Before and after the edit: as long, longer, shorter."""

_TURN_HEADS = (
    "Current time: 09:26.",
    "Current time: 09:31. One message is waiting.",
    "Current time: 09:44. Two messages are waiting, and the printer is out of paper.",
    "Current time: 10:02. No message is waiting.",
    "Current time: 10:15. The lift is being repaired until noon.",
    "Current time: 10:40.",
    "Current time: 11:07. Lunch is served in the small hall today because of the painters.",
    "Current time: 11:31. Three messages are waiting.",
    "Current time: 11:58. The lift runs again.",
    # As long as the one before: at the same offset a key is not rounded once more.
    "Current time: 11:59. The lift runs again.",
)
"""The head of each turn's prompt in `turn_prompts`."""

MAX_GENERATIONS_MEASURED = len(_TURN_HEADS) - 1


@dataclass(frozen=True, slots=True)
class Case:
    """One context, and what the cache holds when it is asked about.

    Attributes:
        scenario: a key of `SCENARIOS`.
        sheet: name of the fact sheet.
        variant: from 0 on.
        donors: prompts in the cache, each computed alone.
        better_donors: prompts that are in the cache besides where the better donor is measured:
            in them the fact sheet stands behind what it stands behind in `context`. Empty where
            the scenario has none.
        context: the target prompt up to the question.
    """

    scenario: str
    sheet: str
    variant: int
    donors: tuple[Tokens, ...]
    better_donors: tuple[Tokens, ...]
    context: Tokens


class CaseBuilder:
    """Makes the cases of one model."""

    def __init__(self, blocks: ChatBlocks) -> None:
        """blocks: writes conversations in the model's format."""
        self._blocks = blocks

    def case(self, scenario: str, sheet: FactSheet, variant: int) -> Case:
        """One case of a scenario; `repeated` has `turn_prompts` instead."""
        make = {
            "truncation": self._truncation,
            "prefix_before": self._prefix_before,
            "reorder": self._reorder,
            "independent": self._independent,
            "edit": self._edit,
        }[scenario]
        donors, better, context = make(sheet, variant)
        start = self._blocks.start
        return Case(
            scenario,
            sheet.name,
            variant,
            tuple(start + donor for donor in donors),
            tuple(start + donor for donor in better),
            start + context,
        )

    def turn_prompts(self, sheet: FactSheet, generations: int) -> list[Tokens]:
        """The context of each turn of a conversation whose head changes every turn.

        The sheet is told in the first; each later one has one turn more. Text of the first is
        `n` reuses old in context `n`, if it is always taken from the context before.
        """
        blocks = self._blocks
        talk = conversation()
        prompts = []
        for turn in range(generations + 1):
            head = blocks.system(f"{_TURN_HEADS[turn]} ", _ASSISTANT)
            said = (*talk[:2], _told(sheet), *talk[2 : 3 + turn])
            prompts.append(blocks.start + head + blocks.turns(said))
        return prompts

    def _question(self, sheet: FactSheet) -> Tokens:
        """What ends a donor: a question that is never scored."""
        return self._blocks.ask(sheet.donor_question).prompt

    def _history(self, sheet: FactSheet, variant: int, turns: int, later: int) -> Tokens:
        """A conversation in which the sheet is told `later` turns before the end."""
        talk = conversation()
        talk = (*talk[3 * variant :], *talk[: 3 * variant])[:turns]
        # Told late: a small model forgets what stands far back, in a full prefill as well.
        return self._blocks.turns((*talk[:-later], _told(sheet), *talk[-later:]))

    def _truncation(self, sheet: FactSheet, variant: int) -> _Texts:
        blocks = self._blocks
        text = variant % 3
        system = blocks.system(_SYSTEMS[text])
        dropped = (
            (("Sum up this text.\n\n" + document("report_library"), "The library was renewed."),),
            (("Sum up this text.\n\n" + document("report_waterworks"), "A year of good water."),),
            conversation()[:3],
        )[text]
        later = (3, 4, 2, 3, 3, 3)[variant]
        history = self._history(sheet, text, TURNS_BEHIND_CUT[variant] + later, later)
        donor = system + blocks.turns(dropped) + history + self._question(sheet)
        return (donor,), (), system + history

    def _prefix_before(self, sheet: FactSheet, variant: int) -> _Texts:
        blocks = self._blocks
        name = ("report_waterworks", "report_library", "handbook")[variant]
        report = blocks.text(f"Uploaded file:\n\n{document(name)}\n\n")
        # The sheet is told first; stands alone; is told after another turn.
        if variant == 1:
            rest = blocks.text(f"Document:\n\n{sheet.text}\n\n")
        else:
            rest = blocks.system(_SYSTEMS[variant])
            rest += self._history(sheet, variant, turns=2, later=2 - variant // 2)
        question = self._question(sheet)
        # As much of the report as the planner looks at.
        better = report[-300:] + rest + question
        return (rest + question,), (better,), report + rest

    def _documents(self, sheet: FactSheet) -> dict[str, Tokens]:
        texts = {
            "W": document("report_waterworks"),
            "L": document("report_library"),
            "H": document("handbook"),
            "F": sheet.text,
        }
        return {key: self._blocks.text(f"Document:\n\n{text}\n\n") for key, text in texts.items()}

    def _reorder(self, sheet: FactSheet, variant: int) -> _Texts:
        documents = self._documents(sheet)
        head = self._blocks.system(_RETRIEVER)

        def prompt(order: str) -> Tokens:
            return head + tuple(token for key in order for token in documents[key])

        before, after = (("FWL", "WLF"), ("WFL", "LFW"), ("LFW", "WFL"))[variant]
        question = self._question(sheet)
        # The sheet behind its predecessor in `after`, and at another offset than there.
        place = after.index("F")
        better = self._blocks.system(_ASSISTANT, " Read with care, then answer in one line.")
        better += documents[after[place - 1]] + documents["F"] + question
        return (prompt(before) + question,), (better,), prompt(after)

    def _independent(self, sheet: FactSheet, variant: int) -> _Texts:
        blocks = self._blocks
        documents = self._documents(sheet)
        order = ("LWF", "WFL", "HFL")[variant]
        talk = conversation()
        # Alone at position 0; behind an unrelated conversation; behind instructions of its own.
        prefixes = (
            ((), (), ()),
            tuple(
                blocks.system(_SYSTEMS[i]) + blocks.turns(talk[3 * i : 3 * i + 3]) for i in range(3)
            ),
            tuple(blocks.system(f"Archive, shelf {7 * i + 4}. ", _SYSTEMS[i]) for i in range(3)),
        )[variant]
        question = self._question(sheet)
        donors = tuple(
            prefix + documents[key] + question for prefix, key in zip(prefixes, order, strict=True)
        )
        place = order.index("F")
        better = blocks.system(_ASSISTANT, " Read with care, then answer in one line.")
        better += documents[order[place - 1]] + documents["F"] + question
        head = blocks.system(_RETRIEVER)
        return donors, (better,), head + tuple(token for key in order for token in documents[key])

    def _edit(self, sheet: FactSheet, variant: int) -> _Texts:
        blocks = self._blocks
        before, after = (blocks.system(f"{head} ", _SYSTEMS[variant]) for head in _HEADS[variant])
        history = self._history(sheet, variant, turns=(11, 10, 9)[variant], later=3 - variant)
        return (before + history + self._question(sheet),), (), after + history


_Texts = tuple[tuple[Tokens, ...], tuple[Tokens, ...], Tokens]
"""Donors, better donors, context."""


def _told(sheet: FactSheet) -> Turn:
    return f"Please remember this.\n\n{sheet.text}", "Thank you, I will remember it."
