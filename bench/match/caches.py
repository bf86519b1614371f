"""The two caches under comparison, with the same content, and requests against it.

A stock `RadixCache` and our `RadixRopeCache` as SGLang builds them, but without KV: what is
asked of them is what the scheduler asks for a request.
"""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator  # noqa: F401 - import order
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from bench.match.timing import Clock
from radix_rope.config import RadixRopeConfig
from radix_rope.content import ContentTree, ReusePlan, make_plan
from radix_rope.integration.cache import RadixRopeCache

Tokens = npt.NDArray[np.int64]

NODE_TOKENS = 8192
PATH_NODES = 16
SLICE_TOKENS = 2048
VOCABULARY = 128_000


class Caches:
    """Both caches: paths of 16 nodes of 8,192 tokens each, one insert a node."""

    def __init__(self, seed: int) -> None:
        """Start empty."""
        self.random = np.random.default_rng(seed)
        self.stock = RadixCache(_params())
        self.ours = RadixRopeCache(_params(), RadixRopeConfig())
        self.nodes: list[Tokens] = []
        self.paths: list[Tokens] = []
        self._path: list[Tokens] = []
        self.worst_bytes_per_token = 0.0

    @property
    def tree(self) -> ContentTree:
        """Our cache's index of contents."""
        assert self.ours.content is not None
        return self.ours.content

    def fresh(self, size: int) -> Tokens:
        """Random tokens."""
        return self.random.integers(0, VOCABULARY, size)

    def fill(self, cached_tokens: int) -> None:
        """Add nodes up to `cached_tokens`."""
        while self.tree.stats.cached_tokens + NODE_TOKENS <= cached_tokens:
            self.add_node(Clock(), Clock())

    def add_node(self, stock: Clock, ours: Clock) -> None:
        """Insert one more node of new tokens into both, below the path so far."""
        if len(self._path) == PATH_NODES:
            self._path = []
        tokens = self.fresh(NODE_TOKENS)
        self._path.append(tokens)
        path = np.concatenate(self._path)
        sides = [(stock, self.stock), (ours, self.ours)]
        if len(self.nodes) % 2:
            sides.reverse()
        for clock, cache in sides:
            # Each gets a key and slots of its own, as a finished request would bring them.
            params = InsertParams(
                key=RadixKey(array("q", path.tobytes())),
                value=torch.arange(len(path), dtype=torch.int64),
            )
            clock(lambda cache=cache, params=params: cache.insert(params))  # type: ignore[misc]
        self.nodes.append(tokens)
        if len(self._path) > 1:
            self.paths.pop()
        self.paths.append(path)
        stats = self.tree.stats
        if stats.cached_tokens > 50_000:  # below, the filter's smallest size decides
            ratio = stats.index_bytes / stats.cached_tokens
            self.worst_bytes_per_token = max(self.worst_bytes_per_token, ratio)

    def shifted(self, size: int, share: float, turn: int) -> Tokens:
        """A request of slices of cached nodes at other offsets, and of new tokens.

        Where the hits stand depends on `turn` alone: all cache sizes are asked alike.
        """
        pattern = np.random.default_rng(turn)
        parts, length = [self.fresh(5)], 5
        while length < size:
            if pattern.random() < share:
                node = self.nodes[int(self.random.integers(len(self.nodes)))]
                start = int(self.random.integers(0, NODE_TOKENS - SLICE_TOKENS))
                part = node[start : start + SLICE_TOKENS]
            else:
                part = self.fresh(SLICE_TOKENS)
            parts.append(part)
            length += len(part)
        return np.concatenate(parts)[:size]

    def prefix(self, size: int, share: float, turn: int) -> Tokens:
        """A request that begins as a cached path does and goes on with new tokens."""
        path = self.paths[int(self.random.integers(len(self.paths)))]
        known = path[: int(size * share)]
        return np.concatenate([known, self.fresh(size - len(known))])

    def ask(self, request: Tokens, stock: Clock, ours: Clock, stock_first: bool) -> int:
        """Ask both for the request, ours also for its plan; returns tokens that ours reuses.

        The match before the timed ones splits nodes where this request makes both split them.
        """
        tokens = array("q", request.tobytes())
        _match(self.stock, tokens)
        _match(self.ours, tokens)
        if stock_first:
            matched = stock(lambda: _match(self.stock, tokens))
        prefix, plan = ours(lambda: self._match_and_plan(tokens))
        if not stock_first:
            matched = stock(lambda: _match(self.stock, tokens))
        assert matched == prefix
        return prefix + (plan.reused_tokens if plan is not None else 0)

    def _match_and_plan(self, tokens: Any) -> tuple[int, ReusePlan | None]:
        """What the scheduler's match and `reuse` do for a request."""
        cache = self.ours
        prefix = _match(cache, tokens)
        req = SimpleNamespace(full_untruncated_fill_ids=tokens, extra_key=None, cache_salt=None)
        end = len(tokens)
        plan = make_plan(
            self.tree,
            cache.tokens_of(req, end),
            # SGLang always computes the last token.
            min(prefix, end - 1),
            end,
            cache.namespace_of(req),
            cache.plan_options,
        )
        return prefix, plan


class _NoAllocator:
    """The tree frees nothing here and asks for the device only."""

    device = torch.device("cpu")

    def free_segment(self, indices: torch.Tensor, start_pos: int = 0) -> None:
        """Forget the slots of an insert that found its tokens cached."""


def _params() -> CacheInitParams:
    return CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=_NoAllocator(),
        page_size=1,
    )


def _match(cache: RadixCache, tokens: Any) -> int:
    match = cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))
    return int(match.device_prefix_len)
