"""Exact requests against a tree full of approximate KV, slot by slot.

A simulated pool knows what every slot really holds: the exact KV of one token
path, or something approximate. Random requests of both modes run on the real
tree; no exact request may ever have a slot that does not hold its own path's
exact KV, and no node may call itself exact when it is not.
"""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from radix_rope.config import RadixRopeConfig
from radix_rope.content.segment import Provenance
from radix_rope.integration.cache import RadixRopeCache
from radix_rope.integration.request import state_of

ROWS, LONGEST = 8, 64
APPROXIMATE = "approximate"


class Allocator:
    """Pages of slots, each free once."""

    device = torch.device("cpu")

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.free_pages = list(range(1, pages + 1))

    def available_size(self) -> int:
        return len(self.free_pages) * self.page_size

    def take(self, pages: int) -> list[int]:
        taken, self.free_pages = self.free_pages[:pages], self.free_pages[pages:]
        return [page * self.page_size + i for page in taken for i in range(self.page_size)]

    def free_segment(self, indices: torch.Tensor, start_pos: int = 0) -> None:
        assert start_pos % self.page_size == 0
        for page in {int(slot) // self.page_size for slot in indices}:
            assert page not in self.free_pages, f"page {page} freed twice"
            self.free_pages.append(page)


class Simulation:
    """Requests on one tree, and the truth about every slot."""

    def __init__(self, page_size: int, pages: int) -> None:
        self.allocator = Allocator(pages, page_size)
        self.pages, self.page_size = pages, page_size
        rows = torch.zeros((ROWS, LONGEST), dtype=torch.int32)
        self.pool = SimpleNamespace(
            req_to_token=rows, write=lambda at, values: rows.__setitem__(at, values.to(rows.dtype))
        )
        params = CacheInitParams(
            disable=False, req_to_token_pool=self.pool, page_size=page_size,
            token_to_kv_pool_allocator=self.allocator,
        )  # fmt: skip
        self.cache = RadixRopeCache(params, RadixRopeConfig(stride=4))
        self.cache.corrector = SimpleNamespace(name="none")  # type: ignore[assignment]
        self.holds: dict[int, Any] = {}
        self.running: list[Any] = []

    def start(
        self,
        tokens: list[int],
        shifted: bool,
        splice: tuple[int, int] | None,
        compute: int = LONGEST,
    ) -> None:
        """Admit a request and compute its first tokens, with or without a spliced run."""
        free_rows = set(range(ROWS)) - {req.kv.req_pool_idx for req in self.running}
        if not free_rows:
            return
        kv = SimpleNamespace(
            req_pool_idx=min(free_rows), cache_protected_len=0, cache_inserted_len=0,
            swa_evict_floor=0,
        )  # fmt: skip
        mode = {"radix_rope": {"mode": "shifted" if shifted else "exact"}}
        req = SimpleNamespace(
            kv=kv, tokens=tokens, full_untruncated_fill_ids=array("q", tokens),
            origin_input_ids=array("q", tokens), extra_key=None, cache_salt=None, priority=None,
            sampling_params=SimpleNamespace(custom_params=mode), inserted=0,
        )  # fmt: skip
        key = RadixKey(array("q", tokens[:-1]))
        match = self.cache.match_prefix(MatchPrefixParams(key=key, req=req))
        prefix, req.last_node = match.device_prefix_len, match.last_device_node
        req.lock = self.cache.lock(req.last_node)
        pages = -(-(len(tokens) - prefix) // self.page_size)
        if self.allocator.available_size() < pages * self.page_size:
            self.cache.evict(EvictParams(num_tokens=pages * self.page_size))
        if self.allocator.available_size() < pages * self.page_size:
            self.cache.unlock(req.lock)
            return
        row = self.pool.req_to_token[kv.req_pool_idx]
        row[:prefix] = self.cache.path_device_indices(req.last_node)[:prefix]
        slots = self.allocator.take(pages)
        row[prefix : len(tokens)] = torch.tensor(slots[: len(tokens) - prefix])
        kv.cache_protected_len = req.inserted = prefix
        req.computed = prefix
        self.running.append(req)
        self.compute(req, compute, splice)

    def compute(self, req: Any, length: int, splice: tuple[int, int] | None = None) -> None:
        """Prefill the next tokens, and possibly splice a run among them."""
        begin, end = req.computed, min(req.computed + length, len(req.tokens))
        state = state_of(req)
        on_path = min(self.cache.path_tokens(req.last_node), begin)
        state.begin_extend(on_path, begin, self.cache.path_provenance(req.last_node))
        spliced = range(0)
        if splice is not None and self.cache.options_of(req).shifted:
            low, high = sorted(min(begin + at, end) for at in splice)
            if low < high:
                spliced = range(low, high)
                state.splice(low, high, Provenance(exact=False, copied=True, generations=1))
        self.decode(req, end - begin, spliced)

    def decode(self, req: Any, length: int, spliced: range = range(0)) -> None:
        """Compute the next tokens: exact where everything before them is, else approximate."""
        begin, end = req.computed, min(req.computed + length, len(req.tokens))
        row = self.pool.req_to_token[req.kv.req_pool_idx]
        for position in range(begin, end):
            exact = position not in spliced and all(
                self.holds[int(row[i])] == ("exact", tuple(req.tokens[: i + 1]))
                for i in range(position)
            )
            label = ("exact", tuple(req.tokens[: position + 1])) if exact else APPROXIMATE
            self.holds[int(row[position])] = label
        req.computed = end

    def checkpoint(self, req: Any, up_to: int) -> None:
        # Chunks only go forward.
        req.inserted = max(req.inserted, min(up_to, req.computed))
        self.cache.checkpoint(req, up_to=req.inserted)

    def end(self, req: Any, insert: bool) -> None:
        if insert:
            self.checkpoint(req, req.computed)
        row = self.pool.req_to_token[req.kv.req_pool_idx]
        begin = req.kv.cache_protected_len
        if begin < len(req.tokens):
            self.allocator.free_segment(row[begin : len(req.tokens)], start_pos=begin)
        self.cache.unlock(req.lock)
        self.running.remove(req)

    def check(self) -> None:
        self.cache.check_invariants()
        used: list[int] = list(self.allocator.free_pages)
        stack: list[tuple[Any, tuple[int, ...]]] = [(self.cache.root_node, ())]
        while stack:
            node, path = stack.pop()
            for child in node.children.values():
                tokens = (*path, *child.key.token_ids[: len(child.key)])
                if child.segment.provenance.exact:
                    for i, slot in enumerate(child.value.tolist()):
                        wanted = ("exact", tokens[: len(path) + i + 1])
                        assert self.holds[slot] == wanted, "an exact node holds something else"
                used += [int(s) // self.page_size for s in child.value[:: self.page_size]]
                stack.append((child, tokens))
        for req in self.running:
            row = self.pool.req_to_token[req.kv.req_pool_idx].tolist()
            private = row[req.kv.cache_protected_len : len(req.tokens) : self.page_size]
            used += [slot // self.page_size for slot in private]
            if not self.cache.options_of(req).shifted:
                for position in range(req.computed):
                    wanted = ("exact", tuple(req.tokens[: position + 1]))
                    assert self.holds[row[position]] == wanted, "an exact request reads other KV"
        assert sorted(used) == list(range(1, self.pages + 1)), "a page was lost or is used twice"


# Few prompts that share much, so that requests meet on the same nodes.
BASES = [
    [i % 2 for i in range(40)],
    [0, 1, 0, 0, *[1] * 30],
    [0] * 12 + [i % 3 % 2 for i in range(28)],
]
tokens = st.builds(
    lambda base, length, tail: base[:length] + tail,
    st.sampled_from(BASES), st.integers(2, 40), st.lists(st.integers(0, 1), max_size=5),
)  # fmt: skip
splices = st.one_of(st.none(), st.tuples(st.integers(0, 30), st.integers(0, 30)))
operation = st.one_of(
    st.tuples(st.just("start"), tokens, st.booleans(), splices, st.integers(1, LONGEST)),
    st.tuples(st.just("compute"), st.integers(0, 7), st.integers(1, LONGEST), splices),
    st.tuples(st.just("decode"), st.integers(0, 7), st.integers(1, 9)),
    st.tuples(st.just("checkpoint"), st.integers(0, 7), st.integers(1, LONGEST)),
    st.tuples(st.just("end"), st.integers(0, 7), st.booleans()),
    st.tuples(st.just("evict"), st.integers(1, 20)),
)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([1, 4]), st.sampled_from([20, 80]), st.lists(operation, min_size=2, max_size=40)
)
def test_exact_requests_only_ever_read_exact_kv(
    page_size: int, pages: int, operations: list[tuple[Any, ...]]
) -> None:
    simulation = Simulation(page_size, pages)
    for name, *arguments in operations:
        if name == "start":
            simulation.start(*arguments)
        elif name == "evict":
            simulation.cache.evict(EvictParams(num_tokens=arguments[0]))
        elif simulation.running:
            req = simulation.running[arguments[0] % len(simulation.running)]
            getattr(simulation, name)(req, *arguments[1:])
        simulation.check()
    while simulation.running:
        simulation.end(simulation.running[0], insert=True)
        simulation.check()
    assert simulation.cache.protected_size() == 0


@pytest.fixture
def simulation() -> Simulation:
    return Simulation(page_size=1, pages=200)


PROMPT = [1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0]


def provenance(simulation: Simulation) -> list[tuple[int, int, bool, bool]]:
    """(start, end, exact, copied) of every node, in the order of the tree."""
    assert simulation.cache.content is not None
    return [
        (s.start, s.end, s.provenance.exact, s.provenance.copied)
        for s in simulation.cache.content.segments()
    ]


def test_approximate_nodes_are_healed_by_an_exact_request(simulation: Simulation) -> None:
    simulation.start(PROMPT, True, (2, 6))
    simulation.end(simulation.running[0], insert=True)
    assert provenance(simulation) == [
        (0, 2, True, False), (2, 6, False, True), (6, 12, False, False)
    ]  # fmt: skip
    free = simulation.allocator.available_size()
    simulation.start(PROMPT, False, None)
    assert simulation.running[0].kv.cache_protected_len == 2  # what was exact was a prefix hit
    simulation.end(simulation.running[0], insert=True)
    assert all(exact for _, _, exact, _ in provenance(simulation))
    assert simulation.allocator.available_size() == free
    assert simulation.cache.healed_tokens == 10
    simulation.check()


def test_what_is_locked_is_not_healed_and_the_exact_copy_stays_private(
    simulation: Simulation,
) -> None:
    simulation.start(PROMPT, True, (2, 6))
    user = simulation.running[0]
    simulation.checkpoint(user, len(PROMPT))  # locks its own approximate nodes
    simulation.start(PROMPT, False, None)
    exact = simulation.running[1]
    simulation.checkpoint(exact, len(PROMPT))
    simulation.check()
    assert exact.kv.cache_protected_len == 2
    assert [e for begin, _, e, _ in provenance(simulation) if begin >= 2] == [False] * 3
    simulation.end(user, insert=True)
    # Now nobody is in the way.
    simulation.checkpoint(exact, len(PROMPT))
    assert exact.kv.cache_protected_len == len(PROMPT)
    assert all(e for _, _, e, _ in provenance(simulation))
    simulation.end(exact, insert=True)
    simulation.check()


def test_healing_keeps_what_hangs_below(simulation: Simulation) -> None:
    simulation.start([*PROMPT, 1, 1], True, (2, 6))
    simulation.end(simulation.running[0], insert=True)
    simulation.start(PROMPT, False, None)
    simulation.end(simulation.running[0], insert=True)
    assert provenance(simulation)[-1] == (12, 14, False, False)
    assert all(exact for _, _, exact, _ in provenance(simulation)[:-1])


def test_copies_go_first_while_their_original_lives(simulation: Simulation) -> None:
    cache = simulation.cache
    original, unrelated = [0, 0, 1, 0, 1, 1, 1, 1], [1] * 8
    for prompt in (original, unrelated):
        simulation.start(prompt, False, None)
        simulation.end(simulation.running[0], insert=True)
    assert cache.content is not None
    donor = next(s for s in cache.content.segments() if list(s.tokens) == original)
    copied = Provenance(
        exact=False, copied=True, generations=1, originals=((donor.strip.strip_id, donor.end),)
    )
    simulation.start([1, 0, *original], True, None)
    moved = simulation.running[0]
    state_of(moved).splice(2, 10, copied)
    for position in range(2, 10):
        simulation.holds[int(simulation.pool.req_to_token[moved.kv.req_pool_idx][position])] = (
            APPROXIMATE
        )
    simulation.end(moved, insert=True)
    # The copy was used last, and still goes first; then the oldest, the original.
    cache.evict(EvictParams(num_tokens=1))
    assert not any(s.provenance.copied for s in cache.content.segments())
    cache.evict(EvictParams(num_tokens=1))
    assert list(next(cache.content.segments()).tokens) != original


def test_copies_whose_original_is_gone_wait_their_turn(simulation: Simulation) -> None:
    cache = simulation.cache
    assert cache.content is not None
    gone = Provenance(exact=False, copied=True, generations=1, originals=((10**6, 8),))
    simulation.start([0] * 8, False, None)
    simulation.end(simulation.running[0], insert=True)
    simulation.start([1, 0, *PROMPT], True, None)
    state_of(simulation.running[0]).splice(0, 14, gone)
    row = simulation.pool.req_to_token[simulation.running[0].kv.req_pool_idx]
    simulation.holds.update({int(slot): APPROXIMATE for slot in row[:14]})
    simulation.end(simulation.running[0], insert=True)
    cache.evict(EvictParams(num_tokens=1))
    assert [s.provenance.copied for s in cache.content.segments()] == [True]


def test_what_is_computed_after_a_row_was_pointed_at_approximate_nodes_is_not_exact(
    simulation: Simulation,
) -> None:
    simulation.start(PROMPT, True, (2, 6))
    simulation.start([*PROMPT, 1, 0, 1, 1], True, None, compute=len(PROMPT))
    first, second = simulation.running
    simulation.checkpoint(first, len(PROMPT))
    assert state_of(second).exact_until is None
    # The first one's nodes are in use, so the second takes them for its own row.
    simulation.checkpoint(second, len(PROMPT))
    simulation.decode(second, 4)
    simulation.end(second, insert=True)
    simulation.check()
    assert provenance(simulation)[-1] == (12, 16, False, False)
