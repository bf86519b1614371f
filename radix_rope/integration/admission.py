"""Which requests join a batch, and how much of them: only what is computed is charged.

SGLang's `PrefillAdder` admits requests until their tokens reach a budget. Around each request the
budget is raised by what its plan reuses, and where even its computed tokens are too many, lowered
to the place where they reach it. Memory is charged in full: copies need slots.

What is decided here is remembered until the batch is prepared, but nothing is locked: between the
two SGLang allocates nothing. It may evict, where it preempts a running request for a waiting one;
what was admitted before is then planned anew, for the range that it was admitted with, and may
compute more than was charged. Pure function of tree, requests and the adder, as every rank of a
tensor-parallel group must admit the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from radix_rope.content.plan import ReusePlan, Row, Run
from radix_rope.integration.planning import (
    charge_of,
    fitting_plans,
    keeps_batch_whole,
    may_reuse,
    plan_of,
)

if TYPE_CHECKING:
    from radix_rope.integration.cache import RadixRopeCache


@dataclass(frozen=True)
class Offer:
    """A request that may join a batch, and how.

    Attributes:
        end: its extend range ends here, unless SGLang's own limits come before.
        plan: its plan, up to `end` or beyond; None where all is computed.
        planned: whether it was planned at all.
        refused: donors refused on the way, by reason.
        given_up: runs that were found and are computed all the same.
        reason: why.
    """

    end: int
    plan: ReusePlan | None = None
    planned: bool = False
    refused: Counter[str] = field(default_factory=Counter)
    given_up: tuple[Run, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Decision:
    """What the preparation of the batch is to do with one admitted request.

    Attributes:
        begin: first token of its extend range.
        end: after the last one.
        version: of the content tree.
        plan: its plan of exactly that range; None for no run.
        refused: donors refused on the way, by reason.
        given_up: runs that were found and are computed all the same.
        reason: why.
    """

    begin: int
    end: int
    version: int
    plan: ReusePlan | None
    refused: Counter[str]
    given_up: tuple[Run, ...]
    reason: str


class Admission:
    """One pass of SGLang's scheduler over the waiting requests.

    Args:
        cache: the tree.
        adder: SGLang's adder of this pass.
    """

    def __init__(self, cache: RadixRopeCache, adder: Any) -> None:
        self.cache = cache
        self.adder = adder
        # SGLang's policy and the waiting requests in its order, where it looked at the cache.
        self.queue, cache.queue = cache.queue, None
        # Whether a request was passed over.
        self.held = False
        # Time spent on plans, for metrics only.
        self.seconds = 0.0
        # By the identity of the request: the adder keeps those that it admitted.
        self._plans: dict[int, ReusePlan] = {}
        self._decisions: dict[int, Decision] = {}

    def decision_on(self, req: Any) -> Decision | None:
        """What was decided about a request's extend range, if it still holds."""
        content = self.cache.content
        decision = self._decisions.get(id(req))
        if decision is None or content is None or decision.version != content.version:
            return None
        same_range = (decision.begin, decision.end) == (req.prefix_len, req.extend_end)
        return decision if same_range else None

    def holds(self, req: Any) -> bool:
        """Whether a waiting request is passed over: another one is computing what it needs."""
        held = self._would_hold(req)
        if held:
            self.cache.prefilling.note_held(req)
            self.held = True
        return held

    def _would_hold(self, req: Any) -> bool:
        prefilling = self.cache.prefilling
        # It may have been prefilled before, and retracted: neither it nor others wait for that.
        prefilling.forget(req)
        if (
            not len(prefilling)
            or self.cache.plan_options.recompute_all
            # Others were preempted to make room for it.
            or self.adder.preempt_list
            or keeps_batch_whole(req)
            or not may_reuse(self.cache, req)
        ):
            return False
        started = perf_counter()
        held = prefilling.still_holds(req)
        if not held:
            end = len(req.full_untruncated_fill_ids)
            held = prefilling.holds(
                req, plan_of(self.cache, req, req.prefix_len, end, last_chunk=True)
            )
        self.seconds += perf_counter() - started
        return held

    def chunk_limit(self, req: Any) -> int | None:
        """SGLang's limit of a chunk in favour of shorter requests, without those that are held.

        They may be held for the very prompt that the chunk is of.
        """
        adder = self.adder
        if self.queue is None or adder.chunked_req_limit is None:
            return adder.chunked_req_limit  # type: ignore[no-any-return]
        policy, waiting = self.queue

        def may_join(other: Any) -> bool:
            # Its prefix was matched when the queue was ordered.
            other.refresh_fill_ids()
            cached = other.prefix_len >= len(other.full_untruncated_fill_ids)
            return cached or not self._would_hold(other)

        return policy.shortest_prefill_chunk_limit(  # type: ignore[no-any-return]
            req, filter(may_join, waiting), adder.rem_chunk_tokens or 0, adder.page_size
        )

    def offer(self, req: Any, budget_tokens: int | None) -> Offer | None:
        """Plan a request for this batch.

        Args:
            req: SGLang's request, its prefix matched.
            budget_tokens: that may still be computed; None without chunked prefill.

        Returns:
            None where the request should wait for the next batch, because its own plan or those
            of the others could not be carried out in this one. Never for a batch's first request.
        """
        started = perf_counter()
        try:
            return self._offer(req, budget_tokens)
        finally:
            self.seconds += perf_counter() - started

    def _offer(self, req: Any, budget_tokens: int | None) -> Offer | None:
        end = len(req.full_untruncated_fill_ids)
        if keeps_batch_whole(req):
            return None if self._plans else Offer(end)
        if not may_reuse(self.cache, req):
            return self._beside_others(req, Offer(end), budget_tokens)
        if self.cache.plan_options.recompute_all:
            # Reuses nothing, so there is nothing to decide.
            return Offer(end)
        planned = plan_of(self.cache, req, req.prefix_len, end, last_chunk=True)
        plan = planned.plan
        if plan is not None and any(map(keeps_batch_whole, self.adder.can_run_list)):
            return None
        if plan is not None and budget_tokens is not None and charge_of(plan) > budget_tokens:
            two_passes = plan.options.repair == "attention"
            if not two_passes or plan.computed_tokens > budget_tokens:
                if two_passes:
                    # Only the end of a prompt has a second pass.
                    planned = plan_of(self.cache, req, req.prefix_len, end, last_chunk=False)
                plan = self._within(planned.plan, budget_tokens)
            elif self.adder.can_run_list:
                # Its second pass is a forward of its own, which is kept within a chunk; but
                # there may be only one that long.
                return None
        offer = Offer(end if plan is None else plan.end, plan, True, planned.refused)
        if self.adder.can_run_list:
            beside = self._beside_others(req, offer, budget_tokens)
            if beside is None:
                return None
        else:
            offer = self._alone(req, offer, budget_tokens)
        if offer.plan is not None and not self._fits_memory(req, offer, budget_tokens):
            given_up = (*offer.plan.runs, *offer.given_up)
            offer = replace(offer, end=end, plan=None, given_up=given_up, reason="memory")
        return offer

    def _within(self, plan: ReusePlan | None, budget_tokens: int) -> ReusePlan | None:
        """The part of a plan that the budget lasts for.

        None where that is no page, or holds no run: SGLang cuts by length then.
        """
        if plan is None:
            return None
        cut = plan.end_within(budget_tokens, self.cache.page_size)
        return None if cut == plan.begin else plan.until(cut)

    def _beside_others(self, req: Any, offer: Offer, budget_tokens: int | None) -> Offer | None:
        """The offer, or None where it would keep the plans of others from being carried out."""
        if offer.plan is None and not self._plans:
            return offer
        rows = 1 if offer.plan is None else len(offer.plan.rows)
        if rows > self._rows_left(req):
            return None
        if self._plans and not self._fits_memory(req, offer, budget_tokens):
            return None
        return offer

    def _alone(self, req: Any, offer: Offer, budget_tokens: int | None) -> Offer:
        """Give up runs of a batch's first request until the forward has the rows for it."""
        room = self._rows_left(req)
        if offer.plan is None or len(offer.plan.rows) <= room:
            return offer
        (plan,) = fitting_plans([offer.plan], room)
        if plan is not None and budget_tokens is not None and plan.computed_tokens > budget_tokens:
            # What was given up is computed, so the cut comes earlier. A plan for a second pass
            # holds for the end of a prompt only.
            attention = plan.options.repair == "attention"
            plan = None if attention else self._within(plan, budget_tokens)
        kept = {run.begin for run in plan.runs} if plan is not None else set()
        given_up = tuple(run for run in offer.plan.runs if run.begin not in kept)
        end = len(req.full_untruncated_fill_ids) if plan is None else plan.end
        return replace(offer, end=end, plan=plan, given_up=given_up, reason="rows")

    def _rows_left(self, req: Any) -> int:
        """Rows that the forward has for `req` and nobody else needs."""
        reqs = self.adder.can_run_list
        plans = [self._plans.get(id(other)) for other in reqs]
        taken = sum(1 if plan is None else len(plan.rows) for plan in plans)
        return self.cache.max_rows - self.cache.rows_that_may_join([*reqs, req]) - taken

    def _fits_memory(self, req: Any, offer: Offer, budget_tokens: int | None) -> bool:
        """Whether what is evictable beside all donors is enough for the batch with `req` in it."""
        cache = self.cache
        # A request's prefix is locked when it is admitted.
        nodes = [req.last_node]
        plans = [*self._plans.values()]
        if offer.plan is not None:
            plans.append(offer.plan)
        for plan in plans:
            nodes += [cache.donor_node(run.found_again()) for run in plan.runs]
        left = cache.token_to_kv_pool_allocator.available_size() + cache.evictable_size()
        left -= _unlocked_tokens(cache, nodes)
        length = offer.end - req.prefix_len
        if offer.plan is None and budget_tokens is not None:
            length = min(length, budget_tokens)
        lengths = [r.extend_end - r.prefix_len for r in self.adder.can_run_list]
        need = sum(lengths) + length
        if cache.page_size > 1:
            need += (len(lengths) + 1) * cache.page_size
        return bool(left >= need)

    def announce(self, req: Any, offer: Offer) -> None:
        """Let others wait for what a request, just admitted, is going to compute."""
        end = len(req.full_untruncated_fill_ids)
        rows: tuple[Row, ...] = (Row(req.prefix_len, end),)
        if offer.plan is not None:
            # Beyond a cut, nobody knows yet.
            rows = offer.plan.rows
            if offer.plan.end < end:
                rows = (*rows, Row(offer.plan.end, end))
        try:
            path = self.cache.path_provenance(req.last_node)
            runs = () if offer.plan is None else offer.plan.runs
            self.cache.prefilling.add(req, rows, path.behind(runs))
        except Exception as error:
            self.cache.fallbacks.survive("plan", error)

    def note(self, req: Any, offer: Offer) -> int:
        """Remember an admitted request; returns the tokens to charge for it."""
        content = self.cache.content
        assert content is not None
        begin, end = req.prefix_len, req.extend_end
        plan = offer.plan
        if plan is not None and end < plan.end:
            plan = plan.until(end)
        if plan is not None:
            self._plans[id(req)] = plan
        if offer.planned:
            given_up = tuple(run for run in offer.given_up if run.begin < end)
            self._decisions[id(req)] = Decision(
                begin, end, content.version, plan, offer.refused, given_up, offer.reason
            )
        return end - begin if plan is None else charge_of(plan)


