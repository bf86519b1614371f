"""What else stands in a batch beside a request that reuses: rows, places, neighbours."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from radix_rope.content.check import check_plan
from radix_rope.content.segment import Provenance
from radix_rope.integration import hooks
from radix_rope.integration.cache import RadixRopeCache
from radix_rope.integration.reuse import BatchReuse, plan_batch
from radix_rope.integration.rows import split_rows
from tests.integration.test_locks import (
    DOCUMENT,
    array,
    batch,
    cache,  # noqa: F401 - a fixture
    locked,
    moved_request,
    request,
)

Cache = RadixRopeCache


def runs_of(reuse: BatchReuse) -> list[list[int]]:
    return [[len(run) for run in entry.plan.runs] for entry in reuse.entries]


def test_a_request_id_may_stand_in_a_batch_twice(cache: Cache) -> None:  # noqa: F811
    # A mixed batch: "r" is prefilled while its aborted namesake takes its last decode step.
    work = batch(cache, request("other", [7] * 20, cache), moved_request(cache, "r"))
    hooks.prepare_for_extend(lambda _: None, work)
    work.reqs.append(request("r", [9], cache))
    forward = SimpleNamespace(rids=["other", "r", "r"], req_pool_indices=torch.tensor([0, 1, 2]))
    hooks.forward_batch_init(lambda *a: forward, object, work, None)
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(
            req_to_token=torch.arange(3)[:, None] * 1000 + torch.arange(300)
        ),
        kv_index_translator=None,
    )
    seen: dict[str, Any] = {}

    class StopError(BaseException):
        """Not an error that is survived."""

    def stop(_: Any, rows: Any, __: Any) -> Any:
        seen.update(rows)
        raise StopError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "split_rows", stop)
        with pytest.raises(StopError):
            hooks.forward_raw(lambda *a: None, runner, forward)
    assert list(seen) == [1]
    assert seen[1] == [(0, 19), (203, 205)]
    ((_, target, _),) = cache.corrector.moves  # type: ignore[union-attr]
    assert target == list(range(1019, 1203))


@pytest.mark.parametrize("field", ["positional_embed_overrides", "input_embeds"])
def test_no_rows_beside_a_request_that_names_tokens_by_number(
    cache: Cache,  # noqa: F811
    field: str,
) -> None:
    neighbour = request("n", list(range(50)), cache, **{field: object()})
    work = batch(cache, moved_request(cache), neighbour)
    assert plan_batch(cache, work, max_rows=64).entries == []
    assert locked(cache) == 0


def test_rows_are_kept_for_decoding_requests_that_may_join(cache: Cache) -> None:  # noqa: F811
    cache.req_to_token_pool = SimpleNamespace(size=32, available_size=lambda: 4)
    work = batch(cache, moved_request(cache))
    work.reqs[0].kv = SimpleNamespace(holds_kv=False)
    # 28 rows are taken; the request and its one run take two.
    assert len(plan_batch(cache, work, max_rows=29).entries) == 1
    cache.mixes = True
    assert plan_batch(cache, work, max_rows=29).entries == []
    assert len(plan_batch(cache, work, max_rows=30).entries) == 1
    # A chunked request that goes on holds one of them itself.
    work.reqs[0].kv.holds_kv = True
    assert len(plan_batch(cache, work, max_rows=29).entries) == 1


def test_the_shortest_runs_are_given_up_first(cache: Cache) -> None:  # noqa: F811
    tokens = [1, *DOCUMENT[:100], 2, *DOCUMENT[20:200], 3, *DOCUMENT[:140], 4]
    reuse = plan_batch(cache, batch(cache, request("r", tokens, cache)), max_rows=64)
    assert runs_of(reuse) == [[84, 164, 124]]
    reuse.release()
    for max_rows, kept in [(3, [[164, 124]]), (2, [[164]]), (1, [])]:
        reuse = plan_batch(cache, batch(cache, request("r", tokens, cache)), max_rows)
        assert runs_of(reuse) == kept
        for entry in reuse.entries:
            check_plan(entry.plan, tokens)
            assert len(entry.plan.rows) == max_rows
            assert len(entry.source_slots) == entry.plan.reused_tokens
        reuse.release()
        assert locked(cache) == 0


def test_rows_take_the_paged_path_of_a_backend_per_phase() -> None:
    prefill = SimpleNamespace(use_paged=False)
    runner = SimpleNamespace(
        attn_backend=SimpleNamespace(prefill_backend=prefill, decode_backend=SimpleNamespace()),
        prefill_cuda_graph_runner="graphs",
    )
    with hooks._rows_are_safe(runner):
        assert prefill.use_paged is True
        assert runner.prefill_cuda_graph_runner is None
    assert prefill.use_paged is False
    assert runner.prefill_cuda_graph_runner == "graphs"


def test_flush_forgets_a_batch_that_never_ran(cache: Cache) -> None:  # noqa: F811
    hooks.prepare_for_extend(lambda _: None, batch(cache, moved_request(cache)))
    cache.reset()
    # The locks named nodes of the tree that is gone.
    hooks.prepare_for_extend(lambda _: None, batch(cache, moved_request(cache)))
    assert locked(cache) == 0


def test_what_is_known_per_token_is_split_with_the_tokens() -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    whole = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=torch.arange(100, 110),
        req_pool_indices=torch.tensor([3]),
        seq_lens=torch.tensor([10]),
        out_cache_loc=torch.arange(10),
        seq_lens_sum=10,
        positions=torch.arange(10),
        mm_token_modalities=torch.arange(10),
        global_num_token_non_padded=torch.tensor(10, dtype=torch.int32),
        extend_prefix_lens=torch.tensor([0], dtype=torch.int32),
        extend_seq_lens=torch.tensor([10], dtype=torch.int32),
        extend_start_loc=torch.tensor([0], dtype=torch.int32),
        extend_prefix_lens_cpu=[0],
        extend_seq_lens_cpu=[10],
    )
    plan = SimpleNamespace(bind=lambda *a: None)
    translator = SimpleNamespace(own_plan=lambda _: plan)
    rows = split_rows(whole, {0: [(0, 2), (8, 10)]}, translator).forward_batch
    assert rows.input_ids.tolist() == [100, 101, 108, 109]
    assert rows.mm_token_modalities.tolist() == [0, 1, 8, 9]
    assert rows.global_num_token_non_padded.item() == 4
    assert rows.global_num_token_non_padded.dtype == torch.int32
    assert rows.seq_lens.tolist() == [2, 10]
    assert whole.global_num_token_non_padded.item() == 10


def test_a_row_pointed_at_approximate_nodes_goes_on_approximate(cache: Cache) -> None:  # noqa: F811
    """Two equal prompts in one batch, one spliced, one computed: the spliced one enters first."""
    prompt = [1, 2, 3, *DOCUMENT]
    key = RadixKey(array("q", prompt))
    cache.insert(InsertParams(key=key, value=torch.arange(1000, 1000 + len(prompt))))
    node = cache.root_node.children[1]
    cache.content.set_provenance(node.segment, Provenance(False, True, 1, 1))  # type: ignore[union-attr]
    rows = torch.arange(2000, 2400)[None].clone()
    cache.req_to_token_pool = SimpleNamespace(
        req_to_token=rows, write=lambda at, values: rows.__setitem__(at, values)
    )
    req = request(
        "computed", prompt, cache, priority=0, origin_input_ids=array("q", prompt),
        lock=cache.lock(cache.root_node),
        kv=SimpleNamespace(
            req_pool_idx=0, swa_evict_floor=0, cache_inserted_len=0, cache_protected_len=0
        ),
    )  # fmt: skip
    plan_batch(cache, batch(cache, request("", [5], cache)), max_rows=8)
    # In use by the spliced one, or its nodes would take this one's exact KV.
    user = cache.lock(node)
    cache.checkpoint(req, up_to=len(prompt))
    assert rows[0, 0].item() == 1000
    # What it generates from here on looked at the other request's KV.
    req.full_untruncated_fill_ids.extend([8, 9])
    cache.checkpoint(req, up_to=len(prompt) + 2)
    assert req.last_node.segment.tokens.tolist() == [8, 9]
    assert not req.last_node.segment.provenance.exact
    cache.unlock(req.lock)
    cache.unlock(user)
    assert locked(cache) == 0
