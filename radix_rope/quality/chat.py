"""How a model wants a conversation written, as the texts around what the two sides say.

Read once from the tokenizer's chat template by rendering a conversation of marker words, so that
prompts can be put together from blocks that are tokenised alone and have the same tokens wherever
they stand. May not know what is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from radix_rope.quality.texts import Question, Turn

Tokens = tuple[int, ...]

_MARKERS = ("Systemword", "Userwordone", "Replywordone", "Userwordtwo", "Replywordtwo", "Lastword")


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The texts between the parts of a conversation.

    Attributes:
        start: what begins every prompt, once; empty for most models.
        before_system: before the instructions.
        after_system: from the instructions to what the user says.
        to_assistant: from the user to the assistant.
        to_user: from the assistant to the user.
        to_answer: from the last question to the answer that the model is to write.
    """

    start: str
    before_system: str
    after_system: str
    to_assistant: str
    to_user: str
    to_answer: str


CHATML = ChatFormat(
    start="",
    before_system="<|im_start|>system\n",
    after_system="<|im_end|>\n<|im_start|>user\n",
    to_assistant="<|im_end|>\n<|im_start|>assistant\n",
    to_user="<|im_end|>\n<|im_start|>user\n",
    to_answer="<|im_end|>\n<|im_start|>assistant\n",
)
PLAIN = ChatFormat("", "", "\n\nUser: ", "\nAssistant: ", "\nUser: ", "\nAssistant:")


def chat_format(tokenizer: Any) -> ChatFormat:
    """The format of a transformers tokenizer: its template, else ChatML if it has the signs."""
    if not getattr(tokenizer, "chat_template", None):
        known = tokenizer.get_vocab()
        chatml = CHATML if "<|im_start|>" in known and "<|im_end|>" in known else PLAIN
        start = "" if chatml is CHATML or tokenizer.bos_token is None else tokenizer.bos_token
        return ChatFormat(start, *_fields(chatml)[1:])
    system, user, reply, user_two, reply_two, last = _MARKERS
    turns = [
        {"role": "user", "content": user},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": user_two},
        {"role": "assistant", "content": reply_two},
        {"role": "user", "content": last},
    ]
    try:
        parts = _split(_render(tokenizer, [{"role": "system", "content": system}, *turns]))
    except Exception:
        # Some templates raise on, or leave out, a system message: the user says it first.
        turns[0]["content"] = f"{system}\n\n{user}"
        parts = _split(_render(tokenizer, turns))
    before_system, after_system, to_assistant, to_user, _, _, to_answer = parts
    start = tokenizer.bos_token or ""
    if not start or not before_system.startswith(start) or start in "".join(parts[1:]):
        # A sign that opens every message belongs to the messages.
        start = ""
    return ChatFormat(
        start, before_system[len(start) :], after_system, to_assistant, to_user, to_answer
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """One question in tokens: appended to a context, and followed by the known answer."""

    prompt: Tokens
    gold: Tokens


class ChatBlocks:
    """Makes prompts out of blocks that are tokenised one by one."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: of transformers, or anything with its `encode` and template attributes."""
        self._tokenizer = tokenizer
        self._format = chat_format(tokenizer)
        self.start = self.text(self._format.start)

    def text(self, text: str) -> Tokens:
        """One block, tokenised alone."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False)) if text else ()

    def system(self, *blocks: str) -> Tokens:
        """Instructions; what follows is said by the user."""
        form = self._format
        return self._join(form.before_system, *blocks, form.after_system)

    def turns(self, turns: tuple[Turn, ...]) -> Tokens:
        """A piece of conversation; what follows is said by the user."""
        form = self._format
        return tuple(
            token
            for user, assistant in turns
            for token in self._join(user, form.to_assistant, assistant, form.to_user)
        )

    def ask(self, question: Question) -> Asked:
        """A question, the beginning of the assistant's answer, and the known rest of it."""
        lead_in = self.text(question.lead_in)
        whole = self.text(f"{question.lead_in} {question.gold}")
        joined = whole[: len(lead_in)] == lead_in
        gold = whole[len(lead_in) :] if joined else self.text(f" {question.gold}")
        return Asked(self._join(question.question, self._format.to_answer) + lead_in, gold)

    def _join(self, *blocks: str) -> Tokens:
        return tuple(token for block in blocks for token in self.text(block))


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _split(text: str) -> list[str]:
    """The texts before, between and after the markers.

    Raises:
        ValueError: the template drops or repeats what is said.
    """
    parts = []
    for marker in _MARKERS:
        before, found, text = text.partition(marker)
        if not found or marker in text:
            raise ValueError(
                "the chat template of this model leaves out or repeats messages of a plain "
                "conversation, so its prompts cannot be built from blocks"
            )
        parts.append(before)
    return [*parts, text]


def _fields(form: ChatFormat) -> tuple[str, ...]:
    return (
        form.start,
        form.before_system,
        form.after_system,
        form.to_assistant,
        form.to_user,
        form.to_answer,
    )
