"""Workloads made for tests, and an independent look at them."""

from collections.abc import Callable

import numpy as np

from bench.serving.fit import Fitted, Size, fit
from bench.serving.workloads import WORKLOADS
from bench.serving.writer import Tokens, Vocabulary, Writer
from radix_rope.config import RadixRopeConfig
from radix_rope.content import ContentTree, PlanOptions, ReusePlan, make_plan

Encode = Callable[[str], list[int]]
CONFIG = RadixRopeConfig()
SIZES = {
    "1k": Size(1024, 90, pieces=3),
    "4k": Size(4096, 95, pieces=4),
}


def make(
    key: str, encode: Encode, size: Size, requests: int = 2, seed: int = 1, *, sequential: bool
) -> tuple[Fitted, Writer]:
    """One workload at one size."""
    writer = Writer(Vocabulary(range(100, 40_000), encode), seed)
    made = fit(WORKLOADS[key], writer, size, requests, CONFIG, sequential=sequential)
    return made, writer


def common_prefix(one: Tokens, other: Tokens) -> int:
    """How many first tokens are equal."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))


def plan_alone(made: Fitted, request: Tokens) -> tuple[int, ReusePlan | None]:
    """Exact prefix and plan of a request when only the donors are in the cache."""
    tree = ContentTree(stride=CONFIG.stride)
    for donor in made.episode.donors:
        # Donors with a common beginning would be split in a real tree; the plan is the same.
        tree.insert(None, np.asarray(donor), namespace=None)
    prefix = max(common_prefix(request, donor) for donor in made.episode.donors)
    options = PlanOptions(
        min_run_tokens=CONFIG.min_run_tokens, recompute_tokens=CONFIG.recompute_tokens
    )
    tokens = np.asarray(request)
    return prefix, make_plan(tree, tokens, prefix, len(request), None, options)
