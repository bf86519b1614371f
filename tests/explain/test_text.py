"""Text to tokens and back, and the files that cannot be used."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_rope.explain.errors import ExplainError
from radix_rope.explain.text import Tokenizer, read_tokens, visible


@pytest.fixture(scope="module")
def tokenizer(byte_folder: Path) -> Tokenizer:
    return Tokenizer(byte_folder)


@settings(max_examples=100, deadline=None)
@given(
    st.text(st.sampled_from("ab \n<é日🙂\ufffd"), min_size=1, max_size=30),
    st.lists(st.integers(0, 120), max_size=6),
)
def test_pieces_are_the_text_wherever_tokens_are_cut(
    tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text.encode())
    places = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    pieces = tokenizer.cut(tokens, places)
    assert len(pieces) == len(places) - 1
    assert "".join(pieces) == text


def test_a_character_belongs_to_the_token_that_completes_it(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a🙂b")
    assert tokenizer.cut(tokens, [0, 1, 5, 6]) == ["a", "🙂", "b"]
    assert tokenizer.cut(tokens, [0, 3, 6]) == ["a", "🙂b"]
    assert tokenizer.cut(tokens, [0, 2, 4, 6]) == ["a", "", "🙂b"]


def test_the_demo_model_cuts_words_before_their_space(model_folder: Path) -> None:
    tokenizer = Tokenizer(model_folder)
    tokens = tokenizer.encode("<|im_start|>Hello brave world")
    assert tokenizer.cut(tokens, [0, 1, 2, len(tokens)]) == [
        "<|im_start|>",
        "Hello",
        " brave world",
    ]


def test_control_characters_are_shown_and_not_obeyed() -> None:
    hostile = "a\x1b[31m\x07\x9b\u202eb\r\nc\td\re"
    assert visible(hostile) == "a\\x1b[31m\\x07\\x9b\\u202eb\nc\td\\re"
    assert visible("Grüße 日本 🙂 \\x1b") == "Grüße 日本 🙂 \\x1b"


@pytest.mark.parametrize(
    ("content", "as_ids", "said"),
    [
        (b"", False, "empty"),
        (b"caf\xe9", False, "not UTF-8 (byte 3)"),
        (b"[1, 2", True, "JSON list of token ids"),
        (b'{"a": 1}', True, "JSON list of token ids"),
        (b"[" * 100_000, True, "JSON list of token ids"),
        (b"[]", True, "no token"),
        (b"[1, true]", True, "entry 1 is True"),
        (b"[1, 256]", True, "0 to 255"),
        (b"[-1]", True, "entry 0 is -1"),
    ],
)
def test_files_that_cannot_be_used(
    tokenizer: Tokenizer, tmp_path: Path, content: bytes, as_ids: bool, said: str
) -> None:
    path = tmp_path / "P.txt"
    path.write_bytes(content)
    with pytest.raises(ExplainError) as error:
        read_tokens(path, tokenizer, as_ids)
    assert said in str(error.value) and str(path) in str(error.value)
    assert len(str(error.value)) < 400


def test_files_are_taken_as_they_are(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "P.txt"
    path.write_bytes(b"a\r\nb\n")
    assert read_tokens(path, tokenizer, as_ids=False).tolist() == tokenizer.encode("a\r\nb\n")
    path.write_text("[3, 1, 255]")
    assert read_tokens(path, tokenizer, as_ids=True).tolist() == [3, 1, 255]
    with pytest.raises(ExplainError, match="cannot be read"):
        read_tokens(tmp_path / "missing.txt", tokenizer, as_ids=False)
    with pytest.raises(ExplainError, match="cannot be read"):
        read_tokens(tmp_path, tokenizer, as_ids=False)


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ExplainError, match="no such folder"):
        Tokenizer(tmp_path / "owner" / "model")
    with pytest.raises(ExplainError, match="no tokenizer can be read"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ExplainError, match="no tokenizer can be read"):
        Tokenizer(tmp_path)


def test_without_transformers_the_error_says_so(
    byte_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ExplainError, match="needs transformers"):
        Tokenizer(byte_folder)
