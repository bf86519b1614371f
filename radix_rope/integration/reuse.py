"""Planning the reuse of one extend batch, and holding its donors until the copy.

A `BatchReuse` is made before SGLang allocates the batch's slots (allocation
may evict, so donors are locked first) and ends when the copy was enqueued.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from radix_rope.content.check import check_plan
from radix_rope.content.plan import ReusePlan, Run
from radix_rope.content.segment import Provenance
from radix_rope.integration.planning import (
    fitting_plans,
    keeps_batch_whole,
    may_reuse,
    plan_of,
)
from radix_rope.integration.request import RequestState, state_of

if TYPE_CHECKING:
    from radix_rope.integration.admission import Admission
    from radix_rope.integration.cache import RadixRopeCache


@dataclass(frozen=True)
class ShiftedTokens:
    """Shifted tokens of one extend batch.

    Attributes:
        spliced: of runs.
        prefix: of prefixes that stand on approximate nodes.
        spliced_again, prefix_again: of these, those of requests that were retracted before.
            SGLang takes such requests out of its hit rate.
    """

    spliced: int = 0
    prefix: int = 0
    spliced_again: int = 0
    prefix_again: int = 0


@dataclass
class RequestReuse:
    """One request's plan, the slots it copies from, and the locks that keep them.

    `index` is the request's place in the batch: a request id may occur twice in
    one (an aborted request's last decode step beside its successor's prefill).
    """

    req: Any
    index: int
    plan: ReusePlan
    source_slots: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    locks: list[Any] = field(default_factory=list)
    # For `undo`: the request's state before its runs were noted, and what was counted.
    before: RequestState | None = None
    counted_tokens: int = 0


@dataclass
class BatchReuse:
    """The plans of one extend batch; `entries` holds only requests that reuse something."""

    cache: RadixRopeCache
    entries: list[RequestReuse] = field(default_factory=list)
    # SGLang's numbers for the batch's log line, once it has them.
    stats: Any = None
    # For metrics: prompt tokens by source, counted by `commit`.
    tokens: Counter[str] = field(default_factory=Counter)
    # And those that its second pass computed again.
    recomputed_tokens: int = 0
    # For `explain`: runs given up after planning, as (place in the batch, run, reason); and by
    # place, which requests were planned and which of their donors the planner refused.
    given_up: list[tuple[int, Run, str]] = field(default_factory=list)
    planned: set[int] = field(default_factory=set)
    refused: dict[int, Counter[str]] = field(default_factory=dict)

    def release(self) -> None:
        """Unlock every donor. Safe to call more than once."""
        for entry in self.entries:
            while entry.locks:
                self.cache.unlock(entry.locks.pop())

    def drop(self, entry: RequestReuse, reason: str) -> None:
        """Give up one request's plan: it is computed as stock SGLang would."""
        self.give_up(entry.index, entry.plan.runs, reason)
        while entry.locks:
            self.cache.unlock(entry.locks.pop())
        self.entries.remove(entry)

    def give_up(self, index: int, runs: Sequence[Run], reason: str) -> None:
        """Note runs of the request at place `index` that will be computed after all."""
        assert self.cache.content is not None
        self.cache.content.stats.refused[reason] += len(runs)
        self.given_up += [(index, run, reason) for run in runs]


def begin_extend(cache: RadixRopeCache, batch: Any) -> None:
    """Note on every request of an extend batch what its prefix is made of."""
    for req in batch.reqs:
        path_tokens = min(cache.path_tokens(req.last_node), req.prefix_len)
        state_of(req).begin_extend(
            path_tokens, req.prefix_len, cache.path_provenance(req.last_node)
        )


def plan_batch(
    cache: RadixRopeCache, batch: Any, max_rows: int, admission: Admission | None = None
) -> BatchReuse:
    """Find runs for every request of an extend batch and lock their donors.

    What was decided when the batch was formed (`admission`) is kept.

    Pure function of tree and requests: every tensor-parallel rank makes the
    same plan. Runs are given up, shortest first, when the forward could not
    hold their rows; plans, last request first, when the locked donors would
    leave too little to allocate.
    """
    reuse = BatchReuse(cache)
    try:
        batch_may_reuse = _batch_may_reuse(batch)
        for index, req in enumerate(batch.reqs):
            if batch_may_reuse and may_reuse(cache, req):
                _plan_request(cache, reuse, req, index, admission)
            # Its segments may be gone when it is planned again.
            state_of(req).planned = None
        if reuse.entries:
            _fit_rows(reuse, len(batch.reqs), max_rows - cache.rows_that_may_join(batch.reqs))
            for entry in reuse.entries:
                _lock_donors(cache, entry)
            _fit_memory(reuse, batch)
    except BaseException:
        reuse.release()
        raise
    return reuse


