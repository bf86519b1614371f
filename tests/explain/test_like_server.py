"""What is explained is what a server's own cache and planner decide."""

from array import array
from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from radix_rope.config import RadixRopeConfig
from radix_rope.explain.cached import CachedRequests
from radix_rope.explain.parts import Kind, explain, plan_options
from radix_rope.integration.cache import RadixRopeCache
from radix_rope.integration.reuse import plan_batch
from tests.explain.strategies import PIECES, prompts
from tests.integration.test_locks import Allocator, Mover, batch, request

configs = st.builds(
    RadixRopeConfig,
    stride=st.just(4),
    min_run_tokens=st.integers(1, 12),
    recompute_tokens=st.integers(0, 6),
    repair=st.sampled_from(["none", "head", "attention"]),
    mode=st.sampled_from(["shifted", "shifted", "shifted", "exact", "off"]),
    check_plans=st.just(True),
)


class Server:
    """RadixRopeCache as a scheduler drives it; who computed a slot, and for which position."""

    def __init__(self, config: RadixRopeConfig, page_size: int) -> None:
        params = CacheInitParams(
            disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=Allocator(100_000),
            page_size=page_size,
        )  # fmt: skip
        self.cache = RadixRopeCache(params, config)
        if config.mode == "shifted":
            self.cache.corrector = Mover()
            self.cache.max_rows = 1000
            # Never called while planning: it only says that a second pass is possible.
            self.cache.repair_rule = object()  # type: ignore[assignment]
        self.computed: list[tuple[str, int]] = []

    def serve(self, name: str, tokens: list[int]) -> None:
        """Match, insert what was prefilled, match again: what `checkpoint` comes down to."""
        self.match(tokens[:-1])
        slots = range(len(self.computed), len(self.computed) + len(tokens))
        self.computed += [(name, position) for position in range(len(tokens))]
        key = RadixKey(array("q", tokens))
        self.cache.insert(InsertParams(key=key, value=torch.tensor(slots)))
        self.match(tokens)

    def match(self, tokens: list[int]) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))

    def plan(self, tokens: list[int]) -> tuple[list[tuple[str, int]], list[Any], int]:
        """By whom the exact prefix was computed; runs, each with by whom; rows."""
        result = self.match(tokens[:-1])
        prefix = self.cache.path_device_indices(result.last_device_node).tolist()
        req = request("r", tokens, self.cache)
        req.prefix_len, req.last_node = len(prefix), result.last_device_node
        req.extend_len = len(tokens) - len(prefix)
        runs, rows = [], 1
        if self.cache.reuses:
            reuse = plan_batch(self.cache, batch(self.cache, req), self.cache.max_rows)
            for entry in reuse.entries:
                rows = len(entry.plan.rows)
                for run in entry.plan.runs:
                    slots = self.cache.donor_slots(run).tolist()
                    runs.append((run, [self.computed[slot] for slot in slots]))
            reuse.release()
        return [self.computed[slot] for slot in prefix], runs, rows


# Of equal donors the one used last is taken, and both a request and the prompt's own prefix count
# as a use; random prompts seldom have equal donors.
PIECE = PIECES[0]
PLAIN = RadixRopeConfig(stride=4, min_run_tokens=4, recompute_tokens=0, check_plans=True)


@example([[1, *PIECE], [2, *PIECE], [1, *PIECE]], [3, *PIECE, 0], PLAIN, 1)
@example([[1, *PIECE], [2, *PIECE]], [1, *PIECE, 3, *PIECE, 0], PLAIN, 1)
@settings(max_examples=100, deadline=None)
@given(st.lists(prompts, min_size=1, max_size=5), prompts, configs, st.sampled_from([1, 1, 4]))
def test_a_plan_is_explained_as_a_server_makes_it(
    requests: list[list[int]], prompt: list[int], config: RadixRopeConfig, page_size: int
) -> None:
    server, cached = Server(config, page_size), CachedRequests(config.stride, page_size)
    for number, tokens in enumerate(requests):
        server.serve(str(number), tokens)
        cached.add(str(number), tokens)
    assert plan_options(config) == server.cache.plan_options
    found = explain(cached, prompt, config)
    prefix, runs, rows = server.plan(prompt)

    exact = [part for part in found.parts if part.kind is Kind.EXACT]
    reused = [part for part in found.parts if part.kind is Kind.REUSED]
    assert sum(map(len, exact)) == len(prefix)
    assert (len(reused), found.rows) == (len(runs), rows)
    for part, (run, _) in zip(reused, runs, strict=True):
        assert part.origin is not None
        assert (part.begin, part.end) == (run.begin, run.end)
        assert part.origin.delta == run.delta
        assert part.origin.left_context_tokens == run.left_context_tokens
    by_whom = [prefix] if prefix else []
    by_whom += [by for _, by in runs]
    for part, by in zip([*exact, *reused], by_whom, strict=True):
        assert part.origin is not None
        assert part.origin.donors == tuple(dict.fromkeys(name for name, _ in by))
        begin = part.origin.donor_begin
        assert [position for _, position in by] == list(range(begin, begin + len(part)))
    assert found.tokens(Kind.RECOMPUTED) == sum(run.head_tokens for run, _ in runs)
