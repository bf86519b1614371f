"""What content matching costs beside stock SGLang, on the same keys, in one process.

Fills a stock `RadixCache` and a `ContentTree` with the same tokens, then asks both the same
requests in turns: stock `match_prefix`, and the plan (search, ranking, rows) for what stock did not
find. Prints medians with spread, the ratio, the index's memory, inserts, and adversarial inputs.

    python bench/match.py            # all sizes, some minutes
    python bench/match.py --quick    # small sizes, seconds
    python bench/match.py --json out/match.json

Every timed call finds the processor's caches cold: a buffer larger than them is read before it.
CPU times are of the calling thread and do not count what other processes take away.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from radix_rope.content import ContentTree, ReusePlan, Segment, check_plan, make_plan, search

Tokens = npt.NDArray[np.int64]
Adversary = tuple[str, list[Tokens], Tokens]

NODE_TOKENS = 8192
PATH_NODES = 16
SLICE_TOKENS = 2048
VOCABULARY = 128_000


@dataclass
class Timing:
    """Milliseconds over the repetitions: wall clock and CPU."""

    median_ms: float
    low_ms: float  # 10th percentile
    high_ms: float  # 90th percentile
    cpu_ms: float

    @classmethod
    def of(cls, wall: list[float], cpu: list[float]) -> Timing:
        """Summarise seconds."""
        low, median, high = np.percentile(np.array(wall) * 1e3, [10, 50, 90]).tolist()
        return cls(median, low, high, float(np.median(cpu)) * 1e3)

    def __str__(self) -> str:
        """Median and spread."""
        return f"{self.median_ms:.3f} [{self.low_ms:.3f}, {self.high_ms:.3f}]"


class Clock:
    """Collects timings of one kind of call."""

    def __init__(self) -> None:
        """Start empty."""
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def __call__(self, call: Callable[[], Any]) -> Any:
        """Run and time one call."""
        cpu, wall = time.thread_time(), time.perf_counter()
        result = call()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.thread_time() - cpu)
        return result

    @property
    def timing(self) -> Timing:
        """What was measured."""
        return Timing.of(self.wall, self.cpu)


class Caches:
    """The two caches with the same content: paths of 16 nodes of 8,192 tokens each."""

    def __init__(self, seed: int) -> None:
        """Start empty."""
        from sglang.srt.mem_cache.radix_cache import RadixCache

        self.random = np.random.default_rng(seed)
        self.stock = RadixCache.create_simulated()
        self.tree = ContentTree()
        self.nodes: list[Tokens] = []
        self.paths: list[Tokens] = []
        self._parent: Segment | None = None
        self._path: list[Tokens] = []
        self.stock_insert, self.our_insert = Clock(), Clock()
        self.worst_bytes_per_token = 0.0

    def fresh(self, size: int) -> Tokens:
        """Random tokens."""
        return self.random.integers(0, VOCABULARY, size)

    def fill(self, cached_tokens: int) -> None:
        """Add nodes up to `cached_tokens`."""
        while self.tree.stats.cached_tokens + NODE_TOKENS <= cached_tokens:
            self.add_node()

    def add_node(self) -> None:
        """Insert one more node of new tokens into both."""
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        if len(self._path) == PATH_NODES:
            self._path, self._parent = [], None
        tokens = self.fresh(NODE_TOKENS)
        self._path.append(tokens)
        path = np.concatenate(self._path)
        params = InsertParams(
            key=RadixKey(array("q", path.tobytes())),
            value=torch.arange(len(path), dtype=torch.int64),
        )
        self.stock_insert(lambda: self.stock.insert(params))
        self._parent = self.our_insert(
            lambda: self.tree.insert(self._parent, tokens, namespace=None)
        )
        self.nodes.append(tokens)
        if len(self._path) > 1:
            self.paths.pop()
        self.paths.append(path)
        stats = self.tree.stats
        if stats.cached_tokens > 50_000:  # below, the filter's smallest size decides
            ratio = stats.index_bytes / stats.cached_tokens
            self.worst_bytes_per_token = max(self.worst_bytes_per_token, ratio)

    def shifted(self, size: int, share: float, turn: int) -> Tokens:
        """A request of slices of cached nodes at other offsets, and of new tokens.

        Where the hits stand depends on `turn` alone: all cache sizes are asked alike.
        """
        pattern = np.random.default_rng(turn)
        parts, length = [self.fresh(5)], 5
        while length < size:
            if pattern.random() < share:
                node = self.nodes[int(self.random.integers(len(self.nodes)))]
                start = int(self.random.integers(0, NODE_TOKENS - SLICE_TOKENS))
                part = node[start : start + SLICE_TOKENS]
            else:
                part = self.fresh(SLICE_TOKENS)
            parts.append(part)
            length += len(part)
        return np.concatenate(parts)[:size]

    def prefix(self, size: int, share: float, turn: int) -> Tokens:
        """A request that begins as a cached path does and goes on with new tokens."""
        path = self.paths[int(self.random.integers(len(self.paths)))]
        known = path[: int(size * share)]
        return np.concatenate([known, self.fresh(size - len(known))])


COLD = np.zeros(1 << 23, dtype=np.int64)  # 64 MiB


def measure_matches(
    all_caches: list[Caches], size: int, share: float, layout: str, repeat: int
) -> list[Any]:
    """Time both on the same requests; returns one row of the table per cache.

    Caches of all sizes take turns, so that what else the machine does falls on all of them alike.
    """
    stocks, ours = [Clock() for _ in all_caches], [Clock() for _ in all_caches]
    reused = [0] * len(all_caches)
    for turn in range(repeat + 1):
        for i, caches in enumerate(all_caches):
            request = getattr(caches, layout)(size, share, turn)
            warm_up = turn == 0
            clocks = (Clock(), Clock()) if warm_up else (stocks[i], ours[i])
            plan = ask_both(caches, request, *clocks, stock_first=bool(turn % 2))
            if plan is not None and not warm_up:
                reused[i] += plan.reused_tokens
    return [
        {
            "cached_tokens": caches.tree.stats.cached_tokens,
            "request_tokens": size,
            "hit_share": share,
            "layout": layout,
            "reused_share": reused[i] / repeat / size,
            "stock": asdict(stocks[i].timing),
            "ours": asdict(ours[i].timing),
            "ratio": (stocks[i].timing.median_ms + ours[i].timing.median_ms)
            / stocks[i].timing.median_ms,
        }
        for i, caches in enumerate(all_caches)
    ]


def ask_both(
    caches: Caches, request: Tokens, stock: Clock, ours: Clock, stock_first: bool
) -> ReusePlan | None:
    """Ask stock for its match and us for the plan of the rest; returns our plan."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tokens = array("q", request.tobytes())

    def ask_stock() -> int:
        params = MatchPrefixParams(key=RadixKey(tokens))
        return int(caches.stock.match_prefix(params).device_prefix_len)

    begin = min(ask_stock(), len(tokens) - 1)

    def ask_ours() -> ReusePlan | None:
        view = np.frombuffer(tokens, dtype=np.int64)
        return make_plan(caches.tree, view, begin, len(view), None)

    COLD.sum()
    if stock_first:
        stock(ask_stock)
        COLD.sum()
    plan: ReusePlan | None = ours(ask_ours)
    if not stock_first:
        COLD.sum()
        stock(ask_stock)
    return plan