def add_one_req(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kw: Any) -> Any:
    """Admit a waiting request, charging what will be computed of it."""
    admission = _admission(adder)
    if admission is None:
        return original(adder, req, *args, **kw)
    try:
        if admission.holds(req):
            # SGLang goes on with the next one; this one keeps its place in the queue.
            return _result("CONTINUE")
        offer = admission.offer(req, adder.rem_chunk_tokens)
    except Exception as error:
        offer = _without_plan(admission, req, error)
    if offer is None:
        return _result("OTHER")
    result = _charge(
        admission, req, offer, adder.rem_chunk_tokens, lambda: original(adder, req, *args, **kw)
    )
    if adder.can_run_list and adder.can_run_list[-1] is req:
        admission.announce(req, offer)
        # SGLang's last word on an admitted request, on the budget as it really is.
        result = adder.budget_state()
    if admission.held and result is _result("NO_TOKEN"):
        # SGLang would admit nobody until a running request leaves. The one passed over may fit.
        return _result("OTHER")
    return result


def add_chunked_req(original: Callable[..., Any], adder: Any, req: Any) -> Any:
    """Admit the next chunk of a request, charging what will be computed of it."""
    admission = _admission(adder)
    budget = adder.rem_chunk_tokens
    if admission is None or budget is None:
        return original(adder, req)
    try:
        adder.chunked_req_limit = admission.chunk_limit(req)
    except Exception as error:
        admission.cache.fallbacks.survive("plan", error)
    if adder.chunked_req_limit is not None:
        budget = min(budget, adder.chunked_req_limit)
    try:
        offer = admission.offer(req, budget)
        assert offer is not None, "the first request of a batch has to wait"
        # SGLang lets a chunk go on where memory is short, so it must not grow there.
        limit = req.prefix_len + max(budget, int(adder.rem_total_tokens))
        limit = limit // admission.cache.page_size * admission.cache.page_size
        if offer.plan is not None and offer.end > limit:
            plan = offer.plan.until(limit) if limit > req.prefix_len else None
            offer = replace(offer, end=limit, plan=plan)
    except Exception as error:
        offer = _without_plan(admission, req, error)
    return _charge(admission, req, offer, budget, lambda: original(adder, req))


