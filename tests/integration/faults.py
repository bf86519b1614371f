"""Faults injected into a running scheduler, run there by `probe.py`."""

import logging
from collections.abc import Callable
from typing import Any

from radix_rope.content.tree import ContentTree
from radix_rope.integration import planning, rows, second_pass
from radix_rope.integration.fallbacks import logger

# What to put back, and what was logged, since `arm`.
_restore: list[Callable[[], None]] = []
_logged: list[logging.LogRecord] = []
_raised: list[str] = []
# The batches in rows that are second passes.
_second_passes: list[rows.RowBatch] = []


class InjectedError(Exception):
    """A fault that no code expects."""


class _Recorder(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _logged.append(record)


def _replace(holder: Any, name: str, value: Any) -> None:
    original = getattr(holder, name)
    _restore.append(lambda: setattr(holder, name, original))
    setattr(holder, name, value)


def arm(scheduler: Any, stage: str, times: int) -> None:
    """Let the next `times` calls of a stage raise, after a part of its work where it has several.

    `forward` fails in forwards that are split into rows, in their third layer, `second forward` in
    those of them that are a second pass; `scores` and `picks` decide what that computes.
    """
    cache = scheduler.tree_cache
    runner = scheduler.tp_worker.model_runner
    holder, name = {
        "match": (ContentTree, "candidates"),
        "plan": (planning, "make_plan"),
        "lock": (cache, "donor_slots"),
        "copy": (cache.corrector, "move"),
        "forward": (runner.model.model.layers[2], "forward"),
        "scores": (cache.repair_rule, "_score"),
        "picks": (second_pass, "choose_rows"),
        "second forward": (runner.model.model.layers[2], "forward"),
    }[stage]
    original = getattr(holder, name)
    split_rows = second_pass.split_rows

    def split_for_second_pass(*args: Any, **kwargs: Any) -> Any:
        _second_passes.append(split_rows(*args, **kwargs))
        return _second_passes[-1]

    def faulty(*args: Any, **kwargs: Any) -> Any:
        # Any other forward is SGLang's own, and its faults end the server.
        running = rows._current.get()
        others = stage.endswith("forward") and running is None
        if stage == "second forward":
            others = not any(running is batch for batch in _second_passes)
        if len(_raised) >= times or others:
            return original(*args, **kwargs)
        _raised.append(stage)
        if stage == "copy":
            # Half a copy: nothing of it may be read later.
            source, target, delta = (part[: len(part) // 2] for part in args)
            original(source, target, delta)
        raise InjectedError(stage)

    _raised.clear()
    _logged.clear()
    recorder = _Recorder()
    logger.addHandler(recorder)
    _restore.append(lambda: logger.removeHandler(recorder))
    _replace(second_pass, "split_rows", split_for_second_pass)
    _replace(holder, name, faulty)


def disarm(scheduler: Any) -> dict[str, Any]:
    """End what `arm` began; how often it raised, what was counted, and what was logged."""
    while _restore:
        _restore.pop()()
    _second_passes.clear()
    counts = scheduler.tree_cache.fallbacks.counts
    found = {
        "raised": len(_raised),
        "fallbacks": dict(counts),
        "tracebacks": sum(record.exc_info is not None for record in _logged),
    }
    counts.clear()
    return found
