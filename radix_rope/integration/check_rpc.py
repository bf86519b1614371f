"""What the quality check asks of the scheduler: what it can do, and to put the cache back.

The check's engine loads this module as a dotted-path cache implementation that nobody selects,
which adds the methods to the scheduler of that engine alone; no server has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.radix_cache import RadixCache

from radix_rope.integration.cache import RadixRopeCache


class CheckRpc(RadixCache):  # type: ignore[misc]
    """Never built: naming it makes SGLang's processes import this module."""


def no_second_pass(scheduler: Any, answer: str) -> None:
    """Write to the file `answer` why this engine has no second pass; nothing where it has one.

    Every rank writes the same; SGLang's RPC brings nothing back.

    Raises:
        RuntimeError: another cache is in use.
    """
    Path(answer).write_text(_cache_of(scheduler).no_second_pass or "", encoding="utf-8")


def keep_only(scheduler: Any, paths: Sequence[Sequence[int]]) -> None:
    """Drop every cached node that is on none of these paths of the default namespace.

    paths: token ids from position 0 on.

    Raises:
        RuntimeError: another cache is in use, or a request holds what should go; nothing is
            lost, so ask again when it has ended.
    """
    cache = _cache_of(scheduler)
    wanted = [np.asarray(path, dtype=np.int64) for path in paths]
    held_tokens = _drop(cache, cache.root_node, wanted)
    if held_tokens:
        raise RuntimeError(f"requests still hold {held_tokens} tokens that should go")


def _cache_of(scheduler: Any) -> RadixRopeCache:
    cache = scheduler.tree_cache
    if not isinstance(cache, RadixRopeCache):
        raise RuntimeError(f"the cache is a {type(cache).__name__}, not radix_rope's")
    return cache


def _drop(cache: RadixRopeCache, root: Any, wanted: Sequence[np.ndarray[Any, Any]]) -> int:
    """Drop what hangs below the root and is not wanted; tokens of it that are locked."""
    held_tokens = 0
    nodes: list[tuple[Any, bool]] = []
    stack: list[tuple[Any, Sequence[np.ndarray[Any, Any]]]] = [
        (child, wanted) for child in root.children.values()
    ]
    while stack:
        node, paths = stack.pop()
        segment = node.segment
        in_namespace = not any(segment.namespace)
        on = [p for p in paths if in_namespace and _runs_through(p, segment)]
        nodes.append((node, bool(on)))
        stack.extend((child, on) for child in node.children.values())
    # Parents were listed before their children.
    for node, keep in reversed(nodes):
        if keep:
            continue
        if node.lock_ref or node.children:
            held_tokens += len(node.key)
            continue
        cache.token_to_kv_pool_allocator.free_segment(node.value, start_pos=0)
        cache._delete_leaf(node)
    return held_tokens


def _runs_through(path: np.ndarray[Any, Any], segment: Any) -> bool:
    """Whether the path goes on into `segment`, its parents being on it."""
    part = path[segment.start : segment.end]
    return len(part) > 0 and bool(np.array_equal(part, segment.tokens[: len(part)]))


Scheduler.radix_rope_no_second_pass = no_second_pass
Scheduler.radix_rope_keep_only = keep_only
