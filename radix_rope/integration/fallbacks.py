"""What happens when radix_rope itself fails: SGLang goes on as if there were nothing to reuse.

Counts such failures by stage and logs them, more and more rarely. Knows neither plans nor batches;
the hooks catch, undo and go on.
"""

from __future__ import annotations

import logging
from collections import Counter

logger = logging.getLogger(__name__)

STAGES = ("plan", "copy", "forward")


def is_worth_a_line(count: int) -> bool:
    """Whether to log a failure, the 1st, 2nd, 4th, 8th, ...: many must not fill the disk."""
    return count & (count - 1) == 0


class Fallbacks:
    """Decides whether a failure may be survived, and remembers it.

    Args:
        ranks: schedulers that must form the same batches. With more than one, only failures
            that all of them meet alike are survived: a rank that computed a batch whole beside
            others that do not would wait for them forever, or mix up their sums.
        strict: let failed assertions through (`check_plans`), so that tests see them.
    """

    def __init__(self, ranks: int = 1, strict: bool = False) -> None:
        self.ranks = ranks
        self.strict = strict
        self.counts: Counter[str] = Counter()

    def survive(self, stage: str, error: Exception) -> None:
        """Count and log a failure, or raise it again where falling back would be wrong.

        Args:
            stage: one of `STAGES`.
            error: what was caught.

        Raises:
            Exception: `error` itself.
        """
        if self.strict and isinstance(error, AssertionError):
            raise error
        # Plans are a pure function of tree and request: a fault in one is met by every rank.
        alike = stage == "plan" and not isinstance(error, MemoryError)
        if self.ranks > 1 and not alike:
            raise error
        self.counts[stage] += 1
        count = self.counts[stage]
        if is_worth_a_line(count):
            logger.error(
                "radix_rope: %s failed (%d so far); SGLang goes on without it, and reuses less.",
                stage,
                count,
                exc_info=error,
            )
