"""Planning the reuse of one extend batch, and holding its donors until the copy.

A `BatchReuse` is made before SGLang allocates the batch's slots (allocation
may evict, so donors are locked first) and ends when the copy was enqueued.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from radix_rope.content.check import check_plan
from radix_rope.content.plan import ReusePlan
from radix_rope.content.planner import make_plan
from radix_rope.content.segment import Provenance
from radix_rope.integration.request import state_of

if TYPE_CHECKING:
    from radix_rope.integration.cache import RadixRopeCache

logger = logging.getLogger(__name__)


@dataclass
class RequestReuse:
    """One request's plan, the slots it copies from, and the locks that keep them."""

    req: Any
    plan: ReusePlan
    source_slots: torch.Tensor
    locks: list[Any]


@dataclass
class BatchReuse:
    """The plans of one extend batch; `entries` holds only requests that reuse something."""

    cache: RadixRopeCache
    entries: list[RequestReuse] = field(default_factory=list)

    def release(self) -> None:
        """Unlock every donor. Safe to call more than once."""
        for entry in self.entries:
            while entry.locks:
                self.cache.unlock(entry.locks.pop())

    def drop(self, entry: RequestReuse) -> None:
        """Give up one request's plan: it is computed as stock SGLang would."""
        while entry.locks:
            self.cache.unlock(entry.locks.pop())
        self.entries.remove(entry)


def plan_batch(cache: RadixRopeCache, batch: Any, max_rows: int) -> BatchReuse:
    """Find runs for every request of an extend batch and lock their donors.

    Pure function of tree and requests: every tensor-parallel rank makes the
    same plan. Plans are given up, last request first, when the forward could
    not hold their rows or the locked donors would leave too little to allocate.
    """
    reuse = BatchReuse(cache)
    try:
        for req in batch.reqs:
            state = state_of(req)
            path_tokens = min(cache.path_tokens(req.last_node), req.prefix_len)
            state.begin_extend(path_tokens, req.prefix_len, cache.path_provenance(req.last_node))
            if _may_reuse(cache, batch, req):
                _plan_request(cache, reuse, req)
        _fit_rows(reuse, len(batch.reqs), max_rows)
        _fit_memory(reuse, batch)
    except BaseException:
        reuse.release()
        raise
    return reuse


def commit(reuse: BatchReuse, batch: Any) -> tuple[int, int]:
    """Note on every request what was reused, once nothing can be given up any more.

    Returns the batch's shifted tokens: those of spliced runs, and those of
    prefixes that stand on approximate nodes.
    """
    spliced_tokens = prefix_tokens = 0
    spliced = {id(entry.req): entry.plan for entry in reuse.entries}
    for req in batch.reqs:
        state = state_of(req)
        approximate_prefix = 0
        first = not state.counted
        if first:
            exact = req.prefix_len
            if state.exact_until is not None:
                exact = min(exact, state.exact_until)
            approximate_prefix = req.prefix_len - exact
            state.counted = True
            if not req.retracted_stain:
                state.exact_tokens = exact
                state.shifted_tokens = approximate_prefix
        plan = spliced.get(id(req))
        reused = 0 if plan is None else plan.reused_tokens
        if plan is not None and reused:
            for run in plan.runs:
                donor = [piece.segment.provenance for piece in run.pieces]
                state.splice(
                    run.begin,
                    run.end,
                    Provenance(
                        exact=False,
                        copied=True,
                        generations=1 + max(p.generations for p in donor),
                        roundings=max(p.roundings for p in donor) + (run.delta != 0),
                    ),
                )
            if not req.retracted_stain:
                req.cached_tokens += reused
                state.shifted_tokens += reused
        spliced_tokens += reused
        prefix_tokens += approximate_prefix
    return spliced_tokens, prefix_tokens


def _may_reuse(cache: RadixRopeCache, batch: Any, req: Any) -> bool:
    """Whether a request can be served from moved KV; if not, it is served exactly."""
    return (
        cache.config.mode == "shifted"
        and req.extend_len > cache.config.min_run_tokens
        # Every token's hidden state is wanted, so every token is computed.
        and not batch.return_hidden_states
        and batch.model_config.is_generation
        # Not token content alone decides their KV.
        and req.multimodal_inputs is None
        and req.input_embeds is None
        and req.positional_embed_overrides is None
        # Scores are read at positions inside the prompt.
        and req.token_indices_to_pool is None
        and req.multi_item_delimiter_indices is None
    )


def _plan_request(cache: RadixRopeCache, reuse: BatchReuse, req: Any) -> None:
    assert cache.content is not None
    begin, end = req.prefix_len, req.extend_end
    must_compute: list[tuple[int, int]] = []
    if req.return_logprob and 0 <= req.logprob_start_len < end:
        must_compute.append((max(begin, req.logprob_start_len), end))
    tokens = cache.tokens_of(req, end)
    plan = make_plan(
        cache.content, tokens, begin, end, cache.namespace_of(req), cache.plan_options, must_compute
    )
    if plan is None:
        return
    if cache.config.check_plans:
        check_plan(plan, tokens)
    locks: list[Any] = []
    entry = RequestReuse(req, plan, torch.empty(0, dtype=torch.int64), locks)
    reuse.entries.append(entry)
    slots = []
    for run in plan.runs:
        locks.append(cache.lock(cache.donor_node(run)))
        slots.append(cache.donor_slots(run))
    if slots:
        entry.source_slots = torch.cat(slots)


def _fit_rows(reuse: BatchReuse, requests: int, max_rows: int) -> None:
    """Backends size their metadata for a number of rows; stay below it."""
    rows = requests + sum(len(entry.plan.rows) - 1 for entry in reuse.entries)
    while rows > max_rows and reuse.entries:
        # The plan that saves least per extra row goes first.
        worst = min(
            reuse.entries, key=lambda e: e.plan.reused_tokens / max(len(e.plan.rows) - 1, 1)
        )
        rows -= len(worst.plan.rows) - 1
        reuse.drop(worst)


def _fit_memory(reuse: BatchReuse, batch: Any) -> None:
    """Admission counted the donors as evictable; keep enough for the allocation."""
    cache = reuse.cache
    need = sum(req.extend_len for req in batch.reqs)
    if cache.page_size > 1:
        need += len(batch.reqs) * cache.page_size
    allocator = cache.token_to_kv_pool_allocator
    while reuse.entries and allocator.available_size() + cache.evictable_size() < need:
        reuse.drop(reuse.entries[-1])
