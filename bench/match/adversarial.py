"""Inputs made to cost as much as possible, and what their plans cost.

They are asked of the index alone: stock finds nothing of them, or everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from bench.match.caches import VOCABULARY, Tokens
from bench.match.timing import Clock
from radix_rope.content import ContentTree, check_plan, make_plan, search

Adversary = tuple[str, list[Tokens], Tokens]


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
    assert repeat > 0
    tree = ContentTree()
    for document in documents:
        tree.insert(None, document, namespace=None)
    size, clock = len(request), Clock()
    for turn in range(repeat + 1):
        before = tree.stats.comparisons, tree.stats.runs_found, tree.stats.budget_exhausted
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
