"""The plan of one request: whether it may reuse at all, what it asks for, and what was found.

A request is planned when it is considered for a batch and again when the batch is prepared, and
one that waits is considered many times. The last plan is remembered and stands until cached
content changes. Knows neither batches nor locks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from radix_rope.content.plan import PlanOptions, ReusePlan
from radix_rope.content.planner import make_plan
from radix_rope.content.repair import plan_repair
from radix_rope.integration.request import state_of

if TYPE_CHECKING:
    from radix_rope.integration.cache import RadixRopeCache


@dataclass(frozen=True)
class Planned:
    """A request's plan and everything that it depends on.

    Attributes:
        version: of the content tree.
        begin: first token to plan; what comes before is there.
        end: after the last one.
        options: the planner's, with what the request asked for.
        must_compute: positions whose log probabilities are asked for.
        last_chunk: whether nothing of the prompt comes after `end`.
        plan: what was found; None for no run.
        refused: donors refused on the way, by reason. Not counted yet: only plans that are
            carried out are.
    """

    version: int
    begin: int
    end: int
    options: PlanOptions
    must_compute: tuple[tuple[int, int], ...]
    last_chunk: bool
    plan: ReusePlan | None = None
    refused: Counter[str] = field(default_factory=Counter)

    def asks_the_same(self, other: Planned) -> bool:
        """Whether `other` must find what this one found."""
        return (
            self.version == other.version
            and self.begin == other.begin
            and self.end == other.end
            and self.options == other.options
            and self.must_compute == other.must_compute
            and (self.last_chunk == other.last_chunk or self.options.repair != "attention")
        )


def keeps_batch_whole(req: Any) -> bool:
    """Whether a batch with this request cannot be computed in rows."""
    return (
        # Every token's hidden state is wanted, so every token is computed.
        bool(req.return_hidden_states)
        # These name tokens of the batch by number, and rows would shift them.
        or req.input_embeds is not None
        or req.positional_embed_overrides is not None
    )


def may_reuse(cache: RadixRopeCache, req: Any) -> bool:
    """Whether a request can be served from moved KV; if not, it is served exactly."""
    return (
        cache.options_of(req).shifted
        # Not token content alone decides their KV.
        and req.multimodal_inputs is None
        # Scores are read at positions inside the prompt.
        and req.token_indices_to_pool is None
        and req.multi_item_delimiter_indices is None
        # The rows of its beams are forked from its own by other code.
        and req.beam_group is None
    )


def plan_of(
    cache: RadixRopeCache,
    req: Any,
    begin: int,
    end: int,
    last_chunk: bool,
    tokens: npt.NDArray[np.int64] | None = None,
) -> Planned:
    """Plan the tokens [begin, end) of a request that may reuse.

    Args:
        cache: what may hold them.
        req: SGLang's request.
        begin: the tokens before it are cached or computed.
        end: after the last token of the forward.
        last_chunk: whether the prompt ends there.
        tokens: int64 (n,), the request's own where they are not up to date on it.
    """
    content = cache.content
    assert content is not None
    must_compute: tuple[tuple[int, int], ...] = ()
    if req.return_logprob and 0 <= req.logprob_start_len < end:
        must_compute = ((max(begin, req.logprob_start_len), end),)
    options = cache.options_of(req).plan_options(cache.plan_options)
    asked = Planned(content.version, begin, end, options, must_compute, last_chunk)
    state = state_of(req)
    if state.planned is not None and state.planned.asks_the_same(asked):
        return state.planned
    array = cache.tokens_of(req, end) if tokens is None else tokens
    namespace = cache.namespace_of(req)

    def make(options: PlanOptions) -> ReusePlan | None:
        return make_plan(content, array, begin, end, namespace, options, must_compute)

    stats = content.stats
    before = stats.refused.copy()
    try:
        plan = plan_repair(make, options, second_pass=last_chunk and cache.repair_rule is not None)
        refused = stats.refused - before
    finally:
        stats.refused = before
    state.planned = Planned(
        content.version, begin, end, options, must_compute, last_chunk, plan, refused
    )
    return state.planned


def charge_of(plan: ReusePlan) -> int:
    """Tokens that the forward computes for a request, those of a second pass among them."""
    if plan.options.repair != "attention":
        return plan.computed_tokens
    repaired = -(-plan.reused_tokens * plan.options.attention_percent // 100)
    return plan.computed_tokens + repaired + len(plan.rows[-1])


def fitting_plans(plans: Iterable[ReusePlan | None], room: int) -> list[ReusePlan | None]:
    """Give up runs, shortest first, until the rows of a batch fit into `room`.

    Args:
        plans: of every request of the batch, in its order; None for one that has a row of its own.
        room: rows that the forward can hold.

    Returns:
        What is left of each plan.
    """
    left = list(plans)
    while (rows := sum(1 if plan is None else len(plan.rows) for plan in left)) > room:
        by_length = sorted(
            (len(run), index, run.begin)
            for index, plan in enumerate(left)
            if plan is not None
            for run in plan.runs
        )
        if not by_length:
            # Everything is computed anyway (`recompute_all`), or there are no plans at all.
            for index in reversed(range(len(left))):
                if left[index] is not None:
                    left[index] = None
                    break
            else:
                return left
            continue
        # Each run costs a row or so, and the shortest saves least.
        shortest = {(index, begin) for _, index, begin in by_length[: rows - room]}
        for index, plan in enumerate(left):
            if plan is None:
                continue
            runs = [run for run in plan.runs if (index, run.begin) not in shortest]
            if len(runs) < len(plan.runs):
                left[index] = plan.with_runs(runs) if runs else None
    return left
