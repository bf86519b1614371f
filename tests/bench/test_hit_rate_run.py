"""`python -m bench.hit_rate` from its command line to its files, on stand-in servers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import bench.hit_rate.__main__ as hit_rate
from bench.hit_rate.law import Prices, Tokens
from bench.hit_rate.measure import Counted, Law
from bench.hit_rate.report import Results, Side, as_markdown
from bench.hit_rate.verdict import verdicts
from bench.pages import marks
from bench.workers import Worker
from tests.bench.stand_in import stand_in

Run = Callable[..., int]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("\n".join(("before", *marks("bench.hit_rate"), "after")), encoding="utf-8")
    return page


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page: Path) -> Run:
    """Run the benchmark; `ours_fails_after` so many requests."""

    def run(ours_fails_after: int = -1) -> int:
        def start(model: object, name: str, cache: str, log: Path, **options: object) -> Worker:
            return stand_in(name, log, ours_fails_after if name == "radix_rope" else -1)

        monkeypatch.setattr(hit_rate, "worker", start)
        monkeypatch.setattr(hit_rate, "fetch_model", lambda *_: tmp_path)
        return hit_rate.main(["--output", str(tmp_path), "--write-docs", str(page)])

    return run


def test_everything_is_counted_and_written(run: Run, tmp_path: Path, page: Path) -> None:
    (tmp_path / "hit_rate.incomplete.json").write_text("of an earlier run")
    assert run() == 0
    written = json.loads((tmp_path / "hit_rate.json").read_text())
    # A prefix cache on both sides: equal, and the law holds to the token.
    assert written["stock"] == written["ours"]
    assert [law["turns"] for law in written["stock"]["laws"]] == [10, 20, 40, 10]
    assert len(written["stock"]["cases"]) == 9
    assert "pass  at most 1 percentage point" in page.read_text(encoding="utf-8")
    assert "either server: 0.00" in page.read_text(encoding="utf-8")
    assert (tmp_path / "hit_rate.png").exists()
    assert not (tmp_path / "hit_rate.incomplete.json").exists()


def test_what_was_measured_before_a_failure_is_kept(
    run: Run, tmp_path: Path, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = page.read_text(encoding="utf-8")
    assert run(ours_fails_after=12) == 1
    shown = capsys.readouterr().err
    refused = "hit_rate: radix_rope refused a request: HTTP Error 500"
    assert sum(line.startswith(refused) for line in shown.splitlines()) == 1
    assert "Traceback" not in shown
    kept = json.loads((tmp_path / "hit_rate.incomplete.json").read_text())
    assert "HTTP Error 500" in kept["incomplete"]
    assert len(kept["stock"]["laws"]) == 4 and len(kept["stock"]["cases"]) == 9
    # It refused in the second session of the law.
    assert [law["turns"] for law in kept["ours"]["laws"]] == [10]
    assert page.read_text(encoding="utf-8") == before
    assert not (tmp_path / "hit_rate.json").exists()


def made(model: Tokens) -> Results:
    """Stock with a case of its own, and ours with `model` in the case of another model."""
    law = Law(10, 64, 1, Tokens(read=2880, write=600, uncached=40))

    def side(tokens: Tokens) -> Side:
        return Side(
            [law],
            [
                Counted("clock", "a clock", Tokens(read=10, shifted=80, write=5, uncached=5)),
                Counted("model", "another model, half-way", tokens),
            ],
        )

    stock = side(Tokens(read=50, write=40, uncached=10))
    return Results(stock, side(model), Prices(), {"seed": 1})


@pytest.mark.parametrize(
    ("ours", "kept"),
    [
        (Tokens(read=50, write=40, uncached=10), True),
        (Tokens(read=60, write=30, uncached=10), False),
        (Tokens(read=50, shifted=10, write=30, uncached=10), False),
        (Tokens(read=40, shifted=10, write=40, uncached=10), False),
    ],
    ids=["as stock", "more exact", "some shifted", "shifted for exact"],
)
def test_another_model_must_reuse_nothing_of_the_first(ours: Tokens, kept: bool) -> None:
    law, model = verdicts(made(ours))
    assert law[0] and model[0] is kept
    assert model[1].startswith("another model, half-way: nothing of the first is reused")


def test_the_law_is_a_promise_of_both_servers() -> None:
    results = made(Tokens(read=50, write=40, uncached=10))
    off = Law(10, 64, 1, Tokens(read=2800, write=680, uncached=40))
    broken = replace(results, stock=replace(results.stock, laws=[off]))
    assert [passed for passed, _ in verdicts(broken)] == [False, True]


def test_shares_of_the_table_add_up() -> None:
    text = as_markdown(made(Tokens(read=50, write=40, uncached=10)), "chart.png", ["pass  it"])
    rows: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith("| a clock"):
            rows.setdefault("clock", [cell.strip() for cell in line.strip("|").split("|")])
    assert rows["clock"] == ["a clock", "100", "90.0%", "90.0%", "10.0%", "80.0%"]
    # 0.1 * 10 + 0.1 * 80 to read, 1.25 * 5 to write, 5 uncached, of 100.
    assert "0.09 + 0.06 + 0.05 | 0.20" in text
    assert text.endswith("```\npass  it\n```")