def commit(reuse: BatchReuse, batch: Any) -> ShiftedTokens:
    """Note on every request what was reused, once nothing can be given up any more.

    Returns the batch's shifted tokens.
    """
    cache = reuse.cache
    spliced_tokens: Counter[bool] = Counter()
    prefix_tokens: Counter[bool] = Counter()
    spliced = {id(entry.req): entry for entry in reuse.entries}
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
        entry = spliced.get(id(req))
        reused = 0 if entry is None else entry.plan.reused_tokens
        if entry is not None and reused:
            entry.before = replace(state, copied=list(state.copied))
            for run in entry.plan.runs:
                donor = [piece.segment.provenance for piece in run.pieces]
                state.splice(
                    run.begin,
                    run.end,
                    Provenance(
                        exact=False,
                        copied=True,
                        generations=1 + max(p.generations for p in donor),
                        roundings=max(p.roundings for p in donor) + (run.delta != 0),
                        originals=_originals(run),
                    ),
                )
            if not req.retracted_stain:
                entry.counted_tokens = reused
                req.cached_tokens += reused
                state.shifted_tokens += reused
        again = bool(req.retracted_stain)
        spliced_tokens[again] += reused
        prefix_tokens[again] += approximate_prefix
        if cache.metrics is not None and not req.retracted_stain:
            if first:
                reuse.tokens["exact"] += req.prefix_len - approximate_prefix
            reuse.tokens["shifted"] += approximate_prefix + reused
            reuse.tokens["computed"] += req.extend_len - reused
    return ShiftedTokens(
        spliced_tokens.total(), prefix_tokens.total(), spliced_tokens[True], prefix_tokens[True]
    )


def undo(reuse: BatchReuse) -> None:
    """Forget the batch's plans and what `commit` noted of them: everything will be computed."""
    reuse.release()
    spliced_tokens = spliced_again = 0
    for entry in reuse.entries:
        if entry.before is not None:
            entry.req.radix_rope = entry.before
            entry.req.cached_tokens -= entry.counted_tokens
            spliced_tokens += entry.plan.reused_tokens
            if entry.req.retracted_stain:
                spliced_again += entry.plan.reused_tokens
            reuse.tokens["shifted"] -= entry.counted_tokens
            reuse.tokens["computed"] += entry.counted_tokens
    reuse.entries.clear()
    if reuse.stats is not None:
        reuse.stats.log_input_tokens += spliced_tokens
        reuse.stats.reprocessed_log_input_tokens += spliced_again
        reuse.stats.radix_rope_shifted_tokens -= spliced_tokens


def _originals(run: Run) -> tuple[tuple[int, int], ...]:
    """(strip, end) of every strip the run was taken from."""
    ends: dict[int, int] = {}
    for piece in run.pieces:
        strip = piece.segment.strip.strip_id
        ends[strip] = max(ends.get(strip, 0), piece.donor_begin + piece.length)
    return tuple(sorted(ends.items()))


def _batch_may_reuse(batch: Any) -> bool:
    """Whether a batch can be computed in rows at all."""
    return (
        not batch.return_hidden_states
        and batch.model_config.is_generation
        and not any(map(keeps_batch_whole, batch.reqs))
    )


def _plan_request(
    cache: RadixRopeCache, reuse: BatchReuse, req: Any, index: int, admission: Admission | None
) -> None:
    assert cache.content is not None
    decision = None if admission is None else admission.decision_on(req)
    stats = cache.content.stats
    refused_before = stats.refused.copy() if cache.config.explain else None
    if decision is not None:
        plan, refused = decision.plan, decision.refused
        if plan is not None:
            # Requests that were looked at since may have split what it names.
            plan = plan.with_runs([run.found_again() for run in plan.runs])
    else:
        last_chunk = req.extend_end == len(req.full_untruncated_fill_ids)
        planned = plan_of(cache, req, req.prefix_len, req.extend_end, last_chunk)
        plan, refused = planned.plan, planned.refused
    stats.refused += refused
    if plan is not None:
        reuse.entries.append(RequestReuse(req, index, plan))
    if decision is not None and decision.given_up:
        reuse.give_up(index, decision.given_up, decision.reason)
    if refused_before is not None:
        reuse.planned.add(index)
        reuse.refused[index] = refused


def _lock_donors(cache: RadixRopeCache, entry: RequestReuse) -> None:
    if cache.config.check_plans:
        check_plan(entry.plan, cache.tokens_of(entry.req, entry.plan.end))
    slots = []
    for run in entry.plan.runs:
        entry.locks.append(cache.lock(cache.donor_node(run)))
        slots.append(cache.donor_slots(run))
    if slots:
        entry.source_slots = torch.cat(slots)


def _fit_rows(reuse: BatchReuse, requests: int, max_rows: int) -> None:
    """Backends size their metadata for a number of rows; stay within it."""
    # Every other request has a row of its own.
    room = max_rows - (requests - len(reuse.entries))
    fitting = fitting_plans([entry.plan for entry in reuse.entries], room)
    for entry, plan in zip(list(reuse.entries), fitting, strict=True):
        if plan is None:
            reuse.drop(entry, "rows")
        elif plan is not entry.plan:
            reuse.give_up(entry.index, [r for r in entry.plan.runs if r not in plan.runs], "rows")
            entry.plan = plan


def _fit_memory(reuse: BatchReuse, batch: Any) -> None:
    """Admission counted the donors as evictable; keep enough for the allocation."""
    cache = reuse.cache
    need = sum(req.extend_len for req in batch.reqs)
    if cache.page_size > 1:
        need += len(batch.reqs) * cache.page_size
    allocator = cache.token_to_kv_pool_allocator
    while reuse.entries and allocator.available_size() + cache.evictable_size() < need:
        reuse.drop(reuse.entries[-1], "memory")
