"""The matching benchmark: both caches hold the same, ours finds what stock can't, verdicts."""

import pytest

pytest.importorskip("sglang")

from bench.match import report
from bench.match.caches import NODE_TOKENS, PATH_NODES, Caches
from bench.match.measure import measure_inserts, measure_matches
from bench.match.timing import Clock, Timing, on_top


@pytest.fixture(scope="module")
def caches() -> Caches:
    made = Caches(seed=1)
    made.fill((PATH_NODES + 2) * NODE_TOKENS)
    return made


def test_both_caches_hold_the_same_nodes(caches: Caches) -> None:
    assert len(caches.nodes) == PATH_NODES + 2 and len(caches.paths) == 2
    assert caches.stock.total_size() == caches.ours.total_size() == len(caches.nodes) * NODE_TOKENS
    caches.ours.check_invariants()


@pytest.mark.parametrize(
    ("layout", "share"), [("shifted", 0.0), ("shifted", 0.95), ("prefix", 0.5)]
)
def test_ours_finds_what_the_request_shares(caches: Caches, layout: str, share: float) -> None:
    stock, ours = Clock(), Clock()
    found = 0
    for turn in range(4):
        request = getattr(caches, layout)(8192, share, turn)
        found += caches.ask(request, stock, ours, stock_first=bool(turn % 2))
    assert len(stock.wall_s) == len(ours.wall_s) == 4
    # All but the recomputed heads of the runs, and a prefix in full.
    assert share * 0.9 * 4 * 8192 <= found <= max(share, 0.01) * 1.1 * 4 * 8192


def test_rows_of_a_measurement_make_the_tables(caches: Caches) -> None:
    matches = measure_matches([caches], 1024, 0.5, "prefix", 2)
    inserts = [measure_inserts(caches, 2)]
    assert matches[0]["reused_share"] == 0.5
    assert len(report.matches_table(matches).splitlines()) == 3
    assert inserts[0]["cached_tokens"] == (PATH_NODES + 2) * NODE_TOKENS
    assert len(report.inserts_table(inserts).splitlines()) == 3


def test_on_top_is_taken_call_by_call() -> None:
    stock, ours = Clock([1.0, 2.0, 3.0], [1.0] * 3), Clock([1.5, 2.5, 9.0], [1.25] * 3)
    timing = on_top(ours, stock)
    assert (timing.median_ms, timing.cpu_ms) == (500.0, 250.0)


def row(cached: int, request: int, ms: float) -> dict[str, object]:
    timing = vars(Timing(ms, ms, ms, ms))
    return {
        "cached_tokens": cached, "request_tokens": request, "layout": "shifted", "hit_share": 0.5,
        "reused_share": 0.5, "stock": timing, "ours": timing, "on_top": timing, "ratio": 1.0,
        "bytes_per_token": 5.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("large_ms", "insert_ms", "worst_bytes", "missed"),
    [
        (1.4, 0.5, 6.0, []),
        (1.6, 0.5, 6.0, ["grows"]),
        (2.5, 0.5, 6.0, ["grows", "8,192 tokens against 1,000,000"]),
        (1.0, 1.1, 6.0, ["inserting"]),
        (1.0, 0.5, 8.1, ["bytes"]),
    ],
)
def test_verdicts(large_ms: float, insert_ms: float, worst_bytes: float, missed: list[str]) -> None:
    numbers = {
        "matches": [row(100_000, 8192, 1.0), row(1_000_000, 8192, large_ms)],
        "inserts": [row(100_000, 8192, insert_ms)],
        "worst_index_bytes_per_token": worst_bytes,
        "memory": {
            "cached_tokens": 1,
            "allocated_bytes_per_token": 5.0,
            "reported_bytes_per_token": 5.0,
        },
    }
    lines = report.verdicts(numbers)
    assert len(lines) == 4
    misses = [line for line in lines if line.startswith("MISS")]
    assert len(misses) == len(missed)
    assert all(word in line for word, line in zip(missed, misses, strict=True))