def adversarial(random: np.random.Generator, scale: int) -> Iterator[Adversary]:
    """(name, cached documents, request) for inputs made to cost as much as possible."""

    def fresh(size: int) -> Tokens:
        return random.integers(0, VOCABULARY, size)

    n = 100_000 // scale
    one = np.full(n, 7)
    yield "one token, same length cached", [one], np.concatenate([fresh(3), one])
    yield "one token, 512 cached", [one[:512]], one
    documents = [np.concatenate([[i], one[:2000]]) for i in range(200)]
    yield "one token, 200 documents", documents, one
    for period in (3, 33, 1000):
        tiled = np.tile(fresh(period), n // period)
        yield f"period {period}", [tiled], np.concatenate([fresh(3), tiled])
    base = fresh(4096)
    documents = []
    for _ in range(5000 // scale):
        copy = base.copy()
        copy[random.integers(0, 4096, 8)] = fresh(8)
        documents.append(np.concatenate([fresh(int(random.integers(1, 64))), copy]))
    many = f"{len(documents):,} near duplicates"
    yield f"{many}, one more", documents, np.concatenate([fresh(17), base])
    yield f"{many}, one of them 8 times", documents, np.tile(documents[7], 8)
    inner = fresh(300)

    def copies(count: int) -> Tokens:
        gaps = [fresh(int(random.integers(1, 40))) for _ in range(count)]
        return np.concatenate([part for gap in gaps for part in (gap, inner)])

    count = 300 // scale
    whole = copies(count)
    yield f"{count} copies in one document, itself", [whole], np.concatenate([fresh(3), whole])
    yield f"{count} copies in one document, as many others", [whole], copies(count)
    pieces = [fresh(96) for _ in range(n // 100)]
    documents = [np.concatenate([x for p in pieces for x in (fresh(3), p)]) for _ in range(40)]
    request = np.concatenate([x for p in pieces for x in (fresh(4), p)])
    yield "pieces of 96 tokens, 40 donors each", documents, request


def measure_adversarial(name: str, documents: list[Tokens], request: Tokens, repeat: int) -> Any:
    """Time one adversarial input; returns one row of the table."""
    tree = ContentTree()
    for document in documents:
        tree.insert(None, document, namespace=None)
    size, clock = len(request), Clock()
    for turn in range(repeat + 1):
        before = tree.stats.comparisons, tree.stats.runs_found, tree.stats.budget_exhausted
        COLD.sum()
        plan = (clock if turn else Clock())(lambda: make_plan(tree, request, 0, size, None))
    if plan is not None:
        check_plan(plan, request)
    return {
        "name": name,
        "cached_tokens": tree.stats.cached_tokens,
        "request_tokens": size,
        "ours": asdict(clock.timing),
        "us_per_token": clock.timing.cpu_ms * 1e3 / size,
        "comparisons": tree.stats.comparisons - before[0],
        "budget": search.COMPARISONS_FIXED + int(search.COMPARISONS_PER_TOKEN * size),
        "budget_exhausted": tree.stats.budget_exhausted - before[2],
        "runs_found": tree.stats.runs_found - before[1],
        "reused_share": plan.reused_tokens / size if plan else 0.0,
    }


def measure_memory(cached_tokens: int) -> Any:
    """Bytes per cached token as the allocator sees them, tokens themselves not counted."""
    random = np.random.default_rng(3)
    count = cached_tokens // NODE_TOKENS
    nodes = [random.integers(0, VOCABULARY, NODE_TOKENS) for _ in range(count)]
    tracemalloc.start()
    tree = ContentTree()
    start, _ = tracemalloc.get_traced_memory()
    for node in nodes:
        tree.insert(None, node, namespace=None)
    stop, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tokens = tree.stats.cached_tokens
    return {
        "cached_tokens": tokens,
        "allocated_bytes_per_token": (stop - start) / tokens,
        "reported_bytes_per_token": tree.stats.index_bytes / tokens,
    }


def print_table(title: str, head: list[str], rows: list[list[str]]) -> None:
    """Print aligned columns."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    print(f"\n{title}")
    for row in [head, ["-" * w for w in widths], *rows]:
        print("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)))
    sys.stdout.flush()


def spread(timing: dict[str, float]) -> str:
    """Median and 10th to 90th percentile."""
    return str(Timing(**timing))


def print_matches(rows: list[Any]) -> None:
    """The main table."""
    head = ["cached", "request", "layout", "hits", "reused", "stock ms [p10, p90]"]
    head += ["ours on top ms [p10, p90]", "ours CPU ms", "(stock+ours)/stock"]
    body = [
        [
            f"{r['cached_tokens']:,}",
            f"{r['request_tokens']:,}",
            r["layout"],
            f"{r['hit_share']:.0%}",
            f"{r['reused_share']:.0%}",
            spread(r["stock"]),
            spread(r["ours"]),
            f"{r['ours']['cpu_ms']:.3f}",
            f"{r['ratio']:.1f}",
        ]
        for r in rows
    ]
    print_table("match", head, body)


def print_growth(rows: list[Any]) -> None:
    """Time at the largest cache over time at the smallest, CPU medians."""
    sizes = sorted({r["cached_tokens"] for r in rows})
    cells = {
        (r["request_tokens"], r["layout"], r["hit_share"], r["cached_tokens"]): r["ours"]["cpu_ms"]
        for r in rows
    }
    body = []
    for key in dict.fromkeys(k[:3] for k in cells):
        small, large = cells[(*key, sizes[0])], cells[(*key, sizes[-1])]
        body.append([f"{key[0]:,}", key[1], f"{key[2]:.0%}", f"{large / small:.2f}"])
    title = f"growth of CPU time from {sizes[0]:,} to {sizes[-1]:,} cached tokens"
    print_table(title, ["request", "layout", "hits", "ratio"], body)


def print_inserts(rows: list[Any]) -> None:
    """Inserts and the index's memory."""
    head = ["cached", "stock ms [p10, p90]", "ours on top ms [p10, p90]", "ours CPU ms"]
    body = [
        [
            f"{r['cached_tokens']:,}",
            spread(r["stock"]),
            spread(r["ours"]),
            f"{r['ours']['cpu_ms']:.3f}",
            f"{r['bytes_per_token']:.2f}",
        ]
        for r in rows
    ]
    title = f"insert of {NODE_TOKENS:,} new tokens; index memory"
    print_table(title, [*head, "index bytes/token"], body)


def print_adversarial(rows: list[Any]) -> None:
    """The adversarial table."""
    head = ["input", "cached", "request", "ms [p10, p90]", "CPU us/token", "comparisons"]
    head += ["budget", "exhausted", "runs found", "reused"]
    body = [
        [
            r["name"],
            f"{r['cached_tokens']:,}",
            f"{r['request_tokens']:,}",
            spread(r["ours"]),
            f"{r['us_per_token']:.2f}",
            f"{r['comparisons']:,}",
            f"{r['budget']:,}",
            "yes" if r["budget_exhausted"] else "no",
            f"{r['runs_found']:,}",
            f"{r['reused_share']:.0%}",
        ]
        for r in rows
    ]
    print_table("adversarial", head, body)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, few repetitions")
    parser.add_argument("--repeat", type=int, help="repetitions per cell (21, quick: 5)")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    args = parser.parse_args()
    cache_sizes = [100_000, 300_000] if args.quick else [100_000, 1_000_000, 4_000_000]
    requests = [1024, 8192] if args.quick else [1024, 8192, 32768, 131072]
    repeat = args.repeat or (5 if args.quick else 21)
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, "
        f"numpy {np.__version__}, {repeat} repetitions"
    )
    all_caches = []
    for cached_tokens in cache_sizes:
        caches = Caches(seed=1)
        caches.fill(cached_tokens)
        all_caches.append(caches)
    kinds = [("shifted", share) for share in (0.0, 0.5, 0.95)]
    kinds += [("prefix", share) for share in (0.5, 0.95)]
    matches = [
        row
        for size in requests
        for layout, share in kinds
        for row in measure_matches(all_caches, size, share, layout, repeat)
    ]
    inserts: list[Any] = []
    for caches in all_caches:
        tokens = caches.tree.stats.cached_tokens
        caches.stock_insert, caches.our_insert = Clock(), Clock()
        for _ in range(repeat):
            COLD.sum()
            caches.add_node()
        row: dict[str, Any] = {"cached_tokens": tokens}
        row["stock"] = asdict(caches.stock_insert.timing)
        row["ours"] = asdict(caches.our_insert.timing)
        row["bytes_per_token"] = caches.tree.stats.index_bytes / caches.tree.stats.cached_tokens
        inserts.append(row)
    print_matches(matches)
    print_growth(matches)
    print_inserts(inserts)
    worst = max(caches.worst_bytes_per_token for caches in all_caches)
    memory = measure_memory(cache_sizes[1])
    print(
        f"worst index memory while filling: {worst:.2f} bytes per token; "
        f"allocated for the whole tree at {memory['cached_tokens']:,} tokens (tracemalloc): "
        f"{memory['allocated_bytes_per_token']:.2f}, reported for the index: "
        f"{memory['reported_bytes_per_token']:.2f}"
    )
    random = np.random.default_rng(2)
    hard = [
        measure_adversarial(*case, max(2, repeat // 3))
        for case in adversarial(random, 10 if args.quick else 1)
    ]
    print_adversarial(hard)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        numbers = {
            "matches": matches,
            "inserts": inserts,
            "worst_index_bytes_per_token": worst,
            "memory": memory,
            "adversarial": hard,
        }
        args.json.write_text(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
