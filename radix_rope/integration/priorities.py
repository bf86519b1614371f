"""Lets SGLang's cache-aware policies see content that is cached at another offset.

`lpm`, `hrrn` and `shortest-prefill-first` order requests by their cached prefix. What a plan would
reuse behind it is added. It is looked up again when cached content has changed, but only for as
many tokens per pass as `LOOKUP_TOKENS`, so a number may be some passes old: it only orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from radix_rope.integration.planning import may_reuse, plan_of
from radix_rope.integration.request import ShiftedHits, state_of

if TYPE_CHECKING:
    from radix_rope.integration.cache import RadixRopeCache

# The others of SGLang's policies do not read `num_matched_prefix_tokens`.
_POLICIES = ("lpm", "hrrn", "shortest-prefill-first")

LOOKUP_TOKENS = 1 << 16
"""Prompt tokens looked up per pass; one longer prompt is looked up all the same."""


def compute_prefix_matches(
    original: Callable[..., Any], policy: Any, waiting_queue: Any, *args: Any, **kwargs: Any
) -> Any:
    """Add shifted hits to every waiting request's matched tokens."""
    from radix_rope.integration.cache import RadixRopeCache

    result = original(policy, waiting_queue, *args, **kwargs)
    cache = policy.tree_cache
    if isinstance(cache, RadixRopeCache) and cache.reuses and policy.policy.value in _POLICIES:
        # Sorted in place, soon.
        cache.queue = policy, waiting_queue
        try:
            add_shifted_hits(cache, waiting_queue)
        except Exception as error:
            cache.fallbacks.survive("plan", error)
    return result


def add_shifted_hits(cache: RadixRopeCache, waiting: Iterable[Any]) -> None:
    """Count in `num_matched_prefix_tokens` what a plan would reuse, too.

    Args:
        cache: the tree.
        waiting: SGLang's requests, their prefixes matched.
    """
    assert cache.content is not None
    reqs = [req for req in waiting if may_reuse(cache, req)]
    version = cache.content.version
    stale = [req for req in reqs if _hits(req).version != version]
    # Those that were never looked up come first, then those that were so longest ago.
    stale.sort(key=lambda req: _hits(req).version)
    left = LOOKUP_TOKENS
    for req in stale:
        if left <= 0:
            break
        try:
            left -= _look_up(cache, req)
        except Exception as error:
            # The others have theirs, and it is not tried again until content changes.
            cache.fallbacks.survive("plan", error)
            state_of(req).hits = ShiftedHits(version)
            left -= len(req.origin_input_ids)
    for req in reqs:
        for begin, end in _hits(req).runs:
            req.num_matched_prefix_tokens += max(0, end - max(begin, req.prefix_len))


def _hits(req: Any) -> ShiftedHits:
    return state_of(req).hits


def _look_up(cache: RadixRopeCache, req: Any) -> int:
    """Note what a plan would reuse now; returns the tokens looked at."""
    assert cache.content is not None
    tokens = np.frombuffer(req.origin_input_ids + req.output_ids, dtype=np.int64)
    end = len(tokens)
    # As it will be matched when it is considered.
    begin: int = min(req.prefix_len, req._compute_max_prefix_len(end))
    begin = begin // cache.page_size * cache.page_size
    runs: tuple[tuple[int, int], ...] = ()
    if begin < end:
        plan = plan_of(cache, req, begin, end, last_chunk=True, tokens=tokens).plan
        if plan is not None:
            runs = tuple((run.begin, run.end) for run in plan.runs)
    state_of(req).hits = ShiftedHits(cache.content.version, runs)
    return end - begin
