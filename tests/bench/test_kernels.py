"""The kernel benchmark: what it measures adds up, and what it writes says what was measured."""

import json
from pathlib import Path

import pytest
import torch

from bench.kernels import report
from bench.kernels.__main__ import main
from bench.kernels.cases import SHAPES, Result, fitting
from bench.pages import marks


def result(contestant: str, tokens: int, gb_per_s: float, ratio: float) -> Result:
    return Result("A", 2, "float32", tokens, contestant, 1.0, gb_per_s, ratio, ratio, ratio)


RESULTS = [
    result("torch buf[dst]=buf[src]", 16, 4.0, 0.8),
    result("torch index_copy_", 16, 5.0, 1.0),
    result("move: cpu", 16, 6.0, 1.2),
    result("move: torch", 16, 2.0, 0.4),
    result("torch buf[dst]=buf[src]", 2048, 5.0, 1.0),
    result("torch index_copy_", 2048, 4.0, 0.8),
    result("move: cpu", 2048, 3.5, 0.7),
]


def test_table_rates_kernels_against_the_faster_copy_and_three_step_torch() -> None:
    lines = report.as_markdown(RESULTS).splitlines()
    assert lines[2] == ("| A | 2 | float32 | 16 | 5.00 | 6.00 | 2.00 | 1.20 (1.20 to 1.20) | 3.0 |")
    assert lines[3] == "| A | 2 | float32 | 2,048 | 5.00 | 3.50 |  | 0.70 (0.70 to 0.70) |  |"


def test_a_case_below_the_target_is_a_miss() -> None:
    (line,) = report.verdicts(RESULTS)
    assert line.startswith("MISS  cpu: 0.8") and "0.70 (A, float32, 2,048 tokens), 1 of 2" in line
    (line,) = report.verdicts(RESULTS[:4])
    assert line.startswith("pass  cpu")
    assert report.verdicts([result("move: triton", 16, 1.0, 0.84)])[0].startswith("MISS")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_pools_keep_the_limit(shape: object) -> None:
    assert shape in SHAPES
    for tokens in (16, 32768):
        cut = fitting(shape, torch.float32, tokens, 1.0)  # type: ignore[arg-type]
        assert cut.layers >= 1
        assert cut.bytes_per_token(torch.float32) * 2 * tokens <= 1 << 30


def test_a_run_writes_json_and_both_parts_of_the_page(tmp_path: Path) -> None:
    page, numbers = tmp_path / "page.md", tmp_path / "out" / "numbers.json"
    parts = [marks(report.PARTS[part]) for part in ("cpu", "errors")]
    page.write_text("before\n" + "\nbetween\n".join("\nold\n".join(p) for p in parts) + "\nafter")
    main(
        ["--tokens", "16", "--dtypes", "float32", "--shapes", "DeepSeek-V2-Lite", "--rounds", "1",
         "--max-gib", "0.001", "--json", str(numbers), "--write-docs", str(page)]
    )  # fmt: skip
    contestants = {r["contestant"] for r in json.loads(numbers.read_text())["results"]}
    assert {"move: cpu", "move: torch", *report.COPIES[:2]} == contestants
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter") and "old" not in text
    assert "| DeepSeek-V2-Lite |" in text and "| float8_e5m2 | the last copy |" in text
