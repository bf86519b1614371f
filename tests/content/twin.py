"""The naive twin of the content tree: plain lists, and every substring compared.

Also the driver that applies one operation to both, walking the twin as SGLang's radix cache walks
its nodes, so that random operations keep what the cache promises about siblings.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from radix_rope.content import Candidate, ContentTree, Provenance, Segment

LEFT_CONTEXT_TOKENS = 512


@dataclass
class Node:
    parent: int | None
    tokens: list[int]
    namespace: Hashable
    children: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class NaiveRun:
    begin: int
    end: int
    donor_begin: int
    pieces: tuple[tuple[int, int, int], ...]  # (node, offset, length), as a candidate's pieces

    def node_at(self, position: int) -> int:
        """The node of the token at this request position."""
        at = self.begin
        for node, _, length in self.pieces:
            at += length
            if position < at:
                return node
        raise IndexError(position)


class Twin:
    """A content tree and its naive twin; `owner` of each segment is the twin's node number."""

    def __init__(self, stride: int, page_size: int, max_candidates: int = 10**6) -> None:
        self.tree = ContentTree(stride, page_size, max_candidates)
        self.page_size = page_size
        self.nodes: dict[int, Node] = {}
        self.tops: dict[Hashable, list[int]] = {}
        self.segments: dict[int, Segment] = {}
        self._next = 0

    def reset(self) -> None:
        self.tree.reset()
        self.nodes.clear()
        self.tops.clear()
        self.segments.clear()

    def insert_path(self, tokens: list[int], namespace: Hashable, provenance: Provenance) -> None:
        """As RadixCache.insert: follow whole pages, split where they end, hang the rest there."""
        tokens = tokens[: len(tokens) // self.page_size * self.page_size]
        parent: int | None = None
        while tokens:
            page = tokens[: self.page_size]
            child = next(
                (c for c in self._siblings(parent, namespace) if self._page(c) == page), None
            )
            if child is None:
                self._hang(parent, tokens, namespace, provenance)
                return
            theirs = self.nodes[child].tokens
            shared = 0
            while shared < min(len(theirs), len(tokens)) and theirs[shared] == tokens[shared]:
                shared += 1
            shared = shared // self.page_size * self.page_size
            if shared < len(theirs):
                child = self.split(child, shared)
            parent, tokens = child, tokens[shared:]

    def _siblings(self, parent: int | None, namespace: Hashable) -> list[int]:
        if parent is None:
            return self.tops.setdefault(namespace, [])
        return self.nodes[parent].children

    def _page(self, node: int) -> list[int]:
        return self.nodes[node].tokens[: self.page_size]

    def _hang(
        self, parent: int | None, tokens: list[int], namespace: Hashable, provenance: Provenance
    ) -> None:
        number = self._take()
        self.nodes[number] = Node(parent, list(tokens), namespace)
        self._siblings(parent, namespace).append(number)
        self.segments[number] = self.tree.insert(
            None if parent is None else self.segments[parent],
            np.array(tokens, dtype=np.int64),
            namespace=namespace,
            provenance=provenance,
            owner=number,
        )

    def _take(self) -> int:
        self._next += 1
        return self._next - 1

    def split(self, child: int, at: int) -> int:
        """Cut node `child`; returns the number of the new upper node."""
        node = self.nodes[child]
        upper = self._take()
        self.nodes[upper] = Node(node.parent, node.tokens[:at], node.namespace, [child])
        siblings = self._siblings(node.parent, node.namespace)
        siblings[siblings.index(child)] = upper
        node.parent, node.tokens = upper, node.tokens[at:]
        self.segments[upper] = self.tree.split(self.segments[child], at, owner=upper)
        return upper

    def leaves(self) -> list[int]:
        return [number for number, node in self.nodes.items() if not node.children]

    def remove(self, leaf: int) -> None:
        node = self.nodes.pop(leaf)
        self._siblings(node.parent, node.namespace).remove(leaf)
        self.tree.remove(self.segments.pop(leaf))

    def check(self) -> None:
        self.tree.check_invariants()
        segments = list(self.tree.segments())
        assert sorted(s.owner for s in segments) == sorted(self.nodes)  # type: ignore[type-var]
        for number, node in self.nodes.items():
            segment = self.segments[number]
            assert segment.owner == number and segment.tokens.tolist() == node.tokens
            assert segment.namespace == node.namespace
            parent = None if node.parent is None else self.segments[node.parent]
            assert segment.parent is parent

    def naive_runs(
        self, tokens: list[int], namespace: Hashable, begin: int, end: int, least: int
    ) -> set[NaiveRun]:
        """All maximal equal stretches of [leftmost, end) and any path that touch [begin, end)."""
        leftmost = max(0, begin - max(LEFT_CONTEXT_TOKENS, 2 * self.tree.stride - 2))
        request = np.array(tokens[leftmost:end], dtype=np.int64)
        runs: set[NaiveRun] = set()
        for leaf in self.leaves():
            if self.nodes[leaf].namespace != namespace:
                continue
            path, nodes = self._path(leaf)
            # equal[i + 1, j + 1]: request token i equals path token j; runs lie on diagonals.
            equal = np.zeros((len(request) + 2, len(path) + 2), dtype=bool)
            equal[1:-1, 1:-1] = request[:, None] == path[None, :]
            inner = equal[1:-1, 1:-1]
            firsts = np.argwhere(inner & ~equal[:-2, :-2])
            lasts = np.argwhere(inner & ~equal[2:, 2:])
            # Along each diagonal the k-th run begins at the k-th first and ends at the k-th last.
            firsts = firsts[np.lexsort((firsts[:, 0], firsts[:, 0] - firsts[:, 1]))]
            lasts = lasts[np.lexsort((lasts[:, 0], lasts[:, 0] - lasts[:, 1]))]
            fits = (lasts[:, 0] - firsts[:, 0] + 1 >= least) & (lasts[:, 0] + leftmost >= begin)
            for (i, j), last in zip(firsts[fits].tolist(), lasts[fits, 0].tolist(), strict=True):
                length = last - i + 1
                runs.add(
                    NaiveRun(
                        leftmost + i, leftmost + last + 1, j, self._pieces(nodes, j, j + length)
                    )
                )
        return runs

    def _path(self, leaf: int) -> tuple[np.ndarray, list[int]]:
        """Tokens down to a leaf, and the nodes on the way."""
        nodes: list[int] = []
        at: int | None = leaf
        while at is not None:
            nodes.append(at)
            at = self.nodes[at].parent
        nodes.reverse()
        return np.array([t for n in nodes for t in self.nodes[n].tokens], dtype=np.int64), nodes

    def _pieces(self, nodes: list[int], low: int, high: int) -> tuple[tuple[int, int, int], ...]:
        """Path positions [low, high) as (node, offset, length)."""
        pieces = []
        start = 0
        for node in nodes:
            stop = start + len(self.nodes[node].tokens)
            if max(low, start) < min(high, stop):
                offset = max(low, start) - start
                pieces.append((node, offset, min(high, stop) - start - offset))
            start = stop
        return tuple(pieces)

    def check_candidates(
        self, tokens: list[int], namespace: Hashable, begin: int, end: int, promise: bool = True
    ) -> list[Candidate]:
        """Compare the tree's candidates with the twin's runs, both ways."""
        found = self.tree.candidates(np.array(tokens, dtype=np.int64), namespace, begin, end)
        runs = self.naive_runs(tokens, namespace, begin, end, self.tree.stride)
        seen: set[NaiveRun] = set()
        by_delta: dict[int, list[NaiveRun]] = {}
        for c in found:
            pieces = tuple((p.segment.owner, p.offset, p.length) for p in c.pieces)
            run = NaiveRun(c.begin, c.end, c.donor_begin, pieces)  # type: ignore[arg-type]
            assert run in runs, "not a maximal equal stretch"
            assert run not in seen, "the same run twice"
            seen.add(run)
            by_delta.setdefault(c.delta, []).append(run)
        assert [c.begin for c in found] == sorted(c.begin for c in found)
        for run in runs if promise else ():
            if run.end - run.begin >= 2 * self.tree.stride - 1:
                near = by_delta.get(run.begin - run.donor_begin, [])
                assert any(self._covers(c, run) for c in near), f"missed {run}"
        return found

    def _covers(self, found: NaiveRun, run: NaiveRun) -> bool:
        """Whether `found` serves all of `run`, at the same delta, from the same nodes."""
        if found.begin > run.begin or found.end < run.end:
            return False
        # Siblings may share less than a page: either of them may serve the run's last tokens.
        # Above a node its path is the only one, so the last certain token tells.
        last = run.end - self.page_size
        return last < run.begin or found.node_at(last) == run.node_at(last)


CACHED = 6
LENGTH = 600
_RANDOM = np.random.default_rng(1)
SOURCES = [
    _RANDOM.integers(0, 50_000, LENGTH).tolist(),
    _RANDOM.integers(0, 50_000, LENGTH).tolist(),
    _RANDOM.integers(0, 3, LENGTH).tolist(),
    [7] * LENGTH,
    [1, 2, 3] * (LENGTH // 3),
    [5, 5, 5, 6] * (LENGTH // 4),
]


def text(twin: Twin, spec: list[tuple[int, int, int]]) -> list[int]:
    """Tokens from (source, start, length) pieces.

    `CACHED` copies a slice of some path of the tree, greater numbers give tokens that occur nowhere
    else. Large pages need longer texts, so starts and lengths are scaled.
    """
    scale = {1: 1, 16: 4, 64: 16}[twin.page_size]
    tokens: list[int] = []
    for number, (source, start, length) in enumerate(spec):
        if source == CACHED and twin.nodes:
            leaves = twin.leaves()
            path, _ = twin._path(leaves[start % len(leaves)])
            at = (start * 7) % len(path)
            tokens += path[at : at + 2 * length * scale].tolist()
        elif source < len(SOURCES):
            tokens += SOURCES[source][start * scale : (start + length) * scale]
        else:
            fresh = 100_000 + 1000 * number + 37 * start
            tokens += range(fresh, fresh + length)
    return tokens