def _without_plan(admission: Admission, req: Any, error: Exception) -> Offer:
    """After a failure: all of the request is computed, and charged."""
    admission.cache.fallbacks.survive("plan", error)
    return Offer(len(req.full_untruncated_fill_ids), planned=True)


def _charge(
    admission: Admission, req: Any, offer: Offer, budget: int | None, add: Callable[[], Any]
) -> Any:
    """Let SGLang admit `req` on a budget of lengths that amounts to `budget` computed tokens."""
    adder, page_size = admission.adder, admission.cache.page_size
    admitted = len(adder.can_run_list)
    if offer.plan is None:
        # By length, as ever.
        result = add()
        if len(adder.can_run_list) > admitted:
            _note(admission, req, offer)
        return result
    chunk, inputs, limit = adder.rem_chunk_tokens, adder.rem_input_tokens, adder.chunked_req_limit
    adder.rem_input_tokens = inputs + offer.plan.reused_tokens
    if chunk is not None:
        adder.rem_chunk_tokens = -(-(offer.end - req.prefix_len) // page_size) * page_size
        adder.chunked_req_limit = None
    try:
        result = add()
    finally:
        adder.rem_chunk_tokens, adder.rem_input_tokens = chunk, inputs
        adder.chunked_req_limit = limit
    if len(adder.can_run_list) == admitted:
        return result
    charge = -(-_note(admission, req, offer) // page_size) * page_size
    adder.rem_input_tokens = inputs - charge
    if chunk is not None:
        if req.extend_end < len(req.full_untruncated_fill_ids):
            # A batch has one request that goes on, so nothing may be left for another to be cut.
            charge = max(charge, budget or 0)
        adder.rem_chunk_tokens = chunk - charge
    return result


def _note(admission: Admission, req: Any, offer: Offer) -> int:
    try:
        return admission.note(req, offer)
    except Exception as error:
        # It will be planned anew.
        admission.cache.fallbacks.survive("plan", error)
        return int(req.extend_end - req.prefix_len)


def _admission(adder: Any) -> Admission | None:
    """The pass that `adder` belongs to; None where nothing is reused."""
    from radix_rope.integration.cache import RadixRopeCache

    cache = adder.tree_cache
    if not isinstance(cache, RadixRopeCache) or not cache.reuses:
        return None
    if cache.admission is None or cache.admission.adder is not adder:
        cache.admission = Admission(cache, adder)
        cache.prefilling.begin_pass()
    return cache.admission


def _unlocked_tokens(cache: RadixRopeCache, nodes: Iterable[Any]) -> int:
    """Tokens that locking these nodes would take from what is evictable."""
    seen: set[int] = set()
    tokens = 0
    for node in nodes:
        while node is not cache.root_node and node.lock_ref == 0 and id(node) not in seen:
            seen.add(id(node))
            tokens += len(node.key)
            node = node.parent
    return tokens


def _result(name: str) -> Any:
    from sglang.srt.managers.schedule_policy import AddReqResult

    return AddReqResult[name]
