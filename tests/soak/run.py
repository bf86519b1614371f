"""One soak: the engine, its memory while the load runs, and the verdict.

Everything that must hold is listed in `Verdict.failures`; nothing here depends on how fast the
machine is.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.integration.engines import EngineUnderTest
from tests.soak.load import Load
from tests.soak.prompts import Known, Tokens, Turn

# Small on purpose: the requests that run together want more slots than there are, so that donors
# are evicted and requests retracted all the time, and chunks cut runs.
ENGINE: dict[str, Any] = {
    "max_total_tokens": 2400,
    "max_running_requests": 12,
    "chunked_prefill_size": 256,
    "enable_mixed_chunk": True,
    "schedule_conservativeness": 0.1,
    "context_length": 1500,
}
# SGLang's own accounts of every slot, after each batch; at idle they are checked anyway.
CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
# Between two slices of the load everything must be idle, free or cached, and in step.
SLICE_SECONDS = 20.0
# On a starved machine a slice takes longer, and every third one retracts.
MIN_SLICES = 3
MIN_SLICE_SECONDS = 5.0
CONFIG = {"check_plans": True, "min_run_tokens": 24, "recompute_tokens": 8, "stride": 16}

# Once the first half is over, everything that is allocated on first use is there.
GROWTH_ALLOWED = 0.05
GROWTH_ALLOWED_MIB = 40.0


@dataclass
class Verdict:
    """What a soak found."""

    summary: dict[str, Any]
    failures: list[str]


class Memory:
    """Samples the resident memory of a process in a thread."""

    def __init__(self, process: psutil.Process, interval_seconds: float) -> None:
        self.samples: list[tuple[float, float]] = []
        self._process = process
        self._interval = interval_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._begin = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def growth_mib(self) -> tuple[float, float]:
        """Median of the third and of the last quarter of the time, MiB."""
        values = [mib for _, mib in self.samples]
        quarter = max(1, len(values) // 4)
        third = values[-2 * quarter : -quarter] or values
        return statistics.median(third), statistics.median(values[-quarter:])

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            mib = self._process.memory_info().rss / 2**20
            self.samples.append((time.monotonic() - self._begin, mib))


def start_engine(model: Path) -> EngineUnderTest:
    """The engine of a soak."""
    os.environ.update(CHECKS)
    try:
        return EngineUnderTest(model, "radix_rope", CONFIG, **ENGINE)
    finally:
        for name in CHECKS:
            del os.environ[name]


def soak(
    engine: EngineUnderTest,
    documents: list[Tokens],
    known: list[Known],
    chats: list[list[Turn]],
    seconds: float,
    seed: int,
) -> Verdict:
    """Run the load for a time and check everything at the end."""
    scheduler = next(p for p in engine.processes if "scheduler" in " ".join(p.cmdline()))
    load = Load(engine, documents, known, chats, seed)
    memory = Memory(scheduler, max(0.5, seconds / 120))
    begin = time.monotonic()
    failures: list[str] = []
    slices = 0
    try:
        while not failures:
            left = seconds - (time.monotonic() - begin)
            if left <= 0 and slices >= MIN_SLICES:
                break
            # SGLang's own test switch: retract every few steps, besides where memory is short.
            engine.probe("set_test_retract", on=slices % 3 == 1)
            load.run(min(SLICE_SECONDS, max(left, MIN_SLICE_SECONDS)), slices)
            engine.probe("set_test_retract", on=False)
            slices += 1
            _expect_nothing_lost(engine, failures, f"after slice {slices} of the load")
    finally:
        memory.stop()
    lasted = time.monotonic() - begin
    load.check_known()
    engine.flush()
    _expect_nothing_lost(engine, failures, "after a flush")
    state = engine.probe("accounting")
    if state["available"] != state["total"]:
        failures.append(f"slots are in use after a flush: {state}")
    tally = load.tally
    failures += tally.deviations
    if tally.exact_answers != tally.exact_answers_compared:
        failures.append(f"{tally.exact_answers} exact answers, {tally.exact_answers_compared} seen")
    settled, last = memory.growth_mib()
    if last > settled * (1 + GROWTH_ALLOWED) + GROWTH_ALLOWED_MIB:
        failures.append(f"memory grew from {settled:.0f} to {last:.0f} MiB")
    for name, count in {
        "retractions": tally.retractions,
        "tokens from moved KV": tally.tokens["shifted"],
        "tokens from exact prefixes": tally.tokens["exact"],
        "exact answers compared": tally.exact_answers_compared,
        "aborts": tally.requests["abort"],
    }.items():
        if not count:
            failures.append(f"the load had no {name}: it shows nothing about them")
    summary = {
        "seconds": round(lasted),
        "times_checked_at_rest": slices + 2,
        "requests": dict(sorted(tally.requests.items())),
        "prompt_tokens": tally.tokens["prompt"],
        "tokens_from_moved_kv": tally.tokens["shifted"],
        "tokens_from_exact_prefixes": tally.tokens["exact"],
        "pool_tokens": ENGINE["max_total_tokens"],
        "retractions": tally.retractions,
        "exact_answers_compared": tally.exact_answers_compared,
        "donors_refused": engine.probe("refused_donors"),
        "memory_mib_third_quarter": round(settled),
        "memory_mib_last_quarter": round(last),
        "memory_mib_curve": " ".join(f"{s:.0f}s:{mib:.0f}" for s, mib in memory.samples[::6]),
        "failures": len(failures),
    }
    return Verdict(summary, failures)


def _expect_nothing_lost(engine: EngineUnderTest, failures: list[str], when: str) -> None:
    try:
        engine.assert_nothing_lost()
    except AssertionError as error:
        failures.append(f"{when}: {error}")
