"""RadixRopeCache over a simulated pool against a naive twin, by random operations.

The twin of the pool is a dictionary: which slots hold the KV of which page of which path. It knows
no nodes; every answer of the cache is compared with it. What is found at another offset is compared
with `tests.content.twin`, which compares all substrings, and slot by slot with what the pool holds.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from radix_rope.config import RadixRopeConfig
from radix_rope.content import check_plan, make_plan, search
from radix_rope.content.segment import Provenance
from radix_rope.integration.cache import RadixRopeCache
from radix_rope.integration.request import RequestState
from radix_rope.integration.reuse import plan_batch
from tests.content.twin import CACHED, Node, Twin, text
from tests.integration.test_locks import batch, request

Tokens = list[int]
Namespace = tuple[str | None, str | None]
Path = tuple[Namespace, tuple[int, ...]]
Operation = tuple[Any, ...]

# Names that would be one if key and salt were mixed up.
NAMESPACES: list[Namespace] = [(None, None), ("a", None), (None, "a"), ("a", "a"), ("b", "a")]
# About what a few texts of `text` need, so that later ones evict earlier ones.
POOL_TOKENS = {1: 320, 16: 1280, 64: 5120}


class Pool:
    """Slots by page, each free once; `holds` says what is in the others."""

    device = torch.device("cpu")

    def __init__(self, tokens: int, page_size: int) -> None:
        self.page_size = page_size
        self.free_pages = list(range(tokens // page_size))
        # By page: the path whose last page of KV is in it.
        self.holds: dict[int, Path] = {}

    def available_size(self) -> int:
        return len(self.free_pages) * self.page_size

    def take(self, pages: int) -> list[int]:
        taken, self.free_pages = self.free_pages[:pages], self.free_pages[pages:]
        return taken

    def slots(self, pages: list[int]) -> torch.Tensor:
        """Their slots, int64."""
        within = torch.arange(self.page_size)
        return (torch.tensor(pages, dtype=torch.int64)[:, None] * self.page_size + within).ravel()

    def free_segment(self, indices: torch.Tensor, start_pos: int = 0) -> None:
        assert start_pos % self.page_size == 0
        pages = (indices[:: self.page_size] // self.page_size).tolist()
        assert torch.equal(self.slots(pages), indices), "not whole pages"
        for page in pages:
            assert page not in self.free_pages, f"page {page} freed twice"
            del self.holds[page]
        self.free_pages += pages


class CacheTwin(Twin):
    """The cache, its pool, and what must be found in them.

    `nodes` mirrors SGLang's nodes, once the paths they spell were compared with the pool's.
    """

    def __init__(self, page_size: int, stride: int, policy: str) -> None:
        super().__init__(stride, page_size)
        self.pool = Pool(POOL_TOKENS[page_size], page_size)
        params = CacheInitParams(
            disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=self.pool,
            page_size=page_size, eviction_policy=policy,
        )  # fmt: skip
        config = RadixRopeConfig(stride=stride, min_run_tokens=1, recompute_tokens=2)
        self.cache = RadixRopeCache(params, config)
        assert self.cache.content is not None
        self.tree = self.cache.content
        # The promise is tested without the bounds of work; test_bounds.py tests those.
        self.tree.max_candidates = 10**6
        self.locks: list[tuple[Any, Path]] = []
        self.reused_tokens = 0

    # Paths, by the pool alone

    def pages_of(self, tokens: Tokens, namespace: Namespace) -> list[Path]:
        """The whole pages of a text, each as the path that ends with it."""
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(namespace, tuple(tokens[:end])) for end in ends]

    def cached(self) -> dict[Path, int]:
        """The pool's page of every path."""
        held = {path: page for page, path in self.pool.holds.items()}
        assert len(held) == len(self.pool.holds), "the same KV twice"
        return held

    def prefix(self, tokens: Tokens, namespace: Namespace) -> list[int]:
        """Pages of the longest cached prefix."""
        held, found = self.cached(), []
        for path in self.pages_of(tokens, namespace):
            if path not in held:
                break
            found.append(held[path])
        return found

    def protected(self) -> set[Path]:
        """What somebody has locked."""
        return {
            (namespace, tokens[:end])
            for _, (namespace, tokens) in self.locks
            for end in range(self.page_size, len(tokens) + 1, self.page_size)
        }

    # Operations

    def insert(self, tokens: Tokens, namespace: Namespace, spliced: tuple[int, int] | None) -> None:
        """Cache a text, where the pool can hold it; part of it copied where it is `spliced`."""
        paths = self.pages_of(tokens, namespace)
        # As a request that runs: what it has of the tree already is locked.
        prefix = self.lock(tokens, namespace)
        need = len(paths) - prefix
        missing = need * self.page_size - self.pool.available_size()
        if missing > 0:
            self.evict(missing)
        if need * self.page_size <= self.pool.available_size():
            old = self.prefix(tokens, namespace)
            assert len(old) == prefix
            new = self.pool.take(need)
            self.pool.holds.update(zip(new, paths[prefix:], strict=True))
            state = RequestState()
            if spliced is not None:
                state.splice(*spliced, Provenance(exact=False, copied=True, generations=1))
            self.cache._inserting = state
            key = self.key(tokens, namespace)
            result = self.cache.insert(InsertParams(key=key, value=self.pool.slots(old + new)))
            self.cache._inserting = None
            assert result.prefix_len == prefix * self.page_size
        self.unlock(len(self.locks) - 1)

    def key(self, tokens: Tokens, namespace: Namespace) -> RadixKey:
        return RadixKey(array("q", tokens), namespace[0], cache_salt=namespace[1])

    def match(self, tokens: Tokens, namespace: Namespace) -> Any:
        """Match a prefix, which may split a node; returns SGLang's node."""
        found = self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens, namespace)))
        pages = self.prefix(tokens, namespace)
        assert found.device_prefix_len == len(pages) * self.page_size
        slots = self.cache.path_device_indices(found.last_device_node)
        assert torch.equal(slots, self.pool.slots(pages))
        return found.last_device_node

    def lock(self, tokens: Tokens, namespace: Namespace) -> int:
        """Match and lock; returns how many pages."""
        lock = self.cache.lock(self.match(tokens, namespace))
        pages = len(self.prefix(tokens, namespace))
        self.locks.append((lock, (namespace, tuple(tokens[: pages * self.page_size]))))
        return pages

    def unlock(self, number: int) -> None:
        lock, _ = self.locks.pop(number)
        self.cache.unlock(lock)

    def evict(self, tokens: int) -> None:
        """Free some: never what is locked, nor a page before those behind it."""
        before, protected = self.cached(), self.protected()
        evicted = self.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted
        after = self.cached()
        assert (len(before) - len(after)) * self.page_size == evicted
        assert evicted >= min(tokens, (len(before) - len(protected)) * self.page_size)
        assert protected <= after.keys(), "something locked was evicted"
        for namespace, path in after:
            assert len(path) == self.page_size or (namespace, path[: -self.page_size]) in after

    def reset(self) -> None:
        """What a flush does; SGLang flushes when nothing runs."""
        while self.locks:
            self.unlock(0)
        self.cache.reset()
        # The scheduler empties the pool beside the tree.
        self.pool.free_pages += self.pool.holds
        self.pool.holds.clear()

    def ask(self, tokens: Tokens, namespace: Namespace, begin: int, flood: bool) -> None:
        """What a request finds, and what its plan reads while everything else may be evicted."""
        prefix = self.match(tokens, namespace)
        begin = max(begin, self.cache.path_tokens(prefix))
        self.mirror()
        if begin >= len(tokens):
            return
        self.check_candidates(tokens, namespace, begin, len(tokens))
        req = request(
            "r", tokens, self.cache, extra_key=namespace[0], cache_salt=namespace[1],
            prefix_len=begin, last_node=prefix,
        )  # fmt: skip
        # Whatever locking would leave to allocate is another test's question.
        req.extend_len = 0
        reuse = plan_batch(self.cache, batch(self.cache, req), max_rows=10**6)
        wanted = make_plan(
            self.tree, np.array(tokens), begin, len(tokens), namespace, self.cache.plan_options
        )
        assert [e.plan.runs for e in reuse.entries] == ([wanted.runs] if wanted else [])
        for entry in reuse.entries:
            check_plan(entry.plan, np.array(tokens))
            self.locks += [(None, path) for run in entry.plan.runs for path in [self.donor(run)]]
        if flood:
            self.evict(10**6)
        for entry in reuse.entries:
            slots = iter(entry.source_slots.tolist())
            for run in entry.plan.runs:
                for place in range(run.begin, run.end):
                    page, within = divmod(next(slots), self.page_size)
                    space, path = self.pool.holds[page]
                    at = len(path) - self.page_size + within
                    assert space == namespace, "another tenant's KV"
                    assert at == place - run.delta and path[at] == tokens[place]
                self.reused_tokens += len(run)
            assert next(slots, None) is None
        self.locks = [lock for lock in self.locks if lock[0] is not None]
        reuse.release()

    def donor(self, run: Any) -> Path:
        """The path of a run, to the end of its last node."""
        pieces, node = [], run.pieces[-1].segment
        namespace: Namespace = node.namespace
        while node is not None:
            pieces.append(node.tokens.tolist())
            node = node.parent
        return namespace, tuple(token for piece in reversed(pieces) for token in piece)

    # Comparison

    def mirror(self) -> None:
        """Read SGLang's nodes, and compare the paths they spell with the pool's."""
        self.nodes.clear()
        spelled: dict[Path, int] = {}
        stack: list[tuple[Any, Tokens]] = [(self.cache.root_node, [])]
        while stack:
            node, before = stack.pop()
            for child in node.children.values():
                namespace = (child.key.extra_key, child.key.cache_salt)
                own = list(child.key.token_ids[: len(child.key)])
                parent = None if node is self.cache.root_node else node
                self.nodes[child] = Node(parent, own, namespace, list(child.children.values()))
                tokens = before + own
                pages = (child.value[:: self.page_size] // self.page_size).tolist()
                assert torch.equal(self.pool.slots(pages), child.value)
                ends = range(len(before) + self.page_size, len(tokens) + 1, self.page_size)
                for end, page in zip(ends, pages, strict=True):
                    spelled[namespace, tuple(tokens[:end])] = page
                stack.append((child, tokens))
        assert spelled == self.cached()

    def check(self) -> None:
        """Everything that must hold after every operation."""
        self.cache.check_invariants()
        self.mirror()
        protected = len(self.protected()) * self.page_size
        held = len(self.pool.holds) * self.page_size
        assert self.cache.protected_size() == protected
        assert self.cache.evictable_size() == held - protected
        assert self.cache.total_size() == held


spans = st.integers(4, 24)
number = st.integers(0, 2**16)
namespace = st.sampled_from([NAMESPACES[0]] * 3 + NAMESPACES)
piece = st.tuples(st.sampled_from([0, 0, 0, 1, 1, 2, 3, 4, 5]), st.integers(0, 8), spans)
mixed = st.tuples(st.sampled_from([0, 1, 2, 7, CACHED, CACHED, CACHED]), st.integers(0, 20), spans)
fresh = st.lists(piece, min_size=1, max_size=3)
known = st.lists(mixed, min_size=1, max_size=3)
splice = st.one_of(st.none(), st.none(), st.tuples(number, number))
insert = st.tuples(st.just("insert"), fresh, namespace, splice)
extend = st.tuples(st.just("extend"), fresh, number, splice)
partial = st.tuples(st.sampled_from(["match", "lock"]), number, number)
other = st.tuples(st.sampled_from(["match", "lock"]), known, namespace)
question = st.tuples(st.just("ask"), known, namespace, number)
change = st.one_of(
    partial,
    other,
    st.tuples(st.just("unlock"), number),
    st.tuples(st.just("evict"), st.integers(1, 120)),
    st.tuples(st.just("evict"), st.integers(1, 120)),
    st.tuples(st.just("reset"), number),
)


@st.composite
def operation_sequences(draw: st.DrawFn) -> list[Operation]:
    """Fill the cache, then ask and change it in turns."""
    ops: list[Operation] = [draw(insert), draw(partial), draw(extend)]
    for _ in range(draw(st.integers(1, 4))):
        ops += [draw(question), draw(change), draw(st.one_of(insert, extend, change))]
    ops.append(draw(question))
    return ops


def apply(twin: CacheTwin, op: Operation, done: Counter[str]) -> None:
    """One operation; what it would have nothing to do with is left out, and not counted."""
    name, *arguments = op
    some = twin.leaves()
    if name == "extend" or (name in ("match", "lock") and isinstance(arguments[0], int)):
        if not some:
            return
        at = arguments[1] if name == "extend" else arguments[0]
        leaf = some[at % len(some)]
        path, space = twin._path(leaf)[0].tolist(), twin.nodes[leaf].namespace
        if name == "extend":
            cut = len(path) if at % 3 else at % len(path)
            tokens = path[:cut] + text(twin, arguments[0])
            twin.insert(tokens, space, spliced(arguments[2], len(tokens)))
        else:
            # Inside a page now and then; a page or more of it splits a node.
            tokens = path[: 1 + arguments[1] % len(path)]
            getattr(twin, name)(tokens, space)
    elif name == "insert":
        tokens = text(twin, arguments[0])
        twin.insert(tokens, arguments[1], spliced(arguments[2], len(tokens)))
    elif name in ("match", "lock"):
        getattr(twin, name)(text(twin, arguments[0]), arguments[1])
    elif name == "ask":
        tokens, space, at = text(twin, arguments[0]), arguments[1], arguments[2]
        if some and at % 8:
            space = twin.nodes[some[at % len(some)]].namespace
        twin.ask(tokens, space, at % len(tokens) if at % 3 == 0 else 0, flood=at % 2 == 0)
    elif name == "unlock":
        if not twin.locks:
            return
        twin.unlock(arguments[0] % len(twin.locks))
    elif name == "evict":
        twin.evict(arguments[0] * POOL_TOKENS[twin.page_size] // POOL_TOKENS[1])
    elif arguments[0] % 4 == 0:  # often would leave little to find
        twin.reset()
    else:
        return
    done[name] += 1


def spliced(ends: tuple[int, int] | None, length: int) -> tuple[int, int] | None:
    """A part of a text that was copied."""
    if ends is None:
        return None
    begin, end = sorted(at % length for at in ends)
    return (begin, end) if begin < end else None


def run_sequence(twin: CacheTwin, ops: list[Operation], done: Counter[str]) -> None:
    for op in ops:
        apply(twin, op, done)
        twin.check()
    done["reused"] += twin.reused_tokens
    while twin.locks:
        twin.unlock(0)
    twin.evict(10**6)
    twin.check()
    assert twin.cached() == {}
    assert twin.pool.available_size() == POOL_TOKENS[twin.page_size]


@pytest.mark.parametrize(
    ("page_size", "strides", "sequences"),
    [(1, [4, 5, 6, 8], 1200), (16, [4, 5, 8, 16, 20], 500), (64, [8, 16, 32, 48], 300)],
)
def test_random_operations(
    page_size: int, strides: list[int], sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As for the candidates above.
    monkeypatch.setattr(search, "COMPARISONS_FIXED", 10**9)
    done: Counter[str] = Counter()

    @settings(
        deadline=None,
        max_examples=sequences,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(
        operation_sequences(),
        st.sampled_from(strides),
        st.sampled_from(["lru", "lfu", "fifo", "priority"]),
    )
    def run(ops: list[Operation], stride: int, policy: str) -> None:
        run_sequence(CacheTwin(page_size, stride, policy), ops, done)

    run()
    for name in ("insert", "extend", "match", "lock", "unlock", "evict", "reset", "ask"):
        assert done[name] > sequences // 20, f"hardly any {name}: {done}"
    assert done["reused"] > 5 * sequences, done
