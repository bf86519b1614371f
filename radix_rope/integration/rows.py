"""A forward batch in which every gap of a request is a row of its own.

A row has its request's `req_pool_idx`, the gap's start as prefix length and
the gap's end as sequence length, so any attention backend that reads
`req_to_token[req_pool_idx, :seq_len]` sees the runs and earlier gaps before
it. Knows nothing of trees or donors.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RowBatch:
    """A split batch and what is needed to read its logits per request.

    Attributes:
        forward_batch: one entry per row.
        computed_tokens: tokens computed of each request, in the order of requests.
        logprob_starts: how many of those come before the first whose logprob is wanted.
    """

    forward_batch: Any
    computed_tokens: list[int]
    logprob_starts: list[int] | None


# Set while a split batch runs: the eager runner copies the forward batch, so
# nothing kept on it would reach the logits processor.
_current: ContextVar[RowBatch | None] = ContextVar("radix_rope_rows", default=None)


def split_rows(
    forward_batch: Any, rows: Mapping[int, Sequence[tuple[int, int]]], translator: Any
) -> RowBatch:
    """Keep only the tokens of `rows` and make every row an entry of the batch.

    Args:
        forward_batch: SGLang's ForwardBatch of an extend; not modified.
        rows: by a request's place in the batch, the (begin, end) positions to
            compute, ascending, the last one ending with the request; requests
            that are not named are computed whole.
        translator: the model runner's KV index translator.
    """
    prefix_lens = forward_batch.extend_prefix_lens_cpu
    extend_lens = forward_batch.extend_seq_lens_cpu
    owner: list[int] = []
    begins: list[int] = []
    ends: list[int] = []
    keep: list[torch.Tensor] = []
    computed: list[int] = []
    first_token = 0
    for index, (prefix, length) in enumerate(zip(prefix_lens, extend_lens, strict=True)):
        own = rows.get(index) or ((prefix, prefix + length),)
        for begin, end in own:
            owner.append(index)
            begins.append(begin)
            ends.append(end)
            offset = first_token + begin - prefix
            keep.append(torch.arange(offset, offset + end - begin))
        computed.append(sum(end - begin for begin, end in own))
        first_token += length
    device = forward_batch.seq_lens.device
    token = torch.cat(keep).to(device, non_blocking=True)
    row = torch.tensor(owner, dtype=torch.int64)
    row_device = row.to(device, non_blocking=True)
    lens = [end - begin for begin, end in zip(begins, ends, strict=True)]
    split = dataclasses.replace(
        forward_batch,
        batch_size=len(owner),
        input_ids=forward_batch.input_ids[token],
        positions=forward_batch.positions[token],
        out_cache_loc=forward_batch.out_cache_loc[token],
        req_pool_indices=forward_batch.req_pool_indices[row_device],
        req_pool_indices_cpu=_pick(forward_batch.req_pool_indices_cpu, row),
        orig_seq_lens=_pick(forward_batch.orig_seq_lens, row_device),
        seq_lens=_like(ends, forward_batch.seq_lens),
        seq_lens_cpu=torch.tensor(ends, dtype=torch.int64),
        seq_lens_sum=sum(ends),
        extend_num_tokens=len(token),
        extend_prefix_lens=_like(begins, forward_batch.extend_prefix_lens),
        extend_seq_lens=_like(lens, forward_batch.extend_seq_lens),
        extend_start_loc=_like(_starts(lens), forward_batch.extend_start_loc),
        extend_prefix_lens_cpu=begins,
        extend_seq_lens_cpu=lens,
        lora_ids=_pick_list(forward_batch.lora_ids, owner),
        rids=_pick_list(forward_batch.rids, owner),
        mm_inputs=_pick_list(forward_batch.mm_inputs, owner),
        mrope_positions=(
            None
            if forward_batch.mrope_positions is None
            else forward_batch.mrope_positions[:, token]
        ),
        mm_token_modalities=_pick(forward_batch.mm_token_modalities, token),
        global_num_token_non_padded_cpu=len(token),
        global_num_token_non_padded=(
            None
            if forward_batch.global_num_token_non_padded is None
            else torch.full_like(forward_batch.global_num_token_non_padded, len(token))
        ),
    )
    # The write ids are translated per forward; this one writes fewer slots.
    split.kv_loc_plan = None
    translator.own_plan(split).bind(split, translator)
    starts = forward_batch.extend_logprob_start_lens_cpu
    logprob_starts = None
    if starts is not None:
        # Tokens from the start on are all computed: count from the end.
        logprob_starts = [
            done - (length - start)
            for done, length, start in zip(computed, extend_lens, starts, strict=True)
        ]
    return RowBatch(split, computed, logprob_starts)


def enter_rows(rows: RowBatch) -> Any:
    """Make `rows` the running split batch; returns the token for `leave_rows`."""
    return _current.set(rows)


def leave_rows(token: Any) -> None:
    """End what `enter_rows` began."""
    _current.reset(token)


def per_request_view(forward_batch: Any) -> Any:
    """The batch as the logits processor must see it: lengths per request, not per row."""
    rows = _current.get()
    if rows is None:
        return forward_batch
    view = copy.copy(forward_batch)
    view.extend_seq_lens = _like(rows.computed_tokens, forward_batch.extend_seq_lens)
    view.extend_seq_lens_cpu = rows.computed_tokens
    view.extend_logprob_start_lens_cpu = rows.logprob_starts
    return view


def _like(values: list[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype).to(like.device, non_blocking=True)


def _starts(lens: list[int]) -> list[int]:
    starts, total = [], 0
    for length in lens:
        starts.append(total)
        total += length
    return starts


def _pick(values: torch.Tensor | None, index: torch.Tensor) -> torch.Tensor | None:
    return None if values is None else values[index]


def _pick_list(values: list[Any] | None, owner: list[int]) -> list[Any] | None:
    return None if values is None else [values[index] for index in owner]
