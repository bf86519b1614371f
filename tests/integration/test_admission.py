"""SGLang's own `PrefillAdder` on a simulated pool: what is admitted, cut and charged."""

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.prefill_budget import PrefillBudget
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

from radix_rope.config import RadixRopeConfig
from radix_rope.content.check import check_plan
from radix_rope.integration import seams
from radix_rope.integration.admission import add_chunked_req, add_one_req
from radix_rope.integration.cache import RadixRopeCache
from radix_rope.integration.reuse import BatchReuse, plan_batch
from tests.integration.test_locks import Allocator, Mover, locked

DOCUMENT = list(range(10_000, 11_000))
OTHER = AddReqResult.OTHER
CONTINUE = AddReqResult.CONTINUE


class Pool(Allocator):
    """A pool that only counts, with what the adder asks of one."""

    def __init__(self, free: int, page_size: int) -> None:
        super().__init__(free)
        self.page_size = page_size

    def create_prefill_budget(self, cache: Any, num_mixed_decode_tokens: int = 0) -> Any:
        return PrefillBudget(self, cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def request_slot_reserve(self, **kwargs: Any) -> int:
        return 0


class Server:
    """A cache and what the scheduler does with it, without a model.

    The steps are called as if the adder's methods were wrapped, whatever other tests wrapped.
    """

    def __init__(self, page_size: int = 1, free: int = 100_000, **config: Any) -> None:
        params = CacheInitParams(
            disable=False, req_to_token_pool=None, page_size=page_size,
            token_to_kv_pool_allocator=Pool(free, page_size),
        )  # fmt: skip
        self.cache = RadixRopeCache(params, RadixRopeConfig(**config))
        self.cache.corrector = Mover()  # type: ignore[assignment]
        self.cache.max_rows = 64
        self.hold(DOCUMENT)

    def hold(self, tokens: list[int]) -> None:
        tokens = tokens[: len(tokens) // self.cache.page_size * self.cache.page_size]
        self.cache.insert(
            InsertParams(key=RadixKey(array("q", tokens)), value=torch.arange(len(tokens)))
        )

    def finish_pass(self, req: Any) -> None:
        """What was computed of a request is in the tree, as after its forward."""
        self.hold(list(req.full_untruncated_fill_ids[: req.extend_end]))
        req.kv.cache_inserted_len = req.extend_end // self.cache.page_size * self.cache.page_size

    def adder(self, chunk: int | None = 100, inputs: int = 5000) -> PrefillAdder:
        pool = self.cache.token_to_kv_pool_allocator
        return PrefillAdder(self.cache.page_size, self.cache, pool, None, 0.5, inputs, chunk)

    def add(self, adder: PrefillAdder, req: Any, has_chunked_req: bool = False) -> Any:
        req.init_next_round_input(self.cache)
        return add_one_req(original("add_one_req"), adder, req, has_chunked_req, None)

    def add_chunk(self, adder: PrefillAdder, req: Any) -> Any:
        req.prefix_len = req.extend_end
        req.init_next_round_input()
        return add_chunked_req(original("add_chunked_req"), adder, req)

    def prepare(self, adder: PrefillAdder) -> BatchReuse:
        batch = SimpleNamespace(
            reqs=adder.can_run_list, return_hidden_states=False,
            model_config=SimpleNamespace(is_generation=True),
        )  # fmt: skip
        admission, self.cache.admission = self.cache.admission, None
        reuse = plan_batch(self.cache, batch, self.cache.max_rows, admission)
        for entry in reuse.entries:
            check_plan(entry.plan, self.cache.tokens_of(entry.req, entry.plan.end))
        return reuse


def original(name: str, owner: type = PrefillAdder) -> Callable[..., Any]:
    """SGLang's own method, below hooks and steps."""
    found = getattr(owner, name)
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return found  # type: ignore[no-any-return]


def request(rid: str, tokens: list[int], **changed: Any) -> Any:
    req = Req(rid, "", array("q", tokens), SamplingParams(max_new_tokens=4))
    for name, value in changed.items():
        setattr(req, name, value)
    return req


def prompt(unique: int, known: int, at: int = 0) -> list[int]:
    """Some tokens of its own, then a part of the document, then three more of its own."""
    own = 100_000 * (1 + unique) + 10_000 * at
    return [*range(own, own + unique), *DOCUMENT[at : at + known], own + 1, own + 2, own + 3]


@pytest.fixture(autouse=True)
def without_server_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefillAdder, "_replay_len", lambda *a: 0)


def test_both_steps_are_on_the_serving_path() -> None:
    assert {seams.ADD_ONE_REQ, seams.ADD_CHUNKED_REQ} <= set(seams.SERVING_PATH)
    for target in (seams.ADD_ONE_REQ, seams.ADD_CHUNKED_REQ):
        assert callable(original(target.rsplit(".", 1)[1]))


def test_a_long_reused_prompt_is_admitted_whole_and_charged_for_its_gaps() -> None:
    server = Server()
    adder = server.adder(chunk=100)
    req = request("long", prompt(20, 900))
    total = adder.rem_total_tokens
    assert server.add(adder, req) is CONTINUE
    assert req.extend_end == 923 and adder.new_chunked_req is None
    # Its own tokens, and the head of the run.
    assert adder.rem_chunk_tokens == 100 - (20 + 16 + 3)
    assert adder.rem_input_tokens == 5000 - 39
    # Copies need slots: memory is charged in full.
    assert total - adder.rem_total_tokens >= 923
    (entry,) = server.prepare(adder).entries
    assert entry.plan.computed_tokens == 39


def test_several_reused_prompts_share_one_budget() -> None:
    server = Server()
    adder = server.adder(chunk=100)
    reqs = [request(str(i), prompt(10 + i, 900, at=i)) for i in range(4)]
    results = [server.add(adder, req) for req in reqs]
    # 29, 30, 31 and then ten of the next.
    assert results == [CONTINUE, CONTINUE, CONTINUE, OTHER]
    assert [req.extend_end for req in reqs] == [913, 914, 915, 10]
    assert adder.new_chunked_req is reqs[3]
    assert adder.rem_chunk_tokens <= 0
    reuse = server.prepare(adder)
    assert [entry.plan.computed_tokens for entry in reuse.entries] == [29, 30, 31]
    reuse.release()
    assert locked(server.cache) == 0


def test_cut_where_the_computed_tokens_reach_the_budget() -> None:
    server = Server()
    tokens = [*prompt(60, 400), *prompt(70, 500, at=450)]
    req = request("chunks", tokens)
    ends, computed = [], []
    adder = server.adder(chunk=100)
    server.add(adder, req)
    while True:
        assert len(adder.can_run_list) == 1
        reuse = server.prepare(adder)
        done = sum(e.plan.reused_tokens for e in reuse.entries)
        computed.append(req.extend_end - req.prefix_len - done)
        ends.append(req.extend_end)
        reuse.release()
        if req.extend_end == len(tokens):
            break
        adder = server.adder(chunk=100)
        left = server.add_chunk(adder, req)
        assert (left is req) == (req.extend_end < len(tokens))
        # Nobody else can be cut in a batch where this one was.
        assert adder.rem_chunk_tokens <= 0 or left is None
    assert computed == [100, 68]
    # 60 own, 16 head, the run, 3 own, 21 of the next 70.
    assert ends == [60 + 400 + 3 + 21, len(tokens)]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("budget", [40, 100, 160])
def test_pages_and_boundaries_inside_runs(page_size: int, budget: int) -> None:
    server = Server(page_size=page_size, min_run_tokens=32)
    req = request("r", [*prompt(50, 333), *prompt(90, 400, at=500), *prompt(20, 0, at=3)])
    adder = server.adder(chunk=budget // page_size * page_size)
    server.add(adder, req)
    assert req.extend_end % page_size == 0 or req.extend_end == len(req.origin_input_ids)
    (entry,) = server.prepare(adder).entries or [None]
    reused = 0 if entry is None else entry.plan.reused_tokens
    assert req.extend_end - reused <= budget
    assert req.extend_end >= budget // page_size * page_size


def test_without_chunks_the_input_budget_counts_computed_tokens() -> None:
    server = Server()
    adder = server.adder(chunk=None, inputs=100)
    assert server.add(adder, request("a", prompt(10, 900))) is CONTINUE
    assert adder.rem_input_tokens == 71
    assert server.add(adder, request("b", prompt(11, 900, at=5))) is CONTINUE
    assert server.add(adder, request("c", list(range(300)))) is OTHER
    assert [req.rid for req in adder.can_run_list] == ["a", "b"]


def test_others_are_charged_by_length() -> None:
    server = Server()
    for changed in ({"multimodal_inputs": object()}, {"token_indices_to_pool": [3]}):
        adder = server.adder(chunk=100)
        req = request("r", prompt(20, 900), **changed)
        server.add(adder, req)
        assert req.extend_end == 100 and adder.new_chunked_req is req
    exact = request("e", prompt(20, 900))
    exact.sampling_params.custom_params = {"radix_rope": {"mode": "exact"}}
    adder = server.adder(chunk=100)
    server.add(adder, exact)
    assert exact.extend_end == 100


def test_a_batch_that_must_be_whole_and_reuse_are_kept_apart() -> None:
    server = Server()
    whole = {"return_hidden_states": True}
    adder = server.adder(chunk=2000)
    assert server.add(adder, request("reuses", prompt(20, 900))) is CONTINUE
    assert server.add(adder, request("whole", list(range(50)), **whole)) is OTHER
    assert len(adder.can_run_list) == 1
    adder = server.adder(chunk=2000)
    assert server.add(adder, request("whole", list(range(50)), **whole)) is CONTINUE
    # What would reuse nothing may join it.
    assert server.add(adder, request("new", list(range(300, 340)))) is CONTINUE
    assert adder.rem_chunk_tokens == 2000 - 50 - 40
    assert server.add(adder, request("reuses", prompt(20, 900))) is OTHER
    assert [req.rid for req in adder.can_run_list] == ["whole", "new"]
    # In the next batch it has its reuse.
    adder = server.adder(chunk=2000)
    assert server.add(adder, request("reuses", prompt(20, 900))) is CONTINUE
    assert adder.rem_chunk_tokens == 2000 - 39


def test_rows_that_do_not_fit_wait_for_the_next_batch() -> None:
    server = Server()
    server.cache.max_rows = 4
    adder = server.adder(chunk=1000)
    first, second, plain = (
        request("a", prompt(20, 900)),
        request("b", [*prompt(20, 300), *prompt(30, 300, at=400)]),
        request("c", list(range(30))),
    )
    assert server.add(adder, first) is CONTINUE
    # Two rows are taken; it needs three.
    assert server.add(adder, second) is OTHER
    assert server.add(adder, plain) is CONTINUE
    assert server.add(adder, request("d", list(range(40, 80)))) is CONTINUE
    assert server.add(adder, request("e", list(range(90, 120)))) is OTHER
    reuse = server.prepare(adder)
    assert [len(entry.plan.rows) for entry in reuse.entries] == [2]
    reuse.release()
    # The first of a batch is always admitted, with as many of its runs as fit.
    server.cache.max_rows = 2
    adder = server.adder(chunk=1000)
    assert server.add(adder, second) is CONTINUE
    assert adder.rem_chunk_tokens == 1000 - (606 + 50 - 284)
    reuse = server.prepare(adder)
    assert [len(entry.plan.rows) for entry in reuse.entries] == [2]
    assert server.cache.content.stats.refused["rows"] == 1  # type: ignore[union-attr]
    reuse.release()


def test_donors_that_leave_too_little_memory_are_not_counted_on() -> None:
    server = Server(free=950)
    adder = server.adder(chunk=5000)
    assert server.add(adder, request("a", prompt(20, 900))) is CONTINUE
    assert adder.rem_chunk_tokens == 5000 - 39
    server.prepare(adder).release()
    # Enough for the request alone, with the document evicted.
    server.cache.token_to_kv_pool_allocator.free = 500
    adder = server.adder(chunk=5000)
    assert server.add(adder, request("a", prompt(20, 900))) is CONTINUE
    assert adder.rem_chunk_tokens == 5000 - 923
    assert server.prepare(adder).entries == []
    assert server.cache.content.stats.refused["memory"] == 1  # type: ignore[union-attr]
    assert locked(server.cache) == 0


def test_a_chunk_does_not_grow_where_memory_is_short() -> None:
    server = Server()
    req = request("r", [*range(150), *DOCUMENT[:900], 5, 6])
    adder = server.adder(chunk=100)
    server.add(adder, req)
    assert req.extend_end == 100
    adder = server.adder(chunk=100)
    # The running requests' reservations leave nothing; SGLang lets one chunk go on.
    adder.memory_budget.total_offset += 10**6
    assert server.add_chunk(adder, req) is req
    assert req.extend_end == 200


def test_plans_are_made_once_and_again_when_content_changes() -> None:
    server = Server()
    stats = server.cache.content.stats  # type: ignore[union-attr]
    req = request("a", prompt(20, 900))
    for _ in range(3):
        adder = server.adder()
        server.add(adder, req)
    server.prepare(adder).release()
    assert stats.matches == 1
    adder = server.adder()
    server.add(adder, req)
    server.hold(list(range(500, 900)))
    (entry,) = server.prepare(adder).entries
    assert entry.plan.reused_tokens == 884 and stats.matches == 3


def test_splits_between_admission_and_preparation_are_followed() -> None:
    server = Server()
    adder = server.adder(chunk=1000)
    server.add(adder, request("a", prompt(20, 900)))
    # Its prefix ends inside the donor.
    server.add(adder, request("b", [*DOCUMENT[:500], *range(40)]))
    reuse = server.prepare(adder)
    assert len(reuse.entries[0].plan.runs[0].pieces) == 2
    assert len(reuse.entries[0].source_slots) == 884
    assert server.cache.content.stats.matches == 2  # type: ignore[union-attr]
    reuse.release()
    # The second request holds its prefix.
    assert locked(server.cache) == 500


def test_a_failing_plan_is_charged_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    from radix_rope.integration import admission

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("injected")

    server = Server()
    with monkeypatch.context() as patch:
        patch.setattr(admission, "plan_of", fail)
        req = request("r", prompt(20, 900))
        adder = server.adder(chunk=100)
        server.add(adder, req)
        assert req.extend_end == 100
        adder = server.adder(chunk=100)
        assert server.add_chunk(adder, req) is req
        assert req.extend_end == 200
    # What was charged in full is computed in full.
    assert server.prepare(adder).entries == []
    assert server.cache.fallbacks.counts == {"plan": 2}
    assert adder.rem_chunk_tokens == 0


def attentive(rid: str, tokens: list[int], percent: int) -> Any:
    """A request that asks for a second pass over `percent` of its run tokens."""
    asked = {"repair": "attention", "attention_percent": percent}
    req = request(rid, tokens)
    req.sampling_params.custom_params = {"radix_rope": asked}
    return req


def test_a_second_pass_longer_than_the_budget_is_a_batch_of_its_own() -> None:
    server = Server()
    server.cache.repair_rule = object()  # type: ignore[assignment]
    long = attentive("long", prompt(20, 900), percent=50)
    # First in a batch: whole, in both passes, and nobody joins.
    adder = server.adder(chunk=100)
    server.add(adder, long)
    assert long.extend_end == 923 and adder.new_chunked_req is None
    assert adder.budget_state() is OTHER
    (entry,) = server.prepare(adder).entries
    assert entry.plan.options.repair == "attention" and entry.plan.computed_tokens == 24
    # Behind another one it waits; a short one does not.
    adder = server.adder(chunk=100)
    assert server.add(adder, request("other", prompt(21, 0))) is CONTINUE
    assert server.add(adder, attentive("waits", prompt(22, 900), percent=50)) is OTHER
    assert server.add(adder, attentive("joins", prompt(23, 200), percent=5)) is CONTINUE
    assert [req.rid for req in adder.can_run_list] == ["other", "joins"]
    # Its own 23, the sink, the end of 3; 5% of 199, and the end once more.
    assert adder.rem_chunk_tokens == 100 - 24 - (27 + 10 + 3)


def test_where_the_first_pass_is_too_long_the_last_chunk_has_the_second() -> None:
    server = Server()
    server.cache.repair_rule = object()  # type: ignore[assignment]
    req = attentive("long", [*range(150), *prompt(20, 900)], percent=50)
    adder = server.adder(chunk=100)
    server.add(adder, req)
    assert req.extend_end == 100 and server.prepare(adder).entries == []
    adder = server.adder(chunk=100)
    assert server.add_chunk(adder, req) is None
    assert req.extend_end == 150 + 923
    (entry,) = server.prepare(adder).entries
    assert entry.plan.options.repair == "attention"


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.tuples(st.integers(0, 120), st.integers(0, 400), st.integers(0, 500)),
        min_size=1, max_size=8,
    ),
    st.sampled_from([1, 16]),
    st.sampled_from([32, 96, 256]),
    st.sampled_from([3, 8, 64]),
    st.integers(600, 4000),
)  # fmt: skip
def test_every_request_is_served_within_the_budget(  # type: ignore[no-untyped-def]
    prompts, page_size, chunk, max_rows, free
) -> None:
    """A whole queue, pass by pass, as SGLang's scheduler does it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefillAdder, "_replay_len", lambda *a: 0)
        server = Server(page_size=page_size, free=free, min_run_tokens=24, check_plans=True)
        server.cache.max_rows = max_rows
        waiting = [
            request(str(i), prompt(own + 1, known, at))
            for i, (own, known, at) in enumerate(prompts)
        ]
        chunked: Any = None
        passes = 0
        while waiting or chunked:
            passes += 1
            assert passes < 200, "somebody starves"
            adder = server.adder(chunk=chunk)
            went_on = chunked
            if chunked is not None:
                chunked = server.add_chunk(adder, chunked)
            for req in waiting:
                if adder.budget_state() is OTHER:
                    break
                if server.add(adder, req, chunked is not None) is not CONTINUE:
                    break
            assert adder.can_run_list, "nobody was admitted"
            waiting = [req for req in waiting if req not in adder.can_run_list]
            if adder.new_chunked_req is not None:
                assert chunked is None, "two requests are cut"
                chunked = adder.new_chunked_req
            reuse = server.prepare(adder)
            lengths = sum(r.extend_end - r.prefix_len for r in adder.can_run_list)
            computed = lengths - sum(e.plan.reused_tokens for e in reuse.entries)
            assert computed <= chunk + page_size * len(adder.can_run_list)
            assert len(adder.can_run_list) + sum(len(e.plan.rows) - 1 for e in reuse.entries) <= (
                max(max_rows, len(adder.can_run_list))
            )
            reuse.release()
            for req in adder.can_run_list:
                # SGLang locks a request's prefix when it is admitted first.
                if req is not went_on:
                    server.cache.dec_lock_ref(req.last_node)
            assert locked(server.cache) == 0
            for req in adder.can_run_list:
                server.finish_pass(req)
