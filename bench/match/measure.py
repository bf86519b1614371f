"""The measurements: matches, inserts, memory of the index. Each returns rows for the report."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from bench.match.caches import NODE_TOKENS, VOCABULARY, Caches
from bench.match.timing import Clock, on_top
from radix_rope.content import ContentTree


def measure_matches(
    all_caches: Sequence[Caches], size: int, share: float, layout: str, repeat: int
) -> list[Any]:
    """Time both on the same requests; returns one row per cache size.

    Caches of all sizes take turns, so that what else the machine does falls on all of them alike.
    """
    stocks, ours = [Clock() for _ in all_caches], [Clock() for _ in all_caches]
    reused = [0] * len(all_caches)
    for turn in range(repeat + 1):
        for i, caches in enumerate(all_caches):
            request = getattr(caches, layout)(size, share, turn)
            warm_up = turn == 0
            clocks = (Clock(), Clock()) if warm_up else (stocks[i], ours[i])
            found = caches.ask(request, *clocks, stock_first=bool(turn % 2))
            reused[i] += 0 if warm_up else found
    return [
        {
            "cached_tokens": caches.tree.stats.cached_tokens,
            "request_tokens": size,
            "hit_share": share,
            "layout": layout,
            "reused_share": reused[i] / repeat / size,
            "stock": asdict(stocks[i].timing),
            "ours": asdict(ours[i].timing),
            "on_top": asdict(on_top(ours[i], stocks[i])),
            "ratio": ours[i].timing.median_ms / stocks[i].timing.median_ms,
        }
        for i, caches in enumerate(all_caches)
    ]


def measure_inserts(caches: Caches, repeat: int) -> Any:
    """Time inserts of new nodes into both; returns one row."""
    stock, ours = Clock(), Clock()
    cached_tokens = caches.tree.stats.cached_tokens
    for _ in range(repeat):
        caches.add_node(stock, ours)
    stats = caches.tree.stats
    return {
        "cached_tokens": cached_tokens,
        "stock": asdict(stock.timing),
        "ours": asdict(ours.timing),
        "on_top": asdict(on_top(ours, stock)),
        "bytes_per_token": stats.index_bytes / stats.cached_tokens,
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
