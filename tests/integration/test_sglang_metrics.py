"""SGLang's own metrics beside ours: its hit rate, and a backend that cannot be reached."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from radix_rope.integration import hooks, seams
from radix_rope.integration.cache import RadixRopeCache
from radix_rope.integration.metrics import Metrics
from radix_rope.integration.reuse import BatchReuse, undo
from tests.integration.test_locks import (  # noqa: F401
    DOCUMENT,
    batch,
    cache,
    locked,
    request,
)
from tests.integration.test_metrics import LABELS


def stats_of(cache: RadixRopeCache, prepared: Any) -> Any:  # noqa: F811
    """SGLang's numbers of a prepared batch, by whichever form calls `prefill_stats` there."""
    from sglang.srt.managers.scheduler_components.metrics_reporter import PrefillStats

    seams.wrap({seams.PREFILL_STATS: hooks.prefill_stats})
    again = [req for req in prepared.reqs if req.retracted_stain]
    adder = SimpleNamespace(
        tree_cache=cache, can_run_list=prepared.reqs, new_token_ratio=1.0, log_replay_tokens=0,
        log_device_hit_tokens=0, log_host_hit_tokens=0, log_storage_hit_tokens=0,
        # As `PrefillAdder` sums them up.
        log_hit_tokens=sum(req.prefix_len for req in prepared.reqs),
        log_input_tokens=sum(req.extend_len for req in prepared.reqs),
        reprocessed_log_hit_tokens=sum(req.prefix_len for req in again),
        reprocessed_log_input_tokens=sum(req.extend_len for req in again),
    )  # fmt: skip
    return PrefillStats.from_adder(adder, [])


@pytest.mark.parametrize("undone", [False, True])
@pytest.mark.parametrize("company", [False, True])
def test_sglangs_hit_rate_leaves_retracted_requests_out(
    cache: RadixRopeCache,  # noqa: F811
    company: bool,
    undone: bool,
) -> None:
    reqs = [request("again", [*range(1, 21), *DOCUMENT, 30], cache, retracted_stain=True)]
    if company:
        reqs.append(request("first", [*range(41, 51), *DOCUMENT, 60], cache))
    prepared = batch(cache, *reqs)
    hooks.prepare_for_extend(lambda batch: None, prepared)
    reuse = prepared.radix_rope_reuse
    reused = {entry.req.rid: entry.plan.reused_tokens for entry in reuse.entries}
    assert reused.keys() == {req.rid for req in reqs} and min(reused.values()) > 150
    stats = stats_of(cache, prepared)
    if undone:
        reuse.stats = stats
        undo(reuse)
        reused = dict.fromkeys(reused, 0)
    reuse.release()
    # As SGLang's reporter does it.
    first_attempts = stats.log_input_tokens - stats.reprocessed_log_input_tokens
    assert first_attempts == sum(
        req.extend_len - reused[req.rid] for req in reqs if not req.retracted_stain
    )
    assert stats.log_hit_tokens - stats.reprocessed_log_hit_tokens == 0
    # And what was computed at all, and taken from runs.
    assert stats.log_input_tokens == sum(req.extend_len - reused[req.rid] for req in reqs)
    assert stats.radix_rope_shifted_tokens == sum(reused.values())
    assert not locked(cache)


class Broken:
    """A metric of a backend that cannot be reached."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def labels(self, **labels: str) -> "Broken":
        return self

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError("no metrics backend")


def test_a_broken_metrics_backend_costs_neither_answer_nor_reuse(
    cache: RadixRopeCache,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    kinds = SimpleNamespace(_counter_cls=Broken, _gauge_cls=Broken, _histogram_cls=Broken)
    cache.metrics = Metrics(LABELS, kinds, token_bytes=8, on_gpu=False)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            prepared = batch(cache, request("moved", [*range(1, 21), *DOCUMENT, 30], cache))
            hooks.prepare_for_extend(lambda batch: None, prepared)
            reuse = prepared.radix_rope_reuse
            assert [entry.plan.reused_tokens > 150 for entry in reuse.entries] == [True]
            assert locked(cache)
            with cache.metrics.timing_copy():
                reuse.release()
            assert not locked(cache)
            # What a batch without runs computes; its answer must get out.
            ran: Any = SimpleNamespace(radix_rope_reuse=BatchReuse(cache))
            ran.radix_rope_reuse.tokens.update(computed=3)
            assert hooks.forward_raw(lambda *args: "answer", None, ran) == "answer"
    assert not cache.fallbacks.counts
    # Nine failures, logged at the 1st, 2nd, 4th and 8th.
    lines = [record for record in caplog.records if "counting failed" in record.getMessage()]
    assert [record.args for record in lines] == [(1,), (2,), (4,), (8,)]
    assert all(record.exc_info for record in lines)
