"""Looks inside a scheduler process on behalf of a test.

A test names a function here and gets back what it returned: the scheduler
loads this module as a dotted-path cache implementation (which nobody selects)
and runs the function through SGLang's own RPC.
"""

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from radix_rope.integration.fallbacks import Fallbacks


class ProbeCache(RadixCache):
    """Never built: naming it makes SGLang's processes import this module."""


def _run(scheduler: Any, function: str, output: str, arguments: bytes) -> None:
    result = globals()[function](scheduler, **pickle.loads(arguments))
    Path(output).write_bytes(pickle.dumps(result))


Scheduler.radix_rope_probe = _run


def _report_at_flush() -> None:
    """SGLang's RPC reaches one data-parallel rank only, a flush reaches all."""
    folder = os.environ.get("RADIX_ROPE_TEST_FLUSH_FOLDER")
    if folder is None:
        return
    original = Scheduler.flush_cache

    def flush_cache(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        state = {"accounting": accounting(scheduler), "tree": tree(scheduler)}
        (Path(folder) / str(os.getpid())).write_bytes(pickle.dumps(state))
        return original(scheduler, *args, **kwargs)

    Scheduler.flush_cache = flush_cache


def accounting(scheduler: Any) -> dict[str, int]:
    """Every slot of the pool by state, after checking tree and index."""
    cache = scheduler.tree_cache
    if hasattr(cache, "check_invariants"):
        cache.check_invariants()
    allocator = cache.token_to_kv_pool_allocator
    return {
        "available": allocator.available_size(),
        "evictable": cache.evictable_size(),
        "protected": cache.protected_size(),
        "total": allocator.size,
        "free_requests": len(scheduler.req_to_token_pool.free_slots),
        "requests": scheduler.req_to_token_pool.size,
        "fallbacks": sum(getattr(cache, "fallbacks", Fallbacks()).counts.values()),
    }


def forms(scheduler: Any) -> dict[str, str]:
    """By target: "step" where SGLang itself calls us, "hook" where it was wrapped, or "none"."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from radix_rope.integration import seams

    found = {}
    for target in seams.SERVING_PATH:
        step = seams.step_of(target)
        steps = step is not None and getattr(step, seams.STEP_ATTRIBUTE) is not None
        hooked = target in HookRegistry._patched
        found[target] = {(True, False): "step", (False, True): "hook"}.get((steps, hooked), "none")
    return found


def set_plan_options(scheduler: Any, **options: Any) -> None:
    """Change the planner's options of a running server."""
    cache = scheduler.tree_cache
    cache.plan_options = replace(cache.plan_options, **options)


def cached_kv(scheduler: Any, tokens: list[int]) -> dict[str, Any]:
    """K and V of the cached prefix of `tokens`, all layers, and its nodes' provenance.

    For MLA, K is the whole latent row and V its latent.
    """
    cache = scheduler.tree_cache
    nodes, node, rest = [], cache.root_node, RadixKey(_array(tokens))
    while len(rest) >= cache.page_size:
        child = node.children.get(rest.child_key(cache.page_size))
        if child is None or child.key.match(rest, page_size=cache.page_size) < len(child.key):
            break
        nodes.append(child)
        node, rest = child, rest[len(child.key) :]
    slots = torch.cat([n.value for n in nodes]) if nodes else torch.empty(0, dtype=torch.int64)
    pool = cache.token_to_kv_pool_allocator.get_kvcache()
    if hasattr(pool, "kv_lora_rank"):
        keys, values = pool.kv_buffer, [b[..., : pool.kv_lora_rank] for b in pool.kv_buffer]
    else:
        keys, values = pool.k_buffer, pool.v_buffer
    return {
        "k": torch.stack([b[slots] for b in keys]).float().numpy(),
        "v": torch.stack([b[slots] for b in values]).float().numpy(),
        "nodes": [(n.segment.start, n.segment.end, n.segment.provenance) for n in nodes],
    }


def refused_donors(scheduler: Any) -> dict[str, int]:
    """How often what kept content from being reused."""
    return dict(scheduler.tree_cache.content.stats.refused)


def forget(scheduler: Any, tokens: list[int]) -> None:
    """Evict one path: what hangs below its last node, then its own end upward."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

    cache = scheduler.tree_cache
    node = cache.match_prefix(MatchPrefixParams(key=RadixKey(_array(tokens)))).last_device_node
    while node is not cache.root_node:
        if node.children:
            node = next(iter(node.children.values()))
            continue
        if node.lock_ref:
            return
        cache.token_to_kv_pool_allocator.free_segment(node.value, start_pos=0)
        cache._delete_leaf(node)
        node = node.parent


def plan_of(scheduler: Any, tokens: list[int], begin: int = 0) -> Any:
    """(begin, end, delta) of the runs a request would reuse now."""
    from radix_rope.content.planner import make_plan

    cache = scheduler.tree_cache
    plan = make_plan(
        cache.content, np.array(tokens), begin, len(tokens), (None, None), cache.plan_options
    )
    return [] if plan is None else [(run.begin, run.end, run.delta) for run in plan.runs]


def arm_fault(scheduler: Any, stage: str, times: int) -> None:
    """Let a stage fail (`faults.arm`)."""
    from tests.integration import faults

    faults.arm(scheduler, stage, times)


def disarm_fault(scheduler: Any) -> dict[str, Any]:
    """What the fault did (`faults.disarm`)."""
    from tests.integration import faults

    return faults.disarm(scheduler)


def _array(tokens: list[int]) -> Any:
    from array import array

    return array("q", tokens)


def set_test_retract(scheduler: Any, on: bool) -> None:
    """SGLang's own test switch: retract running requests every few decode steps."""
    import sglang.srt.managers.scheduler as module

    module.TEST_RETRACT = on


def set_schedule(
    scheduler: Any,
    chunk_tokens: int | None = None,
    policy: str = "fcfs",
    preempts: bool | None = None,
) -> None:
    """Change how a running server cuts and orders prefills, and whether they preempt others."""
    from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy, CacheAwarePolicy

    aware = policy in [known.value for known in CacheAwarePolicy]
    scheduler.policy.policy = CacheAwarePolicy(policy) if aware else CacheAgnosticPolicy(policy)
    if chunk_tokens is not None:
        scheduler.chunked_prefill_size = chunk_tokens
    if preempts is not None:
        scheduler.enable_priority_preemption = preempts


def watch_prefills(scheduler: Any) -> None:
    """From now on, remember of every prefill batch its requests' ranges."""
    scheduler.radix_rope_prefills = []
    scheduler.radix_rope_decodes = [0]
    if "run_batch" in vars(scheduler):
        return
    run_batch = scheduler.run_batch

    def watched(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not batch.forward_mode.is_extend():
            scheduler.radix_rope_decodes[-1] += 1
        else:
            scheduler.radix_rope_decodes.append(0)
            reuse = getattr(batch, "radix_rope_reuse", None)
            reused = {} if reuse is None else {e.index: e.plan.reused_tokens for e in reuse.entries}
            scheduler.radix_rope_prefills.append(
                [
                    (len(r.origin_input_ids), r.prefix_len, r.extend_end, reused.get(index, 0))
                    for index, r in enumerate(batch.reqs)
                ]
            )
        return run_batch(batch, *args, **kwargs)

    scheduler.run_batch = watched


def prefills(scheduler: Any) -> list[list[tuple[int, int, int, int]]]:
    """Of every prefill batch since: (prompt tokens, begin, end, reused tokens) per request."""
    found: list[list[tuple[int, int, int, int]]] = scheduler.radix_rope_prefills
    return found


def decodes(scheduler: Any) -> list[int]:
    """How many batches only decoded before each of `prefills`, since the one before, and after."""
    found: list[int] = scheduler.radix_rope_decodes
    return found


def hold_until(scheduler: Any, requests: int) -> None:
    """Prefill nothing until that many requests wait, as if they had come in the same moment."""
    original = scheduler.get_new_batch_prefill

    def held(running_batch: Any) -> Any:
        from sglang.srt.managers.scheduler import NextBatchPlan

        if len(scheduler.waiting_queue) < requests:
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        del scheduler.get_new_batch_prefill
        return original(running_batch)

    scheduler.get_new_batch_prefill = held


def forget_retracted(scheduler: Any) -> None:
    """From now on, evict what retracted requests had computed before they are looked at again."""
    original = scheduler.get_new_batch_prefill

    def forgetting(running_batch: Any) -> Any:
        for req in scheduler.waiting_queue:
            if req.retracted_stain:
                forget(scheduler, list(req.origin_input_ids))
        return original(running_batch)

    scheduler.get_new_batch_prefill = forgetting


def stop_forgetting(scheduler: Any) -> None:
    """End what `forget_retracted` began."""
    del scheduler.get_new_batch_prefill


def abort_at(scheduler: Any, stages: dict[str, str]) -> None:
    """Abort requests, by id, in a stage: "queued", "between chunks" or "decoding".

    Between two steps, where SGLang reads what clients sent, and through the same function.
    """
    from sglang.srt.managers.io_struct import AbortReq

    scheduler.radix_rope_aborted = {}
    original = scheduler.get_next_batch_to_run

    def aborting(running_batch: Any, *args: Any, **kwargs: Any) -> Any:
        places = {
            "queued": scheduler.waiting_queue,
            "between chunks": [] if scheduler.chunked_req is None else [scheduler.chunked_req],
            "decoding": [req for req in running_batch.reqs if req.output_ids],
        }
        for stage, reqs in places.items():
            for req in list(reqs):
                if stages.get(req.rid) == stage and req.rid not in scheduler.radix_rope_aborted:
                    scheduler.radix_rope_aborted[req.rid] = (
                        stage, req.extend_end or 0, len(req.output_ids),
                    )  # fmt: skip
                    scheduler.abort_request(AbortReq(rid=req.rid))
        return original(running_batch, *args, **kwargs)

    scheduler.get_next_batch_to_run = aborting


def aborted(scheduler: Any) -> dict[str, tuple[str, int, int]]:
    """End what `abort_at` began: by id the stage, the tokens prefilled and the tokens given."""
    del scheduler.get_next_batch_to_run
    found: dict[str, tuple[str, int, int]] = scheduler.radix_rope_aborted
    return found


def tree(scheduler: Any) -> list[Any]:
    """Places, tokens, namespaces, provenance and slots of all nodes."""
    return [
        (s.start, s.tokens.tolist(), s.namespace, s.provenance, s.owner.value.tolist())
        for s in scheduler.tree_cache.content.segments()
    ]


def tree_of_rank(scheduler: Any, folder: str) -> None:
    """Write this rank's whole tree to a file of its own."""
    scheduler.tree_cache.check_invariants()
    (Path(folder) / str(os.getpid())).write_bytes(pickle.dumps(tree(scheduler)))


def rope_specs(scheduler: Any) -> Any:
    """The rotation of every layer, as it is read from the model that is served."""
    from radix_rope.integration.rope_specs import read_rope_specs

    pool = scheduler.tree_cache.token_to_kv_pool_allocator.get_kvcache()
    context_len = int(scheduler.model_config.context_len)
    return read_rope_specs(
        scheduler.tp_worker.model_runner.model, pool.layer_num, pool, context_len
    )


_report_at_flush()


def compute_row_by_row(scheduler: Any, on: bool) -> None:
    """Make every token's arithmetic independent of what is computed beside it.

    Matrix products round differently for other numbers of rows, so the same token can differ in
    its last bits with the length of a cached prefix. With this on, equal KV gives equal bits.
    """
    from radix_rope.integration.cpu import attention
    from radix_rope.integration.cpu import linear as layers

    if not on:
        layers.linear, torch.matmul = _PLAIN.pop("linear"), _PLAIN.pop("matmul")
        attention._attend = _PLAIN.pop("attend")
        return
    linear = _PLAIN["linear"] = layers.linear
    matmul = _PLAIN["matmul"] = torch.matmul
    attend = _PLAIN["attend"] = attention._attend

    def in_blocks(product: Any, x: Any, *args: Any) -> Any:
        """A product of fixed shape for every 64 rows."""
        padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 64))
        return torch.cat([product(part, *args) for part in padded.split(64)])[: len(x)]

    def linear_in_blocks(x: Any, weight: Any, bias: Any = None) -> Any:
        return in_blocks(linear, x, weight, bias)

    def matmul_in_blocks(x: Any, other: Any) -> Any:
        # The logits; torch's own use of it may have other shapes.
        return in_blocks(matmul, x, other) if x.dim() == other.dim() == 2 else matmul(x, other)

    def one_query(query: Any, key: Any, value: Any, prefix: int, *args: Any) -> Any:
        return torch.cat(
            [
                attend(
                    query[i : i + 1].contiguous(),
                    key[:, : prefix + i + 1].contiguous(),
                    value[:, : prefix + i + 1].contiguous(),
                    prefix + i,
                    *args,
                )
                for i in range(len(query))
            ]
        )

    layers.linear, torch.matmul = linear_in_blocks, matmul_in_blocks
    attention._attend = one_query


_PLAIN: dict[str, Any] = {}
