"""Donors are locked from plan to copy and released on every way out."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from radix_rope.config import RadixRopeConfig
from radix_rope.integration import hooks
from radix_rope.integration.cache import RadixRopeCache
from radix_rope.integration.fallbacks import Fallbacks
from radix_rope.integration.reuse import plan_batch

DOCUMENT = list(range(1000, 1200))


class Allocator:
    """A pool that only counts."""

    device = torch.device("cpu")

    def __init__(self, free: int) -> None:
        self.free = free

    def available_size(self) -> int:
        return self.free

    def free_segment(self, indices: torch.Tensor, start_pos: int = 0) -> None:
        self.free += len(indices)


class Mover:
    """A corrector that records what it was asked to move, or fails."""

    name = "recorder"

    def __init__(self) -> None:
        self.moves: list[tuple[list[int], list[int], list[int]]] = []
        self.fails = False

    def move(self, src: torch.Tensor, dst: torch.Tensor, delta: torch.Tensor) -> None:
        if self.fails:
            raise RuntimeError("injected copy failure")
        self.moves.append((src.tolist(), dst.tolist(), delta.tolist()))


def request(rid: str, tokens: list[int], cache: RadixRopeCache, **changed: Any) -> Any:
    values: dict[str, Any] = {
        "rid": rid, "full_untruncated_fill_ids": array("q", tokens), "prefix_len": 0,
        "extend_end": len(tokens), "extend_len": len(tokens), "last_node": cache.root_node,
        "extra_key": None, "cache_salt": None, "multimodal_inputs": None, "input_embeds": None,
        "positional_embed_overrides": None, "token_indices_to_pool": None,
        "multi_item_delimiter_indices": None, "beam_group": None, "return_logprob": False,
        "logprob_start_len": -1, "retracted_stain": False, "cached_tokens": 0,
        "return_hidden_states": False,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changed})


@pytest.fixture
def cache() -> RadixRopeCache:
    params = CacheInitParams(
        disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=Allocator(2000),
        page_size=1,
    )  # fmt: skip
    tree = RadixRopeCache(params, RadixRopeConfig())
    tree.corrector = Mover()
    tree.max_rows = 64
    tree.insert(InsertParams(key=RadixKey(array("q", DOCUMENT)), value=torch.arange(200)))
    return tree


def batch(cache: RadixRopeCache, *reqs: Any) -> Any:
    return SimpleNamespace(
        tree_cache=cache, reqs=list(reqs), return_hidden_states=False,
        model_config=SimpleNamespace(is_generation=True),
        forward_mode=SimpleNamespace(is_extend=lambda: True),
    )  # fmt: skip


def locked(cache: RadixRopeCache) -> int:
    cache.check_invariants()
    return int(cache.protected_size())


def moved_request(cache: RadixRopeCache, rid: str = "r") -> Any:
    return request(rid, [1, 2, 3, *DOCUMENT, 4, 5], cache)


def fail(*args: Any, **kwargs: Any) -> Any:
    raise MemoryError("injected allocation failure")


def test_donors_cannot_be_evicted_between_plan_and_copy(cache: RadixRopeCache) -> None:
    work = batch(cache, moved_request(cache))

    def allocate(_: Any) -> str:
        # What the allocator does when it is short: evict all it can.
        cache.evict(EvictParams(num_tokens=10_000))
        assert cache.total_size() == 200
        return "allocated"

    assert hooks.prepare_for_extend(allocate, work) == "allocated"
    assert locked(cache) == 200
    cache.evict(EvictParams(num_tokens=10_000))
    assert cache.total_size() == 200


def test_released_when_allocation_fails(cache: RadixRopeCache) -> None:
    with pytest.raises(MemoryError):
        hooks.prepare_for_extend(fail, batch(cache, moved_request(cache)))
    assert locked(cache) == 0


def test_released_and_served_whole_when_planning_a_later_request_fails(
    cache: RadixRopeCache,
) -> None:
    broken = moved_request(cache, "broken")
    del broken.extra_key
    work = batch(cache, moved_request(cache), broken)
    assert hooks.prepare_for_extend(lambda _: "allocated", work) == "allocated"
    assert locked(cache) == 0
    assert cache.fallbacks.counts == {"plan": 1}
    assert all(req.cached_tokens == 0 for req in work.reqs)


def test_released_when_the_forward_batch_cannot_be_built(cache: RadixRopeCache) -> None:
    work = batch(cache, moved_request(cache))
    hooks.prepare_for_extend(lambda _: None, work)
    assert locked(cache) == 200
    with pytest.raises(MemoryError):
        hooks.forward_batch_init(lambda *a: fail(), object, work, None)
    assert locked(cache) == 0


def test_released_when_the_batch_never_runs(cache: RadixRopeCache) -> None:
    hooks.prepare_for_extend(lambda _: None, batch(cache, moved_request(cache)))
    assert locked(cache) == 200
    unrelated = request("other", list(range(100)), cache)
    hooks.prepare_for_extend(lambda _: None, batch(cache, unrelated))
    assert locked(cache) == 0


def run_forward(cache: RadixRopeCache, req: Any, original: Any) -> Any:
    work = batch(cache, req)
    hooks.prepare_for_extend(lambda _: None, work)
    total = req.extend_len
    forward = SimpleNamespace(req_pool_indices=torch.tensor([0]))
    forward = hooks.forward_batch_init(lambda *a: forward, object, work, None)
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=torch.arange(500, 500 + total)[None]),
        kv_index_translator=None,
        prefill_cuda_graph_runner=None,
        attn_backend=SimpleNamespace(),
    )
    return hooks.forward_raw(original, runner, forward)


def test_released_when_the_copy_fails(cache: RadixRopeCache) -> None:
    assert isinstance(cache.corrector, Mover)
    cache.corrector.fails = True
    req = moved_request(cache)
    seen = run_forward(cache, req, lambda runner, forward: forward)
    assert locked(cache) == 0
    # The batch ran whole, and the request says so.
    assert seen.req_pool_indices.tolist() == [0]
    assert req.cached_tokens == 0
    assert req.radix_rope.exact_until is None and req.radix_rope.shifted_tokens == 0
    assert cache.fallbacks.counts == {"copy": 1}


def test_a_rank_never_falls_back_alone(cache: RadixRopeCache) -> None:
    assert isinstance(cache.corrector, Mover)
    cache.fallbacks.ranks = 2
    cache.corrector.fails = True
    with pytest.raises(RuntimeError, match="injected copy"):
        run_forward(cache, moved_request(cache), lambda *a: None)
    assert locked(cache) == 0
    # A fault in planning is met by every rank, unless this one is out of memory.
    cache.fallbacks.survive("plan", ValueError("injected"))
    with pytest.raises(MemoryError):
        cache.fallbacks.survive("plan", MemoryError("injected"))


def test_failed_checks_end_the_server_when_plans_are_checked() -> None:
    Fallbacks().survive("plan", AssertionError("injected"))
    with pytest.raises(AssertionError):
        Fallbacks(strict=True).survive("plan", AssertionError("injected"))


def test_released_and_copied_before_the_forward(
    cache: RadixRopeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(cache.corrector, Mover)

    class StopError(Exception):
        pass

    def stop(*args: Any) -> Any:
        raise StopError

    monkeypatch.setattr(hooks, "split_rows", lambda *a: SimpleNamespace(forward_batch=None))
    with pytest.raises(StopError):
        run_forward(cache, moved_request(cache), stop)
    assert locked(cache) == 0
    ((source, target, delta),) = cache.corrector.moves
    # Request positions [3 + 16, 203) from document positions [16, 200).
    assert source == list(range(16, 200))
    assert target == list(range(500 + 19, 500 + 203))
    assert set(delta) == {3}


def test_plans_are_given_up_when_locked_donors_leave_too_little(cache: RadixRopeCache) -> None:
    cache.token_to_kv_pool_allocator.free = 150
    # 205 tokens are needed: 150 free and 200 evictable, unless the donor is locked.
    reuse = plan_batch(cache, batch(cache, moved_request(cache)), max_rows=64)
    assert reuse.entries == []
    assert locked(cache) == 0
    cache.token_to_kv_pool_allocator.free = 205
    reuse = plan_batch(cache, batch(cache, moved_request(cache)), max_rows=64)
    assert len(reuse.entries) == 1
    reuse.release()
    assert locked(cache) == 0


def test_plans_are_given_up_when_their_rows_do_not_fit(cache: RadixRopeCache) -> None:
    work = batch(cache, moved_request(cache, "a"), moved_request(cache, "b"))
    # Each has two rows (before the run, and its head; after it).
    assert [len(e.plan.rows) for e in plan_batch(cache, work, max_rows=4).entries] == [2, 2]
    assert len(plan_batch(cache, work, max_rows=3).entries) == 1
    assert len(plan_batch(cache, work, max_rows=2).entries) == 0
    cache.reset()


@pytest.mark.parametrize(
    "changed",
    [
        {"multimodal_inputs": object()},
        {"input_embeds": [[0.0]]},
        {"positional_embed_overrides": object()},
        {"token_indices_to_pool": [3]},
        {"multi_item_delimiter_indices": [3]},
        {"beam_group": object()},
        {"extra_key": "another tenant"},
        {"cache_salt": "salt"},
        {"return_logprob": True, "logprob_start_len": 0},
    ],
)
def test_requests_that_must_not_reuse_are_planned_exact(
    cache: RadixRopeCache, changed: dict[str, Any]
) -> None:
    req = request("r", [1, 2, 3, *DOCUMENT, 4, 5], cache, **changed)
    assert plan_batch(cache, batch(cache, req), max_rows=64).entries == []
    assert locked(cache) == 0
