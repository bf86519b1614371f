"""RadixRopeCache without an engine: in step with its index, and stock when off."""

from array import array
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator  # noqa: F401 - import order
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from radix_rope.config import RadixRopeConfig
from radix_rope.integration.cache import RadixRopeCache


class CountingAllocator:
    """Counts what the tree frees; hands out nothing."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.freed: list[int] = []

    def free_segment(self, indices: torch.Tensor, start_pos: int = 0) -> None:
        self.freed.extend(indices.tolist())


def make(
    kind: type, page_size: int, policy: str, mode: str = "shifted", is_eagle: bool = False
) -> Any:
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=CountingAllocator(),
        page_size=page_size,
        eviction_policy=policy,
        enable_kv_cache_events=True,
        is_eagle=is_eagle,
    )
    if kind is RadixRopeCache:
        return RadixRopeCache(params, RadixRopeConfig(mode=mode, stride=4))
    return kind(params)


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=40)
operation = st.one_of(
    st.tuples(st.just("insert"), tokens, st.sampled_from([None, "a"]), st.integers(0, 3)),
    st.tuples(st.just("match"), tokens, st.sampled_from([None, "a"])),
    st.tuples(st.just("lock"), tokens, st.sampled_from([None, "a"])),
    st.tuples(st.just("unlock")),
    st.tuples(st.just("evict"), st.integers(1, 30)),
    st.tuples(st.just("touch"), tokens, st.sampled_from([None, "a"])),
    st.tuples(st.just("reset")),
)


class Driver:
    """Runs operations on one cache and records everything it answers."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.slot = 0
        self.locks: list[Any] = []
        self.log: list[Any] = []

    def run(self, op: tuple[Any, ...]) -> None:
        cache, name = self.cache, op[0]
        if name == "insert":
            value = torch.arange(self.slot, self.slot + len(op[1]))
            self.slot += len(op[1])
            key = RadixKey(array("q", op[1]), op[2])
            self.log.append(
                cache.insert(InsertParams(key=key, value=value, priority=op[3])).prefix_len
            )
        elif name in ("match", "lock", "touch"):
            key = RadixKey(array("q", op[1]), op[2])
            if name == "touch":
                cache.touch_prefix(key)
                return
            result = cache.match_prefix(MatchPrefixParams(key=key))
            self.log.append(result.device_prefix_len)
            self.log.append(cache.path_device_indices(result.last_device_node).tolist())
            if name == "lock":
                self.locks.append(cache.lock(result.last_device_node))
        elif name == "unlock" and self.locks:
            cache.unlock(self.locks.pop())
        elif name == "evict":
            self.log.append(cache.evict(EvictParams(num_tokens=op[1])).num_tokens_evicted)
        elif name == "reset" and not self.locks:
            cache.reset()
        self.log.append((cache.evictable_size(), cache.protected_size(), cache.total_size()))
        self.log.append([_event(e) for e in cache.take_events()])


def _event(event: Any) -> Any:
    fields = getattr(event, "__struct_fields__", None)
    if fields is None:
        return repr(event)
    return (type(event).__name__, *[repr(getattr(event, name)) for name in fields])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(operation, max_size=25),
    st.sampled_from([1, 4, 16]),
    st.sampled_from(["lru", "lfu", "fifo", "mru", "filo", "priority"]),
    st.sampled_from(["shifted", "exact", "off"]),
    st.booleans(),
)
def test_answers_like_stock_and_keeps_the_index_in_step(
    operations: list[tuple[Any, ...]], page_size: int, policy: str, mode: str, is_eagle: bool
) -> None:
    ours = Driver(make(RadixRopeCache, page_size, policy, mode, is_eagle))
    stock = Driver(make(RadixCache, page_size, policy, is_eagle=is_eagle))
    for op in operations:
        ours.run(op)
        stock.run(op)
        ours.cache.check_invariants()
        assert ours.log == stock.log
    freed = ours.cache.token_to_kv_pool_allocator.freed
    assert freed == stock.cache.token_to_kv_pool_allocator.freed
    assert (ours.cache.content is None) == (mode == "off")


def test_the_callers_token_array_may_grow_after_insert() -> None:
    cache = make(RadixRopeCache, 1, "lru")
    ids = array("q", range(20))
    cache.insert(InsertParams(key=RadixKey(ids), value=torch.arange(20)))
    ids.append(99)  # would raise BufferError if the index still held this array
    cache.check_invariants()


def test_a_disabled_cache_keeps_no_index() -> None:
    params = CacheInitParams(
        disable=True, req_to_token_pool=None, token_to_kv_pool_allocator=None, page_size=1
    )
    assert RadixRopeCache(params).content is None


@pytest.mark.parametrize("page_size", [1, 16])
def test_invariant_checker_notices_a_moved_segment(page_size: int) -> None:
    cache = make(RadixRopeCache, page_size, "lru")
    cache.insert(InsertParams(key=RadixKey(array("q", range(64))), value=torch.arange(64)))
    next(iter(cache.root_node.children.values())).segment.start += 1
    with pytest.raises(AssertionError):
        cache.check_invariants()
