"""An explained prompt as one HTML file that needs nothing else.

Owns what the template is given; `page.html.jinja` owns the look. Prompts are strangers' text: the
template escapes all it prints, and the page allows no script.
"""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from radix_rope.config import RadixRopeConfig
from radix_rope.explain import wording
from radix_rope.explain.parts import Explanation
from radix_rope.explain.text import visible


def render(
    name: str, explanation: Explanation, texts: Sequence[str], config: RadixRopeConfig
) -> str:
    """The page.

    Args:
        name: of the prompt.
        explanation: of the prompt.
        texts: one of each part.
        config: by which it was planned.
    """
    environment = Environment(
        loader=PackageLoader("radix_rope.explain", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = visible
    parts = [
        {
            "number": number,
            "kind": str(part.kind),
            "text": text,
            "line": wording.line(part),
            "cells": list(zip(wording.COLUMNS, wording.cells(number, part), strict=True)),
        }
        for number, (part, text) in enumerate(zip(explanation.parts, texts, strict=True), start=1)
    ]
    return environment.get_template("page.html.jinja").render(
        name=name,
        prompt_tokens=explanation.prompt_tokens,
        parts=parts,
        columns=wording.COLUMNS,
        numbers=wording.NUMBERS,
        sums=wording.sums(explanation),
        meanings=wording.MEANINGS,
        notes=wording.notes(explanation, config),
    )
