"""The functions wrapped around SGLang's, in the order in which a batch meets them.

A request's own options are checked when it comes in. Admission plans it
(`admission.py`), so that only what is computed is charged. `prepare_for_extend` plans
and locks, `init_new` carries the plan to the forward, `_forward_raw` copies the
runs and computes the gaps alone, the logits processor is shown requests instead
of rows, and the reports say what happened. What fails of ours is undone, and the
batch computed whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from radix_rope.integration import seams
from radix_rope.integration.admission import add_chunked_req, add_one_req
from radix_rope.integration.cache import RadixRopeCache
from radix_rope.integration.explain import explain_batch
from radix_rope.integration.priorities import compute_prefix_matches
from radix_rope.integration.request_options import (
    RequestOptionError,
    parse_request_options,
    refuse_attention,
)
from radix_rope.integration.reuse import (
    BatchReuse,
    ShiftedTokens,
    begin_extend,
    commit,
    plan_batch,
    undo,
)
from radix_rope.integration.rows import (
    RowBatch,
    enter_rows,
    leave_rows,
    per_request_view,
    split_rows,
)
from radix_rope.integration.second_pass import run_passes

_PLAN = "radix_rope_reuse"


def install_request_check() -> None:
    """Check what requests ask of radix_rope, also where nothing is reused."""
    seams.wrap({seams.ADD_REQUEST: add_request})


def add_request(
    original: Callable[..., Any], scheduler: Any, req: Any, *args: Any, **kwargs: Any
) -> Any:
    """Refuse a request whose options cannot be given, before it waits for anything."""
    cache = scheduler.tree_cache
    if isinstance(cache, RadixRopeCache) and req.to_finish is None:
        try:
            options = parse_request_options(req.sampling_params.custom_params, cache.config)
            if cache.reuses and cache.no_second_pass is not None:
                refuse_attention(options, cache.no_second_pass)
        except RequestOptionError as error:
            req.set_finish_with_abort(str(error))
    return original(scheduler, req, *args, **kwargs)


def install() -> None:
    """Wrap SGLang's functions in this process; safe to call more than once."""
    seams.wrap(
        {
            seams.PREFIX_MATCHES: compute_prefix_matches,
            seams.ADD_ONE_REQ: add_one_req,
            seams.ADD_CHUNKED_REQ: add_chunked_req,
            seams.PREPARE_FOR_EXTEND: prepare_for_extend,
            seams.FORWARD_BATCH_INIT: forward_batch_init,
            seams.FORWARD_RAW: forward_raw,
            seams.LOGITS_METADATA: logits_metadata,
            seams.PREFILL_STATS: prefill_stats,
            seams.PREFILL_LOG: prefill_log,
            seams.CACHED_TOKENS_DETAILS: cached_tokens_details,
        }
    )


def prepare_for_extend(original: Callable[..., Any], batch: Any) -> Any:
    """Plan and lock before SGLang allocates, note what was reused after."""
    cache = batch.tree_cache
    if not isinstance(cache, RadixRopeCache) or not cache.reuses:
        return original(batch)
    if cache.outstanding is not None:
        # A batch that was prepared but never ran; its donors would stay locked.
        cache.outstanding.release()
    reuse = cache.outstanding = _plan(cache, batch)
    try:
        result = original(batch)
    except BaseException:
        reuse.release()
        raise
    try:
        cache.shifted_tokens_of_batch = commit(reuse, batch)
    except Exception as error:
        undo(reuse)
        cache.shifted_tokens_of_batch = None
        cache.fallbacks.survive("plan", error)
    if cache.config.explain:
        explain_batch(reuse, batch)
    setattr(batch, _PLAN, reuse)
    return result


def _plan(cache: RadixRopeCache, batch: Any) -> BatchReuse:
    """The batch's plans; none when planning fails."""
    begin_extend(cache, batch)
    admission, cache.admission = cache.admission, None
    spent = 0.0 if admission is None else admission.seconds
    try:
        with nullcontext() if cache.metrics is None else cache.metrics.timing_plan(spent):
            return plan_batch(cache, batch, cache.max_rows, admission)
    except Exception as error:
        cache.fallbacks.survive("plan", error)
        return BatchReuse(cache)


