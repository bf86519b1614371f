"""Prometheus metrics of one scheduler: numbers only, never prompt content.

Made when SGLang runs with `--enable-metrics`, in the ranks that report; everywhere else the cache
holds none and nothing is counted or timed. Clock readings end here and influence no decision, and
neither does a backend that fails: that is logged, and the batch goes on.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from radix_rope.content.stats import MatchStats
from radix_rope.integration import seams
from radix_rope.integration.fallbacks import STAGES, is_worth_a_line

if TYPE_CHECKING:
    from radix_rope.integration.reuse import BatchReuse

logger = logging.getLogger(__name__)

SOURCES = ("exact", "shifted", "computed")
REASONS = ("generations", "roundings", "too_short", "rows", "memory")

_RUN_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
_SECONDS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class Metrics:
    """Counters, histograms and gauges under the names `sglang:radix_rope_*`.

    Args:
        labels: SGLang's labels of this scheduler, by name.
        kinds: SGLang's collector class, which may bring other classes than Prometheus's.
        token_bytes: K and V of one token in all layers, bytes.
        on_gpu: measure copies by events on the device instead of by the clock.
    """

    def __init__(
        self, labels: Mapping[str, Any], kinds: Any, token_bytes: int, on_gpu: bool
    ) -> None:
        # Imported late: PROMETHEUS_MULTIPROC_DIR must be set first.
        import prometheus_client

        counter = kinds._counter_cls or prometheus_client.Counter
        gauge = kinds._gauge_cls or prometheus_client.Gauge
        histogram = kinds._histogram_cls or prometheus_client.Histogram
        names = [*labels]

        def counters(name: str, text: str, label: str, values: tuple[str, ...]) -> dict[str, Any]:
            made = counter(f"sglang:radix_rope_{name}", text, [*names, label])
            # All values from the start, so that rates have something to divide by.
            return {value: made.labels(**labels, **{label: value}) for value in values}

        def one(kind: Any, name: str, text: str, **options: Any) -> Any:
            return kind(f"sglang:radix_rope_{name}", text, names, **options).labels(**labels)

        self._prompt_tokens = counters(
            "prompt_tokens_total",
            "Prompt tokens by where their KV came from: an exact prefix, approximate KV "
            "(moved runs and prefixes that hold some), or computed.",
            "source",
            SOURCES,
        )
        self._recomputed = one(
            counter,
            "recomputed_tokens_total",
            "Prompt tokens that a second pass computed again, on top of the prompt tokens.",
        )
        self._refused = counters(
            "refused_donors_total",
            "Runs that equal cached content and were computed all the same, by reason.",
            "reason",
            REASONS,
        )
        self._fallbacks = counters(
            "fallbacks_total",
            "Failures of radix_rope that cost reuse only, by stage.",
            "stage",
            STAGES,
        )
        self._run_tokens = one(
            histogram, "run_tokens", "Lengths of the runs copied.", buckets=_RUN_TOKENS
        )
        self._plan_seconds = one(
            histogram,
            "plan_seconds",
            "Time to match and plan one extend batch, from the pass that formed it on.",
            buckets=_SECONDS,
        )
        self._match_seconds = one(
            counter,
            "match_seconds_total",
            "Time spent on look-ups in cached content, for plans and for priorities.",
        )
        self._matches = one(
            counter, "matches_total", "Look-ups in cached content, for plans and for priorities."
        )
        self._match_budget = one(
            counter,
            "match_budget_exhausted_total",
            "Look-ups that reached the bound of work per request.",
        )
        self._copy_seconds = one(
            histogram,
            "copy_seconds",
            "Time to copy and correct the runs of one batch.",
            buckets=_SECONDS,
        )
        self._copied_bytes = one(counter, "copied_bytes_total", "K and V written by copies.")
        # As SGLang's own gauges of one scheduler.
        recent = {} if kinds._gauge_cls else {"multiprocess_mode": "mostrecent"}
        self._entries = one(gauge, "index_entries", "Windows in the content index.", **recent)
        self._bytes = one(gauge, "index_bytes", "Memory of the content index.", **recent)
        self._tokens = one(gauge, "index_tokens", "Cached tokens in the content index.", **recent)
        self._token_bytes = token_bytes
        # What was taken over of totals that others count.
        self._seen = MatchStats()
        self._seen_fallbacks: Counter[str] = Counter()
        self._failures = 0
        self._timer: Any = None
        if on_gpu:
            self._timer = seams.device_timer(self._observe_copy)

    @contextmanager
    def timing_plan(self, spent: float = 0.0) -> Iterator[None]:
        """Time the planning of one batch, of which `spent` seconds are past."""
        begin = time.perf_counter() - spent
        yield
        with self._harmless():
            self._plan_seconds.observe(time.perf_counter() - begin)

    @contextmanager
    def timing_copy(self) -> Iterator[None]:
        """Time the copies of one batch; on a GPU the numbers arrive some batches later."""
        if self._timer is not None:
            with self._timer.wrap(metadata={}):
                yield
            return
        begin = time.perf_counter()
        yield
        self._observe_copy(time.perf_counter() - begin)

    def _observe_copy(self, seconds: float) -> None:
        with self._harmless():
            self._copy_seconds.observe(seconds)

    def count_prefill(self, reuse: BatchReuse) -> None:
        """Count one extend batch that ran."""
        with self._harmless():
            self._count_prefill(reuse)

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """Log what fails, more and more rarely, and go on: no number is worth a request."""
        try:
            yield
        except Exception as error:
            self._failures += 1
            if is_worth_a_line(self._failures):
                logger.error(
                    "radix_rope: counting failed (%d so far); the metrics are incomplete.",
                    self._failures,
                    exc_info=error,
                )

    def _count_prefill(self, reuse: BatchReuse) -> None:
        for source, count in reuse.tokens.items():
            self._prompt_tokens[source].inc(count)
        self._recomputed.inc(reuse.recomputed_tokens)
        for entry in reuse.entries:
            for run in entry.plan.runs:
                self._run_tokens.observe(len(run))
            self._copied_bytes.inc(entry.plan.reused_tokens * self._token_bytes)
        cache = reuse.cache
        for stage, count in cache.fallbacks.counts.items():
            self._fallbacks[stage].inc(count - self._seen_fallbacks[stage])
        self._seen_fallbacks = cache.fallbacks.counts.copy()
        if cache.content is not None:
            self._follow(cache.content.stats)

    def _follow(self, stats: MatchStats) -> None:
        """Take over what the content tree counted since the last call, and its sizes."""
        seen = self._seen
        self._matches.inc(stats.matches - seen.matches)
        self._match_seconds.inc(stats.total_match_seconds - seen.total_match_seconds)
        self._match_budget.inc(stats.budget_exhausted - seen.budget_exhausted)
        seen.matches = stats.matches
        seen.total_match_seconds = stats.total_match_seconds
        seen.budget_exhausted = stats.budget_exhausted
        for reason, count in stats.refused.items():
            self._refused[reason].inc(count - seen.refused[reason])
        seen.refused = stats.refused.copy()
        self._entries.set(stats.entries)
        self._bytes.set(stats.index_bytes)
        self._tokens.set(stats.cached_tokens)


def make_metrics(token_bytes: int, device: torch.device) -> Metrics | None:
    """The metrics of this scheduler, or None where SGLang reports none.

    Args:
        token_bytes: K and V of one token in all layers, bytes.
        device: where they lie.
    """
    if not seams.reports_metrics():
        return None
    labels, kinds = seams.metric_labels()
    return Metrics(labels, kinds, token_bytes, on_gpu=device.type == "cuda")
