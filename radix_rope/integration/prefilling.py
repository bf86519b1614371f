"""Prompts that are being prefilled, and who had better wait for what they compute.

Two requests that come together and share content which is not cached would both compute it. The
one that is considered second waits, in its place in the queue, until the first one's KV is in the
tree; then it finds it there, at any offset. SGLang does the same for prefixes, with policy `lpm`.

Nobody waits for long: a request waits only for prompts that were admitted no later than in the
pass in which it was first held, only while their prefill goes on, and `MAX_HELD_PASSES` at most.
Pure function of the scheduler's steps, so that every rank holds the same requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from radix_rope.content.plan import Row
from radix_rope.content.segment import Segment
from radix_rope.content.tree import ContentTree
from radix_rope.integration.planning import Planned
from radix_rope.integration.request import EXACT_PATH, PathProvenance, state_of

if TYPE_CHECKING:
    from radix_rope.integration.cache import RadixRopeCache

MAX_HELD_PASSES = 64
"""A request is passed over this often at most; a pass computes a chunk at least."""

_MAX_IDLE_PASSES = 4
# With overlap, a prefill's KV is in the tree one pass after the next. A prompt that makes no
# progress for longer was retracted or given up, whatever became of it.

LOOKUP_TOKENS = 1 << 16
"""Prompt tokens looked up per pass; one longer prompt is looked up all the same.

Beyond, those that were held stay so, and others are admitted.
"""


@dataclass
class Prefilling:
    """A prompt that was admitted and is not wholly in the tree.

    Attributes:
        req: SGLang's request.
        segment: its tokens, in the tree of prompts being prefilled.
        admitted: number of the pass that admitted it.
        cached: tokens of it that are in the cache's tree.
        moved: number of the pass in which that last grew.
        provenance: of its row, as far as it was known when it was admitted.
    """

    req: Any
    segment: Segment
    admitted: int
    cached: int
    moved: int
    provenance: PathProvenance


class PrefillingPrompts:
    """All of them, by content.

    Args:
        cache: the tree that they will be in.
    """

    def __init__(self, cache: RadixRopeCache) -> None:
        self.cache = cache
        self.passes = 0
        self._lookup_tokens_left = LOOKUP_TOKENS
        self._prompts: dict[int, Prefilling] = {}
        self._tree = ContentTree(stride=cache.config.stride)

    def __len__(self) -> int:
        """How many."""
        return len(self._prompts)

    def reset(self) -> None:
        """Forget all of them."""
        self._prompts.clear()
        self._tree.reset()

    def begin_pass(self) -> None:
        """SGLang looks at the waiting requests once more; drop what is done."""
        self.passes += 1
        self._lookup_tokens_left = LOOKUP_TOKENS
        for key, prompt in list(self._prompts.items()):
            req = prompt.req
            cached = int(req.kv.cache_inserted_len)
            if cached > prompt.cached:
                prompt.cached, prompt.moved = cached, self.passes
            whole = len(prompt.segment.tokens) // self.cache.page_size * self.cache.page_size
            idle = self.passes - prompt.moved > _MAX_IDLE_PASSES
            if cached >= whole or idle or req.finished():
                self._drop(key)

    def add(self, req: Any, rows: tuple[Row, ...], provenance: PathProvenance = EXACT_PATH) -> None:
        """A request was admitted that will compute `rows` of its prompt.

        Args:
            req: SGLang's request.
            rows: what it is going to compute.
            provenance: of the row that it will have.
        """
        self._drop(id(req))
        if (
            max(map(len, rows)) < self._least(req)
            # Never in the tree, or not by its tokens.
            or req.skip_radix_cache_insert
            or req.positional_embed_overrides is not None
            or req.input_embeds is not None
            or req.multimodal_inputs is not None
            or req.beam_group is not None
        ):
            return
        tokens = self.cache.tokens_of(req, len(req.full_untruncated_fill_ids))
        prompt = Prefilling(
            req,
            self._tree.insert(None, tokens, namespace=self.cache.namespace_of(req)),
            admitted=self.passes,
            cached=int(req.prefix_len),
            moved=self.passes,
            provenance=provenance,
        )
        prompt.segment.owner = prompt
        self._prompts[id(req)] = prompt

    def forget(self, req: Any) -> None:
        """A request is considered anew; what was known of it while it ran (retracted) is over."""
        self._drop(id(req))

    def still_holds(self, req: Any) -> bool:
        """Whether a request waits for a prompt that is as it was when it was last looked up."""
        state = state_of(req)
        leader = state.waits_for
        if leader is None or self._prompts.get(id(leader.req)) is not leader:
            return False
        if state.held_passes >= MAX_HELD_PASSES:
            return False
        return state.waits_until == leader.cached or self._lookup_tokens_left <= 0

    def holds(self, req: Any, planned: Planned) -> bool:
        """Whether a request had better wait for what another one is computing.

        Args:
            req: SGLang's request, which may reuse.
            planned: its plan of all that its prefix leaves.
        """
        state = state_of(req)
        state.waits_for = None
        rows: tuple[Row, ...] = (Row(planned.begin, planned.end),)
        if planned.plan is not None:
            rows = planned.plan.rows
        least = self._least(req)
        if (
            not self._prompts
            or state.held_passes >= MAX_HELD_PASSES
            or max(map(len, rows)) < least
            or self._lookup_tokens_left <= 0
        ):
            return False
        self._lookup_tokens_left -= planned.end - planned.begin
        limit = planned.options.max_generations
        wanted_until = min((low for low, _ in planned.must_compute), default=planned.end)
        for candidate in self._tree.candidates(
            self.cache.tokens_of(req, planned.end),
            self.cache.namespace_of(req),
            planned.begin,
            planned.end,
        ):
            leader = candidate.pieces[0].segment.owner
            assert isinstance(leader, Prefilling)
            if state.held_since is not None and leader.admitted > state.held_since:
                continue  # It came later; waiting for it too could go on forever.
            # What of it is cached already was found there, or refused.
            low = max(candidate.begin, leader.cached + candidate.delta)
            high = min(candidate.end, wanted_until)
            known = leader.provenance
            if known.exact_until is not None and not known.may_be_donor(limit):
                # What it computes behind what it reuses will be refused as a donor.
                high = min(high, known.exact_until + candidate.delta)
            if any(min(high, row.end) - max(low, row.begin) >= least for row in rows):
                state.waits_for, state.waits_until = leader, leader.cached
                return True
        return False

    def note_held(self, req: Any) -> None:
        """A request was passed over."""
        state = state_of(req)
        state.held_passes += 1
        if state.held_since is None:
            state.held_since = self.passes

    def _least(self, req: Any) -> int:
        """Shared tokens from which on a plan would reuse them."""
        options = self.cache.options_of(req).plan_options(self.cache.plan_options)
        return options.min_run_tokens + options.head_tokens(0, 0)

    def _drop(self, key: int) -> None:
        prompt = self._prompts.pop(key, None)
        if prompt is not None:
            self._tree.remove(prompt.segment)
