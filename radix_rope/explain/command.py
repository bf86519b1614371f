"""`radix-rope explain`: reads the files, plans, prints, writes."""

from __future__ import annotations

import argparse
import sys

from radix_rope.config import ConfigError, RadixRopeConfig, config_from_env, parse_config
from radix_rope.explain.cached import CachedRequests
from radix_rope.explain.errors import ExplainError
from radix_rope.explain.html import render
from radix_rope.explain.parts import explain
from radix_rope.explain.terminal import make_console, show
from radix_rope.explain.text import Tokenizer, read_tokens

EXPLAINED, WRONG = 0, 2
"""Exit codes: shown; something that was given cannot be used."""


def explain_command(arguments: argparse.Namespace) -> int:
    """Explain one prompt after its donors."""
    try:
        _explain(arguments)
    except (ConfigError, ExplainError) as error:
        reason = str(error).removeprefix("radix_rope: ")
        print(f"radix-rope explain: {reason}", file=sys.stderr)
        return WRONG
    return EXPLAINED


def _explain(arguments: argparse.Namespace) -> None:
    config = _config(arguments.radix_rope_config)
    if arguments.page_size < 1:
        raise ExplainError(f"--page-size {arguments.page_size}: it must be at least 1")
    tokenizer = Tokenizer(arguments.model_path)
    # All files are read before any is used: an error names its file at once.
    donors = [(str(p), read_tokens(p, tokenizer, arguments.tokens)) for p in arguments.donors]
    prompt = read_tokens(arguments.prompt, tokenizer, arguments.tokens)
    cached = CachedRequests(config.stride, arguments.page_size)
    try:
        for name, tokens in donors:
            cached.add(name, tokens)
    except ValueError as error:
        raise ExplainError(f"--donors {name}: {error}") from error
    explanation = explain(cached, prompt, config)
    texts = None
    if arguments.html is not None or not arguments.no_text:
        cuts = [0, *(part.end for part in explanation.parts)]
        texts = tokenizer.cut(prompt.tolist(), cuts)
    show(make_console(), explanation, None if arguments.no_text else texts, config)
    if arguments.html is not None:
        assert texts is not None
        page = render(str(arguments.prompt), explanation, texts, config)
        try:
            arguments.html.write_text(page, encoding="utf-8")
        except OSError as error:
            raise ExplainError(
                f"--html {arguments.html}: cannot be written ({error.strerror})"
            ) from error


def _config(text: str | None) -> RadixRopeConfig:
    """What `--radix-rope-config` says, or the environment, as a server reads them."""
    return config_from_env() if text is None else parse_config(text)
