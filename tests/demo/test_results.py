"""From records to rows, promises, table and page, on made-up measurements."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from bench.demo.chart import draw
from bench.demo.prompts import MOVED, SCENARIOS
from bench.demo.records import Answer, EngineRun, Timing
from bench.demo.report import (
    WRITER,
    as_json,
    as_markdown,
    as_text,
    thresholds_text,
    write_docs,
)
from bench.demo.results import Results, summarise
from bench.pages import marks
from radix_rope.quality.texts import fact_sheets

SHEETS = fact_sheets()


def engine_run(
    ttft_ms: float, probability: float, right: bool = True, keys: tuple[str, ...] = ()
) -> EngineRun:
    """Every scenario timed three times; the gold token's probability is given."""
    scenarios = keys or tuple(SCENARIOS)
    timings = [
        Timing(key, SHEETS[0].name, 1000, 10, 950, ttft_ms * factor)
        for key in scenarios
        for factor in (1.0, 0.9, 1.4)
    ]
    answers = []
    for key in scenarios:
        for sheet in SHEETS:
            text = f" {sheet.questions[0].gold}.\nMore" if right else " no"
            logprobs = [[math.log(probability)]]
            answers.append(Answer((key, sheet.name, 0), text, [[7]], logprobs, 960))
    return EngineRun([], timings, answers)


STOCK = engine_run(2000.0, 0.9)
OURS = engine_run(100.0, 0.88)
UNROTATED = engine_run(100.0, 0.2, right=False, keys=MOVED)


def summary(ours: EngineRun = OURS, unrotated: EngineRun = UNROTATED) -> Results:
    return summarise(STOCK, ours, unrotated, SHEETS)


def test_rows_hold_medians_ratios_and_counts() -> None:
    rows = {row.scenario: row for row in summary().rows}
    assert list(rows) == list(SCENARIOS)
    row = rows["truncated"]
    assert (row.stock.median_ms, row.stock.min_ms, row.stock.max_ms) == (2000.0, 1800.0, 2800.0)
    assert row.ratio == 20.0
    assert (row.exact_tokens, row.shifted_tokens, row.computed_tokens) == (10, 950, 40)
    assert (row.our_correct, row.stock_correct, row.unrotated_correct) == (2, 2, 0)
    assert row.unrotated_kl_nats is not None and row.unrotated_kl_nats > row.kl_nats > 0
    assert rows["aligned"].unrotated_kl_nats is None


def test_all_promises_kept() -> None:
    assert all(check.passed for check in summary().thresholds)


@pytest.mark.parametrize(
    ("ours", "unrotated", "broken"),
    [
        (engine_run(250.0, 0.88), UNROTATED, "times lower"),
        (engine_run(100.0, 0.88, right=False), UNROTATED, "fewer correct"),
        (engine_run(100.0, 0.4), UNROTATED, "mean KL at most"),
        (OURS, engine_run(100.0, 0.87, keys=MOVED), "without rotation"),
    ],
)
def test_each_promise_can_be_broken(ours: EngineRun, unrotated: EngineRun, broken: str) -> None:
    missed = [check.promise for check in summary(ours, unrotated).thresholds if not check.passed]
    assert missed and any(broken in promise for promise in missed)


def test_lost_answers_are_listed() -> None:
    lost = summary(engine_run(100.0, 0.88, right=False))
    text = thresholds_text(lost)
    assert sum(scored.lost for scored in lost.questions) == len(SCENARIOS) * len(SHEETS)
    assert text.count("lost  ") == len(SCENARIOS) * len(SHEETS)
    assert SHEETS[0].questions[0].gold in text


def test_runs_that_compared_other_tokens_are_refused() -> None:
    other = replace(OURS, answers=[replace(a, token_ids=[[8]]) for a in OURS.answers])
    with pytest.raises(ValueError, match="other tokens"):
        summary(other)


def test_table_has_every_scenario_and_the_counter_example() -> None:
    results = summary()
    for table in (as_text(results), as_markdown(results)):
        for title in SCENARIOS.values():
            assert title in table
        assert "ROTATION OFF" in table
    widths = {line.count("|") for line in as_markdown(results).splitlines()}
    assert len(widths) == 1


def test_an_answer_with_a_bar_stays_in_its_cell() -> None:
    results = summary()
    barred = [replace(row, our_answer="a | b") for row in results.rows]
    lines = as_markdown(replace(results, rows=barred)).splitlines()
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


def test_json_holds_setting_rows_questions_and_promises() -> None:
    read = json.loads(as_json(summary(), {"cores": 2}))
    assert read["setting"] == {"cores": 2}
    assert len(read["rows"]) == len(SCENARIOS)
    assert len(read["questions"]) == len(SCENARIOS) * len(SHEETS)
    assert all(check["passed"] for check in read["thresholds"])


def test_only_the_marked_part_of_a_page_is_written(tmp_path: Path) -> None:
    page, chart = tmp_path / "demo.md", tmp_path / "out" / "demo.png"
    chart.parent.mkdir()
    chart.write_bytes(b"drawn")
    begin, end = marks(WRITER)
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    for _ in range(2):
        write_docs(page, summary(), {"cores": 2}, chart)
        text = page.read_text()
        assert text.startswith("before\n") and text.endswith("\nafter\n")
        assert "old" not in text and "(demo.png)" in text and "cores: 2" in text
        assert text.count(begin) == text.count(end) == 1
        assert (tmp_path / "demo.png").read_bytes() == b"drawn"


def test_a_page_without_marks_is_refused_and_kept(tmp_path: Path) -> None:
    page = tmp_path / "demo.md"
    page.write_text("nothing here\n")
    with pytest.raises(ValueError, match="must contain"):
        write_docs(page, summary(), {}, tmp_path / "demo.png")
    assert page.read_text() == "nothing here\n"


def test_the_chart_is_a_picture(tmp_path: Path) -> None:
    draw(summary(), "made up", tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG\r\n")
