"""Generated parts of documentation pages, and Markdown tables. Formats, and decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def markdown_table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """A table whose first row is the header; columns not in `left` are aligned right."""
    header, *lines = rows
    rule = tuple(":--" if column in left else "--:" for column in range(len(header)))
    cells = [[cell.replace("|", "\\|") for cell in line] for line in (header, rule, *lines)]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def marks(writer: str) -> tuple[str, str]:
    """The lines between which `writer` (a module name) puts what it generates."""
    line = f"<!-- written by python -m {writer} --write-docs: "
    return f"{line}begin -->", f"{line}end -->"


def write_generated(page: Path, writer: str, text: str) -> None:
    """Replace what `writer` generated on a page before.

    Raises:
        ValueError: the page has no part of this writer.
    """
    begin_mark, end_mark = marks(writer)
    content = page.read_text(encoding="utf-8")
    before, begin, rest = content.partition(begin_mark)
    _, end, after = rest.partition(end_mark)
    if not begin or not end:
        raise ValueError(
            f"{page} has no part to write the results into; it must contain the lines "
            f"{begin_mark!r} and {end_mark!r}"
        )
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")
