"""Who is asked what, in which order: a whole measurement on clients made up for tests."""

from collections import Counter
from typing import Any

import pytest

from bench.serving.client import Burst
from bench.serving.fit import Size
from bench.serving.measure import Measurement
from bench.serving.presets import CellPlan, LoadPlan, Preset
from bench.serving.records import BASELINE, EXACT_ONLY, OURS, Answer, Cell, Load
from bench.serving.results import load_ratio, speed_up, unshifted_ratio
from bench.serving.writer import Tokens, Vocabulary
from radix_rope.config import RadixRopeConfig
from tests.bench.serving.made import Encode

NAMES = (BASELINE, EXACT_ONLY, OURS)
SPEED = {BASELINE: 1.0, EXACT_ONLY: 1.0, OURS: 5.0}
PLAN = CellPlan("shared_prefix", Size(1024, 90), 3, 2, 1, 2)
LOAD = LoadPlan("truncation", Size(1024, 90), (1.0, float("inf")), 3, 2, 1)


class Made:
    """A client whose server is as fast as `SPEED` says and computes everything."""

    def __init__(self, name: str, sent: list[tuple[str, Tokens]]) -> None:
        self.name, self._sent = name, sent

    def flush(self) -> None:
        self._sent.append((self.name, ()))

    def one(self, prompt: Tokens, output_tokens: int = 1) -> Answer:
        self._sent.append((self.name, prompt))
        return Answer(1000 / SPEED[self.name], len(prompt), 0, 0)

    def burst(self, prompts: Any, rate: float, output_tokens: int, seed: int) -> Burst:
        answers = tuple(self.one(prompt) for prompt in prompts)
        return Burst(answers, {"request_throughput": SPEED[self.name]})


@pytest.fixture(scope="module")
def measured(encode: Encode) -> tuple[Cell, list[Load], list[tuple[str, Tokens]], list[str]]:
    sent: list[tuple[str, Tokens]] = []
    steps: list[str] = []
    vocabulary = Vocabulary(range(100, 40_000), encode)
    preset = Preset((PLAN,), (LOAD,))
    made = Measurement(preset, vocabulary, RadixRopeConfig(), 1, steps.append)
    clients: Any = [Made(name, sent) for name in NAMES]
    made.warm_up(clients)
    cells, loads = list[Cell](), list[Load]()
    made.one_by_one(clients, cells)
    made.under_load(clients, loads)
    assert len(steps) == made.steps(len(NAMES))
    (cell,) = cells
    return cell, loads, sent, steps


def test_every_server_gets_its_share_and_all_of_them_the_controls(measured: Any) -> None:
    cell = measured[0]
    asked = Counter((s.server, s.shifted) for s in cell.samples)
    assert [asked[name, True] for name in NAMES] == [2, 1, 3]
    assert [asked[name, False] for name in NAMES] == [6, 6, 6]
    # Not the first ones: those of a session are shorter.
    got = {
        name: [s.request for s in cell.samples if s.shifted and s.server == name] for name in NAMES
    }
    assert [got[name] for name in NAMES] == [[0, 2], [1], [0, 1, 2]]
    firsts = [s.server for s in cell.samples if s.shifted and s.request == 0][:1]
    firsts += [s.server for s in cell.samples if s.shifted and s.request == 1][:1]
    assert len(set(firsts)) == 2, "another server is first"


def test_ratios_are_taken_over_what_both_were_asked(measured: Any) -> None:
    cell = measured[0]
    for rival in (BASELINE, EXACT_ONLY):
        faster, same = speed_up(cell, rival), unshifted_ratio([cell], rival)
        assert faster is not None and same is not None
        assert faster.median == same.median == pytest.approx(5.0)


def test_bursts_take_turns_and_are_new_each_time(measured: Any) -> None:
    _, loads, sent, _ = measured
    order = [(load.burst, load.server) for load in loads]
    assert order == 2 * [(0, BASELINE), (0, OURS), (1, OURS), (1, BASELINE)]
    assert [load.rate for load in loads] == 4 * [1.0] + 4 * [float("inf")]
    ratio = load_ratio(loads, "truncation", float("inf"))
    assert ratio is not None and ratio.median == pytest.approx(5.0)
    # A flush and the donor come before each rate.
    under_load = sent[-2 * (2 * 2 + 12) :]
    for server in (BASELINE, OURS):
        prompts = Counter(prompt for name, prompt in under_load if name == server)
        assert sorted(prompts.values()) == [1] * 12 + [2, 2], "no request is sent twice"
    assert not any(name == EXACT_ONLY for name, _ in under_load)
