"""Prompts of the demo as token lists: the blocks they are made of, and the six scenarios.

Every block is tokenised alone and prompts are concatenations of blocks, so a block has the same
tokens wherever it stands. May not know the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from radix_rope.quality.texts import FactSheet, Question, Turn, conversation, document

Tokens = tuple[int, ...]
Encode = Callable[[str], Sequence[int]]

SCENARIOS = {
    "aligned": "aligned prefix (control)",
    "truncated": "truncated history",
    "report": "report in front of the system prompt",
    "agents": "two agents, one instruction block",
    "documents": "documents in another order",
    "timestamp": "timestamp changed at the top",
}
"""Key and title of every scenario, in the order of the table."""

MOVED = ("truncated", "report", "agents", "documents")
"""Scenarios in which reused content stands at another offset than before."""

_ASSISTANT = "You are a helpful assistant. Answer briefly from what you were told."
_ANALYST = "You are an analyst of a consulting company. Read what you are given and comment on it."
_RETRIEVER = "You are a helpful assistant. Answer from the documents below."
_CLERK = "You are the clerk for visitors. Be brief."
_MATE = (
    "You are the night assistant. You work alone from ten in the evening until six in the "
    "morning, answer every visitor who is still awake, and leave a short note for the day shift "
    "when something has to be repaired, delivered or explained to a person in the office."
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is in the cache, and what is asked.

    Attributes:
        key: a key of `SCENARIOS`.
        donors: prompts sent before, which fill the cache.
        context: the target prompt up to the question.
    """

    key: str
    donors: tuple[Tokens, ...]
    context: Tokens


@dataclass(frozen=True, slots=True)
class Asked:
    """One question in tokens: appended to a context, and followed by the known answer."""

    prompt: Tokens
    gold: Tokens


class PromptBuilder:
    """Makes prompts of one tokeniser in ChatML, the format of the demo model.

    encode: text to token ids, without a start or end token of its own.
    """

    def __init__(self, encode: Encode) -> None:
        """Keep the tokeniser."""
        self._encode = encode

    def tokens(self, text: str) -> Tokens:
        """One block, tokenised alone."""
        return tuple(self._encode(text))

    def message(self, role: str, *blocks: str) -> Tokens:
        """One message; its blocks are tokenised one by one."""
        body = [token for block in blocks for token in self.tokens(block)]
        return (*self.tokens(f"<|im_start|>{role}\n"), *body, *self.tokens("<|im_end|>\n"))

    def turns(self, turns: Sequence[Turn]) -> Tokens:
        """A piece of conversation."""
        return tuple(
            token
            for user, assistant in turns
            for part in (self.message("user", user), self.message("assistant", assistant))
            for token in part
        )

    def ask(self, question: Question) -> Asked:
        """A question, the beginning of the assistant's answer, and the known rest of it."""
        prompt = (
            *self.message("user", question.question),
            *self.tokens("<|im_start|>assistant\n"),
            *self.tokens(question.lead_in),
        )
        return Asked(prompt, self.tokens(" " + question.gold))

    def scenarios(self, sheet: FactSheet) -> tuple[Scenario, ...]:
        """The six scenarios about one fact sheet, in the order of `SCENARIOS`."""
        last = self.ask(sheet.donor_question).prompt
        told = (f"Please remember this.\n\n{sheet.text}", "Thank you, I will remember it.")
        # Told late: a model this small forgets what stands far back, with stock SGLang as well.
        earlier, later = conversation()[:-3], conversation()[-3:]
        history = self.turns((*earlier, told, *later))

        system = self.message("system", _ASSISTANT)
        aligned = Scenario("aligned", (system + history + last,), system + history)

        pasted = self.turns(
            [(f"Sum up this text.\n\n{document('report_library')}", "The library was renewed.")]
        )
        truncated = Scenario("truncated", (system + pasted + history + last,), system + history)

        report = self.message("user", f"Uploaded file:\n\n{document('report_waterworks')}")
        shorter = system + self.turns((*earlier[:5], told, *later))
        report_before = self.message("system", _ANALYST) + report
        comment = self.message("user", "What do you think of it?")
        uploaded = Scenario("report", (report_before + comment, shorter + last), report + shorter)

        shared = (
            f"{document('handbook')}\n\n",
            f"{sheet.text}\n\n",
            f"Appendix: a text that visitors ask about.\n\n{document('report_library')}",
        )
        clerk = self.message("system", f"{_CLERK}\n\n", *shared)
        agents = Scenario(
            "agents", (clerk + last,), self.message("system", f"{_MATE}\n\n", *shared)
        )

        waterworks = self.message("user", f"Document:\n\n{document('report_waterworks')}")
        library = self.message("user", f"Document:\n\n{document('report_library')}")
        facts = self.message("user", f"Document:\n\n{sheet.text}")
        head = self.message("system", _RETRIEVER)
        documents = Scenario(
            "documents",
            (head + waterworks + facts + library + last,),
            head + library + waterworks + facts,
        )

        before = self.message("system", "Current time: 2031-03-14 09:26:53.", f" {_ASSISTANT}")
        after = self.message("system", "Current time: 2031-03-14 09:41:07.", f" {_ASSISTANT}")
        timestamp = Scenario("timestamp", (before + history + last,), after + history)
        return aligned, truncated, uploaded, agents, documents, timestamp
