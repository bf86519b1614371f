"""The second pass: run tokens computed again together with the last gap, as rows like any other.

Owns what each request of the batch computes in it and whose results count. Which tokens are
worth it is `repair`'s business.

The batch keeps all its requests, for sampling and log probabilities see it as it was. A request
without repair takes part with the tokens whose logits are wanted (mostly one), written to SGLang's
padding slot, and what the first pass returned for it stands: it cannot tell that there were two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from radix_rope.integration.picks import Interval, choose_rows
from radix_rope.integration.repair import Plans
from radix_rope.integration.request import state_of
from radix_rope.integration.rows import RowBatch, split_rows

if TYPE_CHECKING:
    from radix_rope.integration.reuse import BatchReuse

# Allocators keep it for padding: nothing reads it.
_PADDING_SLOT = 0


def run_passes(
    run: Callable[[RowBatch], Any],
    forward_batch: Any,
    rows: RowBatch,
    reuse: BatchReuse,
    translator: Any,
) -> Any:
    """Compute the gaps, and in a second pass what plans with repair `attention` want repaired.

    Args:
        run: computes a split batch; returns SGLang's `ModelRunnerOutput`.
        forward_batch: the batch as SGLang made it.
        rows: the same batch, in rows.
        reuse: its plans.
        translator: the model runner's KV index translator.

    Returns:
        The output of the last pass.
    """
    plans = {
        entry.index: entry.plan
        for entry in reuse.entries
        if entry.plan.options.repair == "attention" and entry.plan.runs
    }
    rule = reuse.cache.repair_rule
    if rule is None or not plans:
        return run(rows)
    with rule.watch(forward_batch, rows, plans) as scores:
        output = run(rows)
    requests = len(forward_batch.extend_seq_lens_cpu)
    repaired = second_rows(
        plans, scores(), requests, reuse.cache.max_rows, reuse.cache.max_second_pass_tokens
    )
    if not repaired:
        return output
    others = [index for index in range(requests) if index not in repaired]
    first = FirstResults(output.logits_output, others, wanted_tokens(forward_batch))
    output = run(split_rows(*second_batch(forward_batch, repaired), translator))
    first.put_into(output.logits_output)
    for entry in reuse.entries:
        if entry.index in repaired and not entry.req.retracted_stain:
            computed = sum(end - begin for begin, end in repaired[entry.index])
            state_of(entry.req).recomputed_tokens += computed
            reuse.recomputed_tokens += computed
    return output


def second_rows(
    plans: Plans,
    scores: Mapping[int, torch.Tensor],
    requests: int,
    max_rows: int,
    max_tokens: int | None = None,
) -> dict[int, list[Interval]]:
    """What each request computes in the second pass: its picks, then its last gap.

    Rows that are left after one per request are dealt out evenly, first requests first; a
    request that gets none is not repaired. No request computes more than `max_tokens`: of a long
    one fewer tokens are picked than it asked for, or none.
    """
    share, more = divmod(max(0, max_rows - requests), len(plans))
    # One transfer to the host for the whole batch; it waits for the first pass.
    flat = torch.cat(list(scores.values())).cpu().numpy()
    rows: dict[int, list[Interval]] = {}
    first = 0
    for place, (index, plan) in enumerate(plans.items()):
        own = flat[first : first + plan.reused_tokens]
        first += plan.reused_tokens
        budget = share + (place < more)
        if budget == 0:
            continue
        runs = [(run.begin, run.end) for run in plan.runs]
        percent = plan.options.attention_percent
        if max_tokens is not None:
            # `choose_rows` rounds tokens up, so leave one.
            most = max_tokens - len(plan.rows[-1]) - 1
            percent = min(percent, 100 * most // plan.reused_tokens)
        if percent < 1:
            continue
        picks = choose_rows(runs, own, percent, budget)
        rows[index] = [*picks, (plan.rows[-1].begin, plan.rows[-1].end)]
    return rows


def second_batch(
    forward_batch: Any, repaired: Mapping[int, list[Interval]]
) -> tuple[Any, dict[int, list[Interval]]]:
    """The batch to split for the second pass, and the rows of all its requests.

    Requests that are not repaired compute the tokens whose logits are wanted, and leave their
    KV as it is.
    """
    rows = dict(repaired)
    slots = forward_batch.out_cache_loc.clone()
    wanted = wanted_tokens(forward_batch)
    first = 0
    for index, (prefix, length) in enumerate(
        zip(forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu, strict=True)
    ):
        if index not in repaired:
            end = prefix + length
            rows[index] = [(end - max(1, wanted[index]), end)]
            slots[first : first + length] = _PADDING_SLOT
        first += length
    return dataclasses.replace(forward_batch, out_cache_loc=slots), rows


def wanted_tokens(forward_batch: Any) -> list[int]:
    """How many of each request's last tokens have their log probabilities returned."""
    starts = forward_batch.extend_logprob_start_lens_cpu
    lengths = forward_batch.extend_seq_lens_cpu
    if not forward_batch.return_logprob or starts is None:
        return [0] * len(lengths)
    return [length - start for length, start in zip(lengths, starts, strict=True)]


class FirstResults:
    """What the first pass returned for requests that have no second one.

    Args:
        logits: the first pass' `LogitsProcessorOutput`; what is needed of it is copied.
        others: places in the batch of those requests, ascending.
        wanted: `wanted_tokens` of the batch.
    """

    def __init__(self, logits: Any, others: Sequence[int], wanted: Sequence[int]) -> None:
        """Copy the rows, for the second pass may write to the same buffer."""
        self.others = list(others)
        ends = np.cumsum(wanted).tolist()
        self.tokens = [t for i in self.others for t in range(ends[i] - wanted[i], ends[i])]
        self.logits = logits
        self.next_token = logits.next_token_logits[self.others].clone()
        inputs = logits.input_token_logprobs
        self.inputs = None if inputs is None else inputs[self.tokens].clone()

    def put_into(self, logits: Any) -> None:
        """Replace what the second pass returned for them."""
        logits.next_token_logits[self.others] = self.next_token
        if self.inputs is not None:
            logits.input_token_logprobs[self.tokens] = self.inputs
        for name in (
            "input_top_logprobs_val",
            "input_top_logprobs_idx",
            "input_token_ids_logprobs_val",
            "input_token_ids_logprobs_idx",
        ):
            mine, theirs = getattr(self.logits, name), getattr(logits, name)
            if mine is not None:
                for index in self.others:
                    theirs[index] = mine[index]