def forward_batch_init(
    original: Callable[..., Any], cls: type, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Hand the batch's plans to the forward that serves it, once."""
    reuse: BatchReuse | None = getattr(batch, _PLAN, None)
    if reuse is None or not batch.forward_mode.is_extend():
        return original(cls, batch, *args, **kwargs)
    setattr(batch, _PLAN, None)
    reuse.stats = getattr(batch, "prefill_stats", None)
    try:
        for entry in reuse.entries:
            assert batch.reqs[entry.index] is entry.req, "the batch changed after it was planned"
    except Exception as error:
        undo(reuse)
        reuse.cache.fallbacks.survive("plan", error)
    try:
        forward_batch = original(cls, batch, *args, **kwargs)
    except BaseException:
        reuse.release()
        raise
    setattr(forward_batch, _PLAN, reuse)
    return forward_batch


def forward_raw(
    original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Copy the runs into the requests' own slots, then compute the gaps alone."""
    reuse: BatchReuse | None = getattr(forward_batch, _PLAN, None)
    if reuse is None:
        return original(runner, forward_batch, *args, **kwargs)
    setattr(forward_batch, _PLAN, None)
    output = _forward(original, runner, forward_batch, reuse, *args, **kwargs)
    if reuse.cache.metrics is not None:
        reuse.cache.metrics.count_prefill(reuse)
    return output


def _forward(
    original: Callable[..., Any],
    runner: Any,
    forward_batch: Any,
    reuse: BatchReuse,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not reuse.entries:
        return original(runner, forward_batch, *args, **kwargs)
    try:
        split = _splice(runner, forward_batch, reuse)
    except Exception as error:
        split = None
        reuse.cache.fallbacks.survive("copy", error)
    finally:
        # The copy is enqueued: later writes to the donors' slots come after it.
        reuse.release()
    if split is not None:

        def run(rows: RowBatch) -> Any:
            token = enter_rows(rows)
            try:
                return original(runner, rows.forward_batch, *args, **kwargs)
            finally:
                leave_rows(token)

        try:
            with _rows_are_safe(runner):
                return run_passes(run, forward_batch, split, reuse, runner.kv_index_translator)
        except Exception as error:
            reuse.cache.fallbacks.survive("forward", error)
    # The slots are the requests' own: computing them whole overwrites what was copied.
    undo(reuse)
    return original(runner, forward_batch, *args, **kwargs)


def _splice(runner: Any, forward_batch: Any, reuse: BatchReuse) -> RowBatch:
    """Copy the runs; returns the batch of the rows that remain to be computed."""
    rows: dict[int, list[tuple[int, int]]] = {
        entry.index: [(row.begin, row.end) for row in entry.plan.rows] for entry in reuse.entries
    }
    _copy_runs(runner, forward_batch, reuse)
    return split_rows(forward_batch, rows, runner.kv_index_translator)


def _copy_runs(runner: Any, forward_batch: Any, reuse: BatchReuse) -> None:
    req_to_token = runner.req_to_token_pool.req_to_token
    source, target, delta = [], [], []
    for entry in reuse.entries:
        if not entry.plan.runs:
            continue
        row = req_to_token[forward_batch.req_pool_indices[entry.index]]
        source.append(entry.source_slots)
        for run in entry.plan.runs:
            target.append(row[run.begin : run.end])
            delta.append(torch.full((run.end - run.begin,), run.delta, dtype=torch.int64))
    corrector = reuse.cache.corrector
    if source and corrector is not None:
        metrics = reuse.cache.metrics
        with nullcontext() if metrics is None else metrics.timing_copy():
            corrector.move(torch.cat(source), torch.cat(target).to(torch.int64), torch.cat(delta))


@contextmanager
def _rows_are_safe(runner: Any) -> Iterator[None]:
    """Take the paths that work with several rows per request, for one forward.

    A captured prefill graph has no place for rows, and FlashInfer's ragged
    path writes K and V after attention, too late for the next row.
    """
    graph_runner = runner.prefill_cuda_graph_runner
    # A backend per phase comes wrapped; only the one for prefill runs here.
    backend = getattr(runner.attn_backend, "prefill_backend", runner.attn_backend)
    use_paged = getattr(backend, "use_paged", None)
    runner.prefill_cuda_graph_runner = None
    if use_paged is not None:
        backend.use_paged = True
    try:
        yield
    finally:
        runner.prefill_cuda_graph_runner = graph_runner
        if use_paged is not None:
            backend.use_paged = use_paged


def logits_metadata(original: Callable[..., Any], cls: type, forward_batch: Any) -> Any:
    """Show the logits processor one length per request, whatever its rows."""
    return original(cls, per_request_view(forward_batch))


def prefill_stats(
    original: Callable[..., Any], cls: type, adder: Any, *args: Any, **kwargs: Any
) -> Any:
    """Count shifted tokens apart from computed and exact ones."""
    stats = original(cls, adder, *args, **kwargs)
    cache = adder.tree_cache
    if isinstance(cache, RadixRopeCache) and cache.reuses:
        shifted = cache.shifted_tokens_of_batch or ShiftedTokens()
        stats.log_input_tokens -= shifted.spliced
        stats.log_hit_tokens -= shifted.prefix
        # SGLang subtracts these from those, for a hit rate of first attempts.
        stats.reprocessed_log_input_tokens -= shifted.spliced_again
        stats.reprocessed_log_hit_tokens -= shifted.prefix_again
        stats.radix_rope_shifted_tokens = shifted.spliced + shifted.prefix
    return stats


def prefill_log(
    original: Callable[..., Any],
    reporter: Any,
    batch: Any,
    prefill_stats: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Add the shifted tokens to SGLang's own log line."""
    shifted = getattr(prefill_stats, "radix_rope_shifted_tokens", None)
    if shifted is None:
        return original(reporter, batch, prefill_stats, *args, **kwargs)

    def add_count(record: logging.LogRecord) -> bool:
        hits = f"#cached-token: {prefill_stats.log_hit_tokens}, "
        if isinstance(record.msg, str):
            record.msg = record.msg.replace(hits, f"{hits}#shifted-token: {shifted}, ", 1)
        return True

    logger = logging.getLogger(type(reporter).__module__)
    logger.addFilter(add_count)
    try:
        return original(reporter, batch, prefill_stats, *args, **kwargs)
    finally:
        logger.removeFilter(add_count)


def cached_tokens_details(original: Callable[..., Any], streamer: Any, req: Any) -> Any:
    """Split a request's cached tokens into exact (`device`) and `shifted`.

    `recomputed` tokens, of a second pass, are beside those: their cost comes on top.
    """
    details = original(streamer, req)
    state = getattr(req, "radix_rope", None)
    if details is None or state is None:
        return details
    details = {**details, "device": state.exact_tokens, "shifted": state.shifted_tokens}
    if state.recomputed_tokens:
        details["recomputed"] = state.recomputed_tokens
    return details
