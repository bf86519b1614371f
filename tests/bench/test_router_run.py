"""`python -m bench.router` from its command line to its files, on stand-in servers."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import bench.router.__main__ as router_run
import bench.router.measure as router_measure
from bench.pages import marks
from bench.router.measure import POLICIES, Cell, Shares
from bench.router.report import Results, as_markdown
from bench.router.workloads import Size, workloads
from bench.workers import Worker
from tests.bench.stand_in import stand_in

Run = Callable[..., int]
SMALL = Size(groups=4, members=2, block=60, unique=10, window=2, wave=2)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("\n".join(("before", *marks("bench.router"), "after")), encoding="utf-8")
    return page


@pytest.fixture
def started() -> list[tuple[str, ...]]:
    """The routers that were started: policy and options."""
    return []


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    page: Path,
    started: list[tuple[str, ...]],
) -> Run:
    """Run the benchmark; every router `fails_after` so many requests."""

    def run(fails_after: int = -1) -> int:
        def start_worker(model: object, name: str, cache: str, log: Path, **_: object) -> Worker:
            return stand_in(name, log)

        def start_router(
            workers: Sequence[Worker], policy: str, log: Path, *options: str
        ) -> Worker:
            started.append((policy, *options))
            front = stand_in("worker-1", log, fails_after)
            front.wait_until_ready()
            return front

        monkeypatch.setattr(router_run, "worker", start_worker)
        monkeypatch.setattr(router_measure, "router", start_router)
        monkeypatch.setattr(router_run, "fetch_model", lambda *_: tmp_path)
        monkeypatch.setattr(router_run, "Size", lambda: SMALL)
        monkeypatch.setattr(router_run, "PAIRS", 10)
        return router_run.main(["--output", str(tmp_path), "--write-docs", str(page)])

    return run


def test_every_policy_meets_every_workload(
    run: Run, tmp_path: Path, page: Path, started: list[tuple[str, ...]]
) -> None:
    assert run() == 0
    assert started == [(policy.name, *policy.options) for policy in POLICIES]
    assert ("manual", "--assignment-mode", "min_group") in started
    cells = json.loads((tmp_path / "router.json").read_text())["cells"]
    assert len(cells) == len(POLICIES) * 4
    sent = {
        (one.title, number): sum(len(prompt) for wave in one.waves for prompt in wave)
        for number in range(2)
        for one in workloads(router_run.SEED + number, SMALL)
    }
    for cell in cells:
        assert len(cell["runs"]) == 2
        for number, shares in enumerate(cell["runs"]):
            assert shares["prompt_tokens"] == sent[cell["workload"], number]
            assert 0 <= shares["exact_tokens"] < shares["prompt_tokens"]
            # The stand-in is one worker, whatever the policy.
            assert shares["busiest"] == 1
    assert (tmp_path / "router.png").exists()
    assert "| shared prefix, unique tail | manual min_group, RoutingMemory |" in page.read_text()


def test_what_was_measured_before_a_failure_is_kept(
    run: Run, tmp_path: Path, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = page.read_text(encoding="utf-8")
    # A workload has 8 requests: the third of the first policy is not finished.
    assert run(fails_after=20) == 1
    shown = capsys.readouterr().err
    refused = "router: worker-1 refused a request: HTTP Error 500"
    assert sum(line.startswith(refused) for line in shown.splitlines()) == 1
    assert "Traceback" not in shown
    kept: dict[str, Any] = json.loads((tmp_path / "router.incomplete.json").read_text())
    assert "HTTP Error 500" in kept["incomplete"]
    assert [(cell["policy"], len(cell["runs"])) for cell in kept["cells"]] == [("random", 1)] * 2
    assert page.read_text(encoding="utf-8") == before
    assert not (tmp_path / "router.json").exists()


def test_shares_of_the_table_add_up() -> None:
    runs = [Shares(200, 50, 100, 0.5), Shares(200, 30, 100, 0.75)]
    text = as_markdown(
        Results([Cell("sessions", "random", runs)], [(0.5, 0.3, 0.31)], {"seed": 1}), "chart.png"
    )
    assert (
        "| sessions | random | 20.0% | 50.0% | 30.0% (25.0-35.0) | 62.5% (50.0-75.0) |"
        in text.splitlines()
    )
    assert "| 50% | 30% | 31% |" in text.splitlines()
