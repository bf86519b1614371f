"""Ratios, promises, tables and the page, on made-up samples."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.pages import marks
from bench.serving.chart import draw
from bench.serving.records import BASELINE, EXACT_ONLY, OURS, Answer, Cell, Load, Sample
from bench.serving.report import as_json, as_markdown, write_docs
from bench.serving.results import (
    checks,
    limit_ratio,
    load_ratio,
    shares,
    speed_up,
    ttft,
    unshifted_ratio,
)


def sample(
    server: str, shifted: bool, request: int, ttft_ms: float, counts: tuple[int, int] | None
) -> Sample:
    exact, moved = counts or (None, None)
    return Sample(server, shifted, request, 0, 51, Answer(ttft_ms, 1024, exact, moved))


def cell(workload: str = "shared_prefix", ours_ms: float = 200.0) -> Cell:
    samples = []
    for i, slower in enumerate((1.0, 1.1, 1.2)):
        samples += [
            sample(BASELINE, True, i, 2000 * slower, (0, 0)),
            sample(OURS, True, i, ours_ms, (0, 973)),
            sample(BASELINE, False, i, 150, (973, 0)),
            sample(EXACT_ONLY, False, i, 150, (973, 0)),
            sample(OURS, False, i, 151, (973, 0)),
        ]
    samples.append(sample("llama.cpp", True, 0, 900, None))
    return Cell(workload, "a workload", 1024, 95, tuple(samples))


def load(server: str, rate: float, served: float, burst: int = 0) -> Load:
    metrics = {
        "request_throughput": served,
        "median_ttft_ms": 100.0,
        "p90_ttft_ms": 200.0,
        "p99_ttft_ms": 300.0,
    }
    return Load("shared_prefix", "a workload", 1024, 95, rate, burst, server, metrics, ())


def test_ratio_is_that_of_medians_with_the_range_by_request() -> None:
    ratio = speed_up(cell())
    assert ratio is not None
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((11.0, 10.0, 12.0))
    time = ttft(cell(), BASELINE, shifted=True)
    assert time is not None
    assert (time.median, time.low, time.high) == pytest.approx((2200, 2000, 2400))


def test_unshifted_and_limit() -> None:
    same = unshifted_ratio([cell(), cell()])
    near = limit_ratio([cell()])
    assert same is not None and near is not None
    assert same.median == pytest.approx(150 / 151)
    assert near.median == pytest.approx(150 / 200)


def test_what_was_not_measured_has_no_ratio() -> None:
    alone = Cell("session", "t", 1024, 95, (sample(OURS, True, 0, 1, (0, 973)),))
    assert speed_up(alone) is None
    assert unshifted_ratio([alone]) is None
    assert load_ratio([load(OURS, 1.0, 1.0)], "shared_prefix", 1.0) is None


def test_shares_are_unknown_where_a_server_does_not_report_them() -> None:
    ours = shares(cell(), OURS)
    assert ours is not None
    assert (ours.exact_tokens, ours.shifted_tokens, ours.computed_tokens) == (0, 973, 51)
    assert shares(cell(), "llama.cpp") is None


def test_promises() -> None:
    loads = [load(BASELINE, float("inf"), 0.5), load(OURS, float("inf"), 1.4)]
    found = {check.promise: check.passed for check in checks([cell()], loads)}
    assert len(found) == 6
    assert [passed for promise, passed in found.items() if "times lower" in promise] == [True]
    assert [passed for promise, passed in found.items() if "at saturation" in promise] == [False]
    assert [passed for promise, passed in found.items() if "unshifted," in promise] == [True, True]
    slow = {c.promise: c.passed for c in checks([cell(ours_ms=400)], [])}
    assert [p for p, passed in slow.items() if not passed and "times lower" in p]
    assert [p for p, passed in slow.items() if not passed and "plain prefill" in p]
    # No promise was made for this workload.
    assert not [c for c in checks([cell("fan_out")], []) if "times lower" in c.promise]


def test_both_trees_are_rivals_where_both_were_measured() -> None:
    both = cell()
    slower = [sample(EXACT_ONLY, True, 0, 1500, (0, 0))]
    found = [c for c in checks([replace(both, samples=both.samples + tuple(slower))], [])]
    lower = {c.promise: (c.measured, c.passed) for c in found if "times lower" in c.promise}
    assert [passed for _, passed in lower.values()] == [True, False]
    assert ["RadixCache" in promise for promise in lower] == [False, True]
    assert list(lower.values())[1][0] == "7.5 times (7.5-7.5)"


def test_bursts_are_compared_one_by_one() -> None:
    loads = [
        load(server, float("inf"), served, burst)
        for server, speeds in ((BASELINE, (1.0, 2.0)), (OURS, (4.0, 6.0)))
        for burst, served in enumerate(speeds)
    ]
    ratio = load_ratio(loads, "shared_prefix", float("inf"))
    assert ratio is not None
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((10 / 3, 3.0, 4.0))
    (row,) = (line for line in as_markdown([], loads, {}).splitlines() if OURS in line)
    assert "| 5.00 (4.00-6.00) |" in row and "| 3.3 (3.0-4.0) |" in row


def test_a_wrong_count_is_noticed() -> None:
    odd = Cell("session", "t", 1024, 95, (sample(OURS, True, 0, 1, (0, 900)),))
    check = checks([odd], [])[-1]
    assert (check.measured, check.passed) == ("0 of 1", False)


def test_files(tmp_path: Path) -> None:
    loads = [load(s, r, 1.0) for s in (BASELINE, OURS) for r in (0.5, float("inf"))]
    setting = {"processor": "a", "cores": 2}
    markdown = as_markdown([cell()], loads, setting)
    row = next(line for line in markdown.splitlines() if line.startswith("| a workload"))
    assert "| 0 / 973 / 51 |" in row
    assert "| 2,200 (2,000-2,400) |" in row
    assert "| 11.0 (10.0-12.0) |" in row
    data = json.loads(as_json([cell()], loads, setting))
    assert data["cells"][0]["samples"][1]["answer"]["shifted_tokens"] == 973
    assert data["loads"][-1]["rate"] == "inf"
    draw([cell()], loads, "cores: 2", tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_page(tmp_path: Path) -> None:
    page, chart = tmp_path / "page.md", tmp_path / "out" / "x.png"
    chart.parent.mkdir()
    chart.write_bytes(b"drawn")
    begin, end = marks("bench.serving --preset short")
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    write_docs(page, "short", "the table", chart)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert "the table" in text and "](x.png)" in text and "old" not in text
    assert (tmp_path / "x.png").read_bytes() == b"drawn"
    with pytest.raises(ValueError, match="no part to write the results into"):
        write_docs(page, "claims", "the table", chart)
