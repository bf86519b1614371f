"""The prefix cache: SGLang's `RadixCache` plus a content index over its nodes.

Every tree node carries a `Segment` (its absolute start, its tokens, where its
KV came from); splits, inserts and evictions keep tree and index in step. With
content matching off, it is `RadixCache`. Planning and copying live elsewhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.evict_policy import EvictionStrategy
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from radix_rope.config import RadixRopeConfig
from radix_rope.content.plan import PlanOptions, Run
from radix_rope.content.segment import Provenance, Segment
from radix_rope.content.tree import ContentTree
from radix_rope.integration.eviction import CopiesFirst
from radix_rope.integration.fallbacks import Fallbacks
from radix_rope.integration.prefilling import PrefillingPrompts
from radix_rope.integration.protection import exact_part, heal
from radix_rope.integration.request import EXACT, PathProvenance, RequestState, state_of
from radix_rope.integration.request_options import (
    RequestOptionError,
    RequestOptions,
    parse_request_options,
)
from radix_rope.rotary.corrector import Corrector

if TYPE_CHECKING:
    from radix_rope.integration.admission import Admission
    from radix_rope.integration.metrics import Metrics
    from radix_rope.integration.repair import Rule
    from radix_rope.integration.reuse import BatchReuse, ShiftedTokens


class RadixRopeCache(RadixCache):  # type: ignore[misc]
    """A radix tree whose cached content can be found at any offset.

    Args:
        params: what SGLang's scheduler builds every tree from.
        config: options; `mode` "off" keeps no index at all.
    """

    def __init__(self, params: CacheInitParams, config: RadixRopeConfig | None = None) -> None:
        self.config = config or RadixRopeConfig()
        self.plan_options = PlanOptions(
            min_run_tokens=self.config.min_run_tokens,
            recompute_tokens=self.config.recompute_tokens,
            repair=self.config.repair,
            attention_percent=self.config.attention_percent,
            recompute_all=self.config.recompute_all,
            max_generations=self.config.max_generations,
            max_roundings=self.config.max_roundings,
        )
        # Set by `build` where reuse is possible: the kernel that moves KV and
        # how many rows a forward may have.
        self.corrector: Corrector | None = None
        self.max_rows = 0
        # How many tokens a second pass may compute; None for any number.
        self.max_second_pass_tokens: int | None = None
        # What scores run tokens for a second pass; None where none is possible, and then why.
        self.repair_rule: Rule | None = None
        self.no_second_pass: str | None = None
        # Whether decoding requests may ride along in a prefill batch.
        self.mixes = False
        self.fallbacks = Fallbacks(strict=self.config.check_plans)
        # Where SGLang reports metrics and KV may be moved; set by `build`.
        self.metrics: Metrics | None = None
        # Plans of the batch prepared last; their donors are locked until it ran.
        self.outstanding: BatchReuse | None = None
        # What was decided about the batch that is being formed.
        self.admission: Admission | None = None
        # The policy and the queue that it orders, from then until the pass begins.
        self.queue: tuple[Any, Any] | None = None
        # What admitted requests are computing and the tree does not hold yet.
        self.prefilling = PrefillingPrompts(self)
        # Of the batch just prepared, for its log line; None where nothing was noted.
        self.shifted_tokens_of_batch: ShiftedTokens | None = None
        self.content: ContentTree | None = None
        if self.config.mode != "off" and not params.disable:
            self.content = ContentTree(stride=self.config.stride, page_size=params.page_size)
        # Provenance of the row being inserted; set around `_insert_cache` only.
        self._inserting: RequestState | None = None
        # Tokens whose approximate KV was replaced by exact KV since the start.
        self.healed_tokens = 0
        super().__init__(params)
        if self.content is not None:
            self.eviction_strategy: EvictionStrategy = CopiesFirst(
                self.eviction_strategy, self.content
            )

    @property
    def reuses(self) -> bool:
        """Whether KV may be moved at all in this process."""
        return self.corrector is not None

    # What a request may ask of the tree

    def tokens_of(self, req: Any, end: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Token ids [0, end) of a request, int64."""
        # The slice is a private copy, so the view cannot see later appends.
        return np.frombuffer(req.full_untruncated_fill_ids[:end], dtype=np.int64)

    def namespace_of(self, req: Any) -> Hashable:
        """What must be equal for two requests to share KV at all."""
        return (req.extra_key, req.cache_salt or None)

    def options_of(self, req: Any) -> RequestOptions:
        """What the request asked for; read once."""
        state = state_of(req)
        if state.options is None:
            params = getattr(req, "sampling_params", None)
            try:
                state.options = parse_request_options(
                    getattr(params, "custom_params", None), self.config
                )
            except RequestOptionError:
                # It was refused when it came in and only waits to be told so.
                state.options = RequestOptions(shifted=False)
        return state.options

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Longest cached prefix; for a request in mode `exact`, of exact nodes alone."""
        result = super().match_prefix(params)
        if self.reuses and params.req is not None and not self.options_of(params.req).shifted:
            return exact_part(self, result)
        return result

    def donor_node(self, run: Run) -> Any:
        """The deepest node of a run; locking it locks the whole run."""
        return run.pieces[-1].segment.owner

    def donor_slots(self, run: Run) -> torch.Tensor:
        """Slots of the run's tokens in order, int64 [tokens]."""
        parts = []
        for piece in run.pieces:
            node: Any = piece.segment.owner
            parts.append(node.value[piece.offset : piece.offset + piece.length])
        return torch.cat(parts)

    def path_provenance(self, node: Any) -> PathProvenance:
        """Where the path from the root to `node` stops being exact."""
        exact_until: int | None = None
        generations = 0
        segment = _segment(node)
        while segment is not None:
            if not segment.provenance.exact:
                exact_until = segment.start
                generations = max(generations, segment.provenance.generations)
            segment = segment.parent
        return PathProvenance(exact_until, generations)

    def path_tokens(self, node: Any) -> int:
        """Length of the path from the root to `node`."""
        segment = _segment(node)
        return 0 if segment is None else segment.end

    def rows_that_may_join(self, reqs: Sequence[Any]) -> int:
        """Upper bound of the decoding requests that SGLang may still add to `reqs`' extend."""
        if not self.mixes:
            return 0
        pool = self.req_to_token_pool
        own = sum(1 for req in reqs if req.kv.holds_kv)
        return int(pool.size) - int(pool.available_size()) - own

    # What keeps tree and index in step

    def reset(self) -> None:
        """Forget everything; also what `flush_cache` does."""
        # Locks of a batch that never ran name nodes of the tree that goes.
        self.outstanding = self.admission = self.queue = None
        self.prefilling.reset()
        super().reset()
        if self.content is not None:
            self.content.reset()

    def checkpoint(self, req: Any, *, up_to: int) -> None:
        """Insert what the request computed and point its row at the tree's nodes."""
        super().checkpoint(req, up_to=up_to)
        if self.reuses:
            state_of(req).adopt(self.path_provenance(req.last_node))

    def _insert_cache(
        self, req: Any, token_ids: Any, *, key_limit: int | None = None, **kwargs: Any
    ) -> Any:
        self._inserting = state_of(req)
        if self.reuses:
            key_limit = heal(self, req, self._inserting, token_ids, key_limit)
        try:
            return super()._insert_cache(req, token_ids, key_limit=key_limit, **kwargs)
        finally:
            self._inserting = None

    def _insert_helper(
        self, node: Any, key: RadixKey, value: Any, priority: int = 0, inserted_len: int = 0
    ) -> tuple[int, Any]:
        prefix_len, leaf = super()._insert_helper(node, key, value, priority, inserted_len)
        if self.content is not None:
            if prefix_len < len(key):
                leaf = self._add_segments(leaf)
            elif leaf is not self.root_node:
                self.content.touch(leaf.segment)
        return prefix_len, leaf

    def _add_segments(self, leaf: Any) -> Any:
        """Give a new leaf its segment and cut it where the provenance changes."""
        assert self.content is not None
        # The index keeps a view of the tokens, so the array must be the node's
        # own: the caller may still append to the one it passed.
        leaf.key = leaf.key[:]
        parent = _segment(leaf.parent)
        start = 0 if parent is None else parent.end
        tokens = np.frombuffer(leaf.key.token_ids, dtype=np.int64)[: len(leaf.key)]
        leaf.segment = self.content.insert(
            parent,
            tokens,
            namespace=(leaf.key.extra_key, leaf.key.cache_salt),
            provenance=EXACT,
            owner=leaf,
        )
        if self._inserting is None or self._inserting.exact_until is None:
            return leaf
        for cut, provenance in _page_spans(self._inserting, start, len(leaf.key), self.page_size):
            # `leaf` keeps the tail: cut the front off and label it.
            offset = cut - leaf.segment.start
            if offset < len(leaf.key):
                upper = self._split_node(leaf.key, leaf, offset)
                self.content.set_provenance(upper.segment, provenance)
            else:
                self.content.set_provenance(leaf.segment, provenance)
        return leaf

    def _split_node(self, key: RadixKey, child: Any, split_len: int) -> Any:
        upper = super()._split_node(key, child, split_len)
        if self.content is not None:
            upper.segment = self.content.split(child.segment, split_len, owner=upper)
        return upper

    def _delete_leaf(self, node: Any) -> None:
        super()._delete_leaf(node)
        if self.content is not None:
            self.content.remove(node.segment)

    def _match_prefix_helper(self, node: Any, key: RadixKey) -> tuple[Any, Any]:
        value, last = super()._match_prefix_helper(node, key)
        if self.content is not None and last is not self.root_node:
            self.content.touch(last.segment)
        return value, last

    def check_invariants(self) -> None:
        """Assert that tree, index and SGLang's own accounting agree.

        Raises:
            AssertionError: naming what disagrees.
        """
        evictable = protected = 0
        segments = 0
        stack = [self.root_node]
        while stack:
            node = stack.pop()
            for child in node.children.values():
                assert child.parent is node, "a child names another parent"
                assert len(child.value) == len(child.key) > 0, "slots and tokens differ in number"
                assert len(child.key) % self.page_size == 0, "a node is not page-aligned"
                assert node is self.root_node or node.lock_ref >= child.lock_ref, (
                    "a child is locked more often than its parent"
                )
                if child.lock_ref:
                    protected += len(child.key)
                else:
                    evictable += len(child.key)
                if self.content is not None:
                    self._check_segment(node, child)
                    segments += 1
                stack.append(child)
        assert evictable == self.evictable_size_, (evictable, self.evictable_size_)
        assert protected == self.protected_size_, (protected, self.protected_size_)
        if self.content is not None:
            self.content.check_invariants()
            indexed = sum(1 for _ in self.content.segments())
            assert segments == indexed, f"{segments} nodes, but {indexed} segments"

    def _check_segment(self, parent: Any, node: Any) -> None:
        segment: Segment = node.segment
        above = _segment(parent)
        owner: Any = segment.owner
        assert owner is node, "a segment belongs to another node"
        assert segment.parent is above, "a segment hangs below another parent"
        assert segment.start == (0 if above is None else above.end), "wrong absolute start"
        assert segment.namespace == (node.key.extra_key, node.key.cache_salt), "wrong namespace"
        own = np.frombuffer(node.key.token_ids, dtype=np.int64)[: len(node.key)]
        assert np.array_equal(segment.tokens, own), "segment and node hold other tokens"


