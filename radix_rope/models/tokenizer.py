"""Writes the tokenizer files of a byte-level BPE model from GGUF metadata.

Owns what GGUF only names: the pre-tokenizer behind `tokenizer.ggml.pre` and the
classes that transformers looks up. Knows nothing of weights.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from radix_rope.models.errors import ConversionError
from radix_rope.models.layout import TOKENIZER_FILES

_CONTROL_TOKEN = 3
"""GGUF token type of a token that text never produces by merging."""


def write_tokenizer(metadata: Callable[[str], Any], folder: Path) -> None:
    """Write `TOKENIZER_FILES` into a folder.

    Args:
        metadata: value of a GGUF metadata key.
        folder: existing folder.

    Raises:
        ConversionError: not a GPT-2 style BPE with the `smollm` pre-tokenizer.
    """
    kind = (metadata("tokenizer.ggml.model"), metadata("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ConversionError(
            f"cannot convert the tokenizer {kind[0]!r} with the pre-tokenizer {kind[1]!r}: only "
            f"'gpt2' with 'smollm' is known"
        )
    tokens: list[str] = metadata("tokenizer.ggml.tokens")
    special = {
        "bos_token": tokens[metadata("tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[metadata("tokenizer.ggml.eos_token_id")],
        "pad_token": tokens[metadata("tokenizer.ggml.padding_token_id")],
        "unk_token": tokens[metadata("tokenizer.ggml.unknown_token_id")],
    }
    config = {
        **special,
        "add_bos_token": metadata("tokenizer.ggml.add_bos_token"),
        "add_prefix_space": metadata("tokenizer.ggml.add_space_prefix"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata("llama.context_length"),
        # The class that takes tokenizer.json as it is. GPT2Tokenizer, the original's class,
        # builds its own pre-tokenizer in transformers 5 and would no longer split digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    contents = {
        "tokenizer.json": json.dumps(_tokenizer(metadata, tokens), ensure_ascii=False),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False),
        "special_tokens_map.json": json.dumps(special, indent=2, ensure_ascii=False),
        "chat_template.jinja": metadata("tokenizer.chat_template"),
    }
    for name in TOKENIZER_FILES:
        (folder / name).write_text(contents[name], encoding="utf-8")


def _tokenizer(metadata: Callable[[str], Any], tokens: list[str]) -> dict[str, Any]:
    """Content of tokenizer.json: digits one by one, then GPT-2's split, then BPE."""
    types: list[int] = metadata("tokenizer.ggml.token_type")
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": metadata("tokenizer.ggml.add_space_prefix"),
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": tokens[token_id],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token_id, token_type in enumerate(types)
            if token_type == _CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            # Bytes without a token (some control characters, lead bytes that UTF-8 does not
            # use) are dropped: the unknown token is <|endoftext|>, which would end the text.
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": metadata("tokenizer.ggml.merges"),
        },
    }
