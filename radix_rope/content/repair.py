"""Which repair a plan gets: the one that was asked for, or `head` where a second pass is no use.

Owns the rule by which a second pass is worth its cost. May not know how tokens are scored or
computed again: a server and `radix-rope explain` decide alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from radix_rope.content.plan import PlanOptions, ReusePlan

# A question longer than this would cost about what the repair saves.
MAX_LAST_GAP_TOKENS = 256


def plan_repair(
    make: Callable[[PlanOptions], ReusePlan | None],
    options: PlanOptions,
    second_pass: bool,
) -> ReusePlan | None:
    """Plan a request with the repair it asks for, or with `head` where a second pass is no use.

    Args:
        make: plans the request with given options.
        options: what was asked for.
        second_pass: whether this forward can have one: the model allows it, and it is the
            request's last (a chunk before holds no question).
    """
    if options.repair == "attention":
        plan = make(options) if second_pass else None
        if plan is not None and _is_worth_it(plan):
            return plan
        options = dataclasses.replace(options, repair="head")
    return make(options)


def _is_worth_it(plan: ReusePlan) -> bool:
    return (
        len(plan.runs) > 0
        and len(plan.rows[-1]) <= MAX_LAST_GAP_TOKENS
        and plan.computed_tokens <= plan.reused_tokens
    )
