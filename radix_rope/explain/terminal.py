"""An explained prompt on a terminal, or in a pipe without colours.

Owns the look; `rich` owns escape codes and knows where they are unwanted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import TextIOWrapper

from rich.console import Console
from rich.table import Table
from rich.text import Text

from radix_rope.config import RadixRopeConfig
from radix_rope.explain import wording
from radix_rope.explain.parts import Explanation, Kind, Part
from radix_rope.explain.text import visible

# Backgrounds, so that spaces are seen too; what is computed looks as always.
STYLES = {
    Kind.EXACT: "black on green",
    Kind.REUSED: "black on cyan",
    Kind.RECOMPUTED: "black on yellow",
    Kind.COMPUTED: "",
}

_PLAIN_WIDTH = 10_000
"""Columns where no terminal limits them: a part's row stays one line, for grep."""


def make_console() -> Console:
    """Standard output; without any escape code in a pipe, under NO_COLOR, on a dumb terminal."""
    if isinstance(sys.stdout, TextIOWrapper):
        # A prompt may hold what the terminal's encoding cannot say.
        sys.stdout.reconfigure(errors="backslashreplace")
    console = Console(highlight=False, markup=False, emoji=False)
    if console.no_color or console.color_system is None:
        return Console(
            color_system=None,
            force_terminal=False,
            width=None if console.is_terminal else _PLAIN_WIDTH,
            highlight=False,
            markup=False,
            emoji=False,
        )
    return console


def show(
    console: Console,
    explanation: Explanation,
    texts: Sequence[str] | None,
    config: RadixRopeConfig,
) -> None:
    """Print the prompt's text by parts, then table, sums and notes.

    Args:
        console: from `make_console`.
        explanation: of the prompt.
        texts: one of each part; None leaves the text out.
        config: by which it was planned.
    """
    if texts is not None:
        console.print(_prompt(explanation.parts, texts, console), soft_wrap=True)
        console.print()
    console.print(_table(explanation, console))
    console.print()
    console.print(_sums(explanation))
    console.print()
    for note in wording.notes(explanation, config):
        console.print(Text(visible(note)))


def _prompt(parts: Sequence[Part], texts: Sequence[str], console: Console) -> Text:
    coloured = console.color_system is not None
    prompt = Text()
    for number, (part, text) in enumerate(zip(parts, texts, strict=True), start=1):
        if coloured:
            prompt.append(f"{number} ", "bold reverse")
        else:
            prompt.append(f"[{number} {_mark(part)}]")
        prompt.append(visible(text), STYLES[part.kind])
    return prompt


def _mark(part: Part) -> str:
    if part.origin is None:
        return str(part.kind)
    donors = visible(", ".join(part.origin.donors))
    moved = f" {part.origin.delta:+d}" if part.kind is not Kind.EXACT else ""
    return f"{part.kind} from {donors}{moved}"


def _table(explanation: Explanation, console: Console) -> Table:
    table = _new_table()
    for column in wording.COLUMNS:
        is_number = column in wording.NUMBERS
        table.add_column(
            # On a terminal the donors' names need the room.
            column.replace(" ", "\n") if console.is_terminal else column,
            justify="right" if is_number else "left",
            no_wrap=is_number,
            overflow="fold",
        )
    for number, part in enumerate(explanation.parts, start=1):
        cells = [Text(visible(cell)) for cell in wording.cells(number, part)]
        cells[1].stylize(STYLES[part.kind])
        table.add_row(*cells)
    return table


def _sums(explanation: Explanation) -> Table:
    table = _new_table()
    table.add_column("")
    table.add_column("tokens", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    for kind, count, share in wording.sums(explanation):
        table.add_row(
            Text(str(kind), STYLES[kind]), str(count), share, Text(wording.MEANINGS[kind])
        )
    table.add_row("prompt", str(explanation.prompt_tokens), "", "")
    return table


def _new_table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
