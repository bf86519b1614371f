"""Text to tokens and back: the tokenizer of a model folder, and files of text or of token ids.

Owns what can be wrong with an input file. May not know plans.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from radix_rope.content.segment import Tokens
from radix_rope.content.tree import as_tokens
from radix_rope.explain.errors import ExplainError

# Control characters, which a terminal would obey, and those that turn the direction of text, which
# would show it in another order than the model reads it.
_NOT_SHOWN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


class Tokenizer:
    """Encodes as a server does where a request brings `text`: with the model's special tokens."""

    def __init__(self, folder: Path) -> None:
        """Load it; ExplainError where the folder has none."""
        if not folder.is_dir():
            # Anything else would be looked up in the hub.
            raise ExplainError(
                f"--model-path {folder}: there is no such folder; give that of a Hugging Face "
                "model (its tokenizer is enough), or run `radix-rope fetch-model`"
            )
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ExplainError(
                f"the tokenizer needs transformers, which cannot be imported ({error}); it comes "
                "with SGLang"
            ) from error
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # of many kinds, by what is missing or broken
            reason = " ".join(str(error).split())
            raise ExplainError(
                f"--model-path {folder}: no tokenizer can be read there ({reason})"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        # Not verbose: a text longer than the model's context is no mistake here.
        return list(self._tokenizer.encode(text, verbose=False))

    def __len__(self) -> int:
        """Token ids are below this."""
        return len(self._tokenizer)

    def cut(self, tokens: Sequence[int], cuts: Sequence[int]) -> list[str]:
        """The text of `tokens`, cut at token positions.

        Args:
            tokens: token ids.
            cuts: ascending positions; the first is 0 and the last the number of tokens.

        Returns:
            One text between each two cuts. Together they are the text of all tokens. A character
            of several tokens belongs to the one that completes it.
        """
        whole = self._decode(tokens)
        at = [0]
        for cut in cuts[1:-1]:
            # Bytes that are no character yet decode to replacement characters.
            length = len(self._decode(tokens[:cut]).rstrip("\ufffd"))
            at.append(min(max(length, at[-1]), len(whole)))
        at.append(len(whole))
        return [whole[low:high] for low, high in pairwise(at)]

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


def read_tokens(path: Path, tokenizer: Tokenizer, as_ids: bool) -> Tokens:
    """Token ids (int64, (n,), n at least 1) of a file.

    Args:
        path: UTF-8 text, taken as it is, with its last line break.
        tokenizer: of the model.
        as_ids: the file holds token ids instead, as a JSON list.

    Raises:
        ExplainError: it cannot be read, or is empty.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ExplainError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ExplainError(
            f"{path}: not UTF-8 (byte {error.start}); convert it, e.g. with iconv"
        ) from error
    if not text:
        raise ExplainError(f"{path}: the file is empty; there is nothing to plan or to reuse")
    tokens = _parse_ids(path, text, len(tokenizer)) if as_ids else tokenizer.encode(text)
    if not tokens:
        raise ExplainError(f"{path}: holds no token; there is nothing to plan or to reuse")
    return as_tokens(tokens)


def visible(text: str) -> str:
    """Text that is safe to show: control characters as in `\\x1b`, all others as they are."""
    return _NOT_SHOWN.sub(
        lambda match: match[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n")
    )


def _parse_ids(path: Path, text: str, vocabulary: int) -> list[int]:
    try:
        ids = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ExplainError(f"{path}: with --tokens, a JSON list of token ids ({error})") from error
    if not isinstance(ids, list):
        raise ExplainError(f"{path}: with --tokens, a JSON list of token ids")
    for place, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocabulary:
            raise ExplainError(
                f"{path}: entry {place} is {token!r:.40}, no token id of this model; those are "
                f"0 to {vocabulary - 1}"
            )
    return ids
