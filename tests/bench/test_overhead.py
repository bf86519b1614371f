"""The order of the overhead benchmark and its ratios, on servers made up for tests."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import overhead
from bench.overhead import (
    DEFAULT,
    FULL,
    OURS,
    QUICK,
    STOCK,
    Contestant,
    Sample,
    as_markdown,
    measure,
    summarise,
)
from bench.pages import marks
from bench.serving.client import Burst, RequestError
from bench.serving.records import Answer

SPEED = {DEFAULT: 10.0, STOCK: 5.0, OURS: 10.0}


class Made:
    """A client whose server answers at a speed of its own and notes who was asked."""

    def __init__(self, name: str, asked: list[tuple[str, int]], moved: int = 0) -> None:
        self.name, self._asked, self._moved = name, asked, moved

    def flush(self) -> None:
        self._asked.append((self.name, 0))

    def one(self, prompt: tuple[int, ...]) -> Answer:
        self._asked.append((self.name, 1))
        return Answer(1000 / SPEED[self.name], len(prompt), 0, 0)

    def burst(self, prompts: Any, rate: float, output_tokens: int, seed: int) -> Burst:
        self._asked.append((self.name, len(prompts)))
        metrics = {"completed": len(prompts), "request_throughput": SPEED[self.name]}
        return Burst(tuple(Answer(1.0, len(p), 0, self._moved) for p in prompts), metrics)


def contestants(moved: int = 0) -> tuple[list[Contestant], list[tuple[str, int]]]:
    asked: list[tuple[str, int]] = []
    clock = iter(range(1_000_000))
    scheduler: Any = SimpleNamespace(
        cpu_times=lambda: SimpleNamespace(user=float(next(clock)), system=0.0)
    )
    made: Any = [Made(name, asked, moved) for name in SPEED]
    return [Contestant(client, scheduler) for client in made], asked


def test_servers_take_turns_and_follow_one_another_equally_often() -> None:
    servers, asked = contestants()
    size = replace(FULL, prompt_tokens=4)
    samples: list[Sample] = []
    measure(servers, size, 1, samples)
    assert len(samples) == size.rounds * 2 * len(SPEED)
    # Every server's cache is emptied once in each round of each workload.
    rounds = grouped(name for name, count in asked if not count)
    assert len(rounds) == 2 * (size.rounds + 1)
    singles = grouped(name for name, count in asked if count == 1)
    assert len(singles) == 2 * (size.rounds + 1) * size.singles
    # The warm-up round comes first and is not counted.
    for turns in (rounds[2:], singles[2 * size.singles :]):
        assert {frozenset(turn) for turn in turns} == {frozenset(SPEED)}
        assert len(set(Counter(turn[0] for turn in turns).values())) == 1
        pairs = Counter(pair for turn in turns for pair in pairwise(turn))
        assert len(pairs) == 6 and len(set(pairs.values())) == 1


def measured() -> list[dict[str, Any]]:
    samples: list[Sample] = []
    measure(contestants()[0], QUICK, 1, samples)
    return summarise(samples)


def grouped(names: Iterable[str]) -> list[tuple[str, ...]]:
    return list(zip(*[iter(names)] * len(SPEED), strict=True))


def test_ratios_and_verdicts() -> None:
    rows = measured()
    ratios = {(row["workload"], row["against"]): row["throughput_ratio"][1] for row in rows}
    assert ratios["unique", STOCK] == pytest.approx(2.0)
    assert ratios["chats", DEFAULT] == pytest.approx(1.0)
    assert {row["ttft_ratio"][1] for row in rows if row["against"] == STOCK} == {0.5}
    text = as_markdown(rows, {"cores": 2})
    assert text.count("pass  ") == 8 and "cores: 2" in text


@pytest.mark.parametrize(
    ("speed", "missed"), [(9.81, False), (9.79, True)], ids=["within", "too slow"]
)
def test_both_targets_are_two_percent(
    monkeypatch: pytest.MonkeyPatch, speed: float, missed: bool
) -> None:
    # The server that was made up is as slow in requests/s as in TTFT.
    monkeypatch.setitem(SPEED, OURS, speed)
    rows = measured()
    text = as_markdown([row for row in rows if row["against"] == DEFAULT], {})
    assert text.count("MISS  ") == 4 * missed and text.count("pass  ") == 4 * (not missed)
    for target in ("at least 0.98 of the requests/s", "at most 1/0.98 = 1.0204 of the TTFT"):
        for workload in ("unique prompts", "append-only chats"):
            assert f"{'MISS' if missed else 'pass'}  {workload}: {target}" in text


def test_what_was_measured_before_a_failure_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, int]] = []

    class Failing(Made):
        def __init__(self, name: str, *_: object) -> None:
            super().__init__(name, asked)

        def one(self, prompt: tuple[int, ...]) -> Answer:
            if len(asked) > 40:
                raise RequestError(f"{self.name} lost a request")
            return super().one(prompt)

    class Server:
        url = "http://127.0.0.1:1"

        def __getattr__(self, name: str) -> Any:
            return lambda: None

    scheduler = contestants()[0][0].scheduler
    monkeypatch.setattr(overhead, "Client", Failing)
    monkeypatch.setattr(overhead, "sglang_server", lambda *_: Server())
    monkeypatch.setattr(overhead, "_scheduler", lambda _: scheduler)
    monkeypatch.setattr(overhead, "fetch_model", lambda *_: tmp_path)
    monkeypatch.setattr(overhead, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda _: None))
    page = tmp_path / "page.md"
    page.write_text("\n".join(marks("bench.overhead")))
    arguments = ["--quick", "--output", str(tmp_path), "--write-docs", str(page)]
    assert overhead.main(arguments) == 1
    shown = capsys.readouterr().err
    assert "lost a request" in shown and "Traceback" not in shown
    kept = json.loads((tmp_path / "overhead.incomplete.json").read_text())
    assert "lost a request" in kept["incomplete"]
    assert [(one["workload"], one["round"]) for one in kept["samples"]] == [("unique", 1)] * 3
    assert page.read_text() == "\n".join(marks("bench.overhead"))
    assert not (tmp_path / "overhead.json").exists()


def test_a_moved_token_would_be_a_mistake_of_the_workload() -> None:
    with pytest.raises(ValueError, match="moved"):
        measure(contestants(moved=3)[0], QUICK, 1, [])
