"""Long English text that is there wherever Python is: the documentation of its own library."""

import argparse
import collections
import inspect
import logging
import re
import subprocess
from collections.abc import Callable


def english_documents(encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Distinct English documents of 300 tokens: no 16 tokens occur in two places."""
    text = " ".join(
        re.sub(r"\s+", " ", doc)
        for module in (argparse, logging, subprocess, collections)
        for _, member in sorted(vars(module).items())
        if (doc := inspect.getdoc(member)) and len(doc) > 80
    )
    tokens: list[int] = []
    seen: set[tuple[int, ...]] = set()
    for token in encode(text):
        tokens.append(token)
        window = tuple(tokens[-16:])
        if len(window) == 16 and window in seen:
            tokens.pop()
        seen.add(window)
    found = [tokens[i : i + 300] for i in range(0, len(tokens) - 300, 300)]
    assert len(found) >= 20
    return found
