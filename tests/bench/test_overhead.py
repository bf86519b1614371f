"""The order of the overhead benchmark and its ratios, on servers made up for tests."""

from types import SimpleNamespace
from typing import Any

import pytest

from bench.overhead import DEFAULT, OURS, QUICK, STOCK, Contestant, as_markdown, measure, summarise
from bench.serving.client import Burst
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


def test_servers_take_turns_and_another_begins_each_round() -> None:
    servers, asked = contestants()
    samples = measure(servers, QUICK, seed=1)
    assert len(samples) == QUICK.rounds * 2 * len(SPEED)
    begins = [name for name, count in asked if not count]
    # Two workloads a round, of the warm-up round too; every server's cache is emptied in each.
    firsts = begins[:: 2 * len(SPEED)]
    assert firsts == [DEFAULT, STOCK, OURS][: QUICK.rounds + 1]
    singles = [name for name, count in asked if count == 1]
    assert [set(singles[i : i + 3]) for i in range(0, len(singles), 3)] == [set(SPEED)] * (
        len(singles) // 3
    )


def test_ratios_and_verdicts() -> None:
    rows = summarise(measure(contestants()[0], QUICK, seed=1))
    ratios = {(row["workload"], row["against"]): row["throughput_ratio"][1] for row in rows}
    assert ratios["unique", STOCK] == pytest.approx(2.0)
    assert ratios["chats", DEFAULT] == pytest.approx(1.0)
    assert {row["ttft_ratio"][1] for row in rows if row["against"] == STOCK} == {0.5}
    text = as_markdown(rows, {"cores": 2})
    assert text.count("pass  ") == 4 and "cores: 2" in text
    slow = [{**rows[0], "throughput_ratio": [0.9, 0.95, 0.97], "within_target": False}]
    assert "MISS  unique prompts" in as_markdown(slow, {})


def test_a_moved_token_would_be_a_mistake_of_the_workload() -> None:
    with pytest.raises(ValueError, match="moved"):
        measure(contestants(moved=3)[0], QUICK, seed=1)
