"""Generated parts of pages, and the chart that goes beside them."""

from pathlib import Path

import pytest

from bench.pages import marks, write_generated

BEGIN, END = marks("bench.x")


def page_in(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    page = folder / "page.md"
    page.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    return page


@pytest.mark.parametrize("results", ["docs", "elsewhere"])
def test_the_part_is_replaced_and_the_chart_stands_beside(tmp_path: Path, results: str) -> None:
    page = page_in(tmp_path / "docs")
    chart = tmp_path / results / "x.png"
    chart.parent.mkdir(exist_ok=True)
    chart.write_bytes(b"picture")
    write_generated(page, "bench.x", "new", chart)
    assert page.read_text() == f"above\n{BEGIN}\n\nnew\n\n{END}\nbelow\n"
    assert (page.parent / "x.png").read_bytes() == b"picture"


def test_a_page_without_the_part_is_left_alone(tmp_path: Path) -> None:
    page = page_in(tmp_path)
    before = page.read_text()
    with pytest.raises(ValueError, match="it must contain the lines"):
        write_generated(page, "bench.y", "new")
    assert page.read_text() == before