def _segment(node: Any) -> Segment | None:
    """The node's segment; the root has none."""
    return getattr(node, "segment", None)


def _page_spans(
    state: RequestState, start: int, length: int, page_size: int
) -> list[tuple[int, Provenance]]:
    """(end, provenance) of the maximal equal spans of `[start, start + length)`.

    Boundaries fall on pages; a page of mixed provenance takes the worst of its
    tokens, so that nothing approximate is ever called exact.
    """
    spans: list[tuple[int, Provenance]] = []
    end = start + length
    # Collect the provenance of every page, cheaply: spans are few and long.
    pieces = list(state.spans(start, end))
    position, index = start, 0
    while position < end:
        _, stop, provenance = pieces[index]
        whole_end = stop if stop == end else start + (stop - start) // page_size * page_size
        if whole_end > position:
            cut = whole_end
            worst = provenance
        else:
            cut = position + page_size
            worst = _worst([p for b, s, p in pieces if b < cut and s > position])
        if spans and spans[-1][1] == worst:
            spans[-1] = (cut, worst)
        else:
            spans.append((cut, worst))
        position = cut
        while index < len(pieces) and pieces[index][1] <= position:
            index += 1
    return spans


def _worst(provenances: list[Provenance]) -> Provenance:
    return Provenance(
        exact=all(p.exact for p in provenances),
        copied=any(p.copied for p in provenances),
        generations=max(p.generations for p in provenances),
        roundings=max(p.roundings for p in provenances),
        # A token that was computed here cannot be copied again.
        originals=tuple(sorted({o for p in provenances for o in p.originals}))
        if all(p.copied for p in provenances)
        else (),
    )
