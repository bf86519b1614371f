"""A stand-in tokeniser and a plain search for shared runs, for tests without a model."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bench.demo.prompts import Tokens

_PIECES = re.compile(r"<\|im_start\|>|<\|im_end\|>|\d| ?[^\W\d]+|\s|[^\w\s]")


class WordTokenizer:
    """One token per word, digit, white space or sign; gives a text back unchanged."""

    def __init__(self) -> None:
        self.words: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self.words.setdefault(p, len(self.words)) for p in _PIECES.findall(text)]

    def decode(self, tokens: Sequence[int]) -> str:
        words = list(self.words)
        return "".join(words[token] for token in tokens)


@dataclass(frozen=True)
class SharedRun:
    """context[begin:end] occurs in a donor, `delta` tokens earlier (negative: later)."""

    begin: int
    end: int
    delta: int


def shared_runs(context: Tokens, donors: Sequence[Tokens], least: int = 40) -> list[SharedRun]:
    """Left to right, the longest run of at least `least` tokens that any donor shares."""
    runs = []
    position = 0
    while position <= len(context) - least:
        best = SharedRun(position, position, 0)
        for donor in donors:
            for at in range(len(donor)):
                length = 0
                while (
                    position + length < len(context)
                    and at + length < len(donor)
                    and context[position + length] == donor[at + length]
                ):
                    length += 1
                if length > best.end - position:
                    best = SharedRun(position, position + length, position - at)
        if best.end - position >= least:
            runs.append(best)
            position = best.end
        else:
            position += 1
    return runs
