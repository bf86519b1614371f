"""Same tree, same request: same plan, in processes with different hash seeds."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np

from radix_rope.content import Provenance, ReusePlan, make_plan
from tests.content.twin import SOURCES, Twin


def describe(plan: ReusePlan | None) -> object:
    """A plan without object identities: owners are numbers."""
    if plan is None:
        return None
    runs = []
    for run in plan.runs:
        pieces = [(p.segment.owner, p.offset, p.length) for p in run.pieces]
        runs.append((run.begin, run.end, run.donor_begin, run.left_context_tokens, pieces))
    return runs, [(r.begin, r.end) for r in plan.rows]


def digest(seed: int = 3) -> str:
    """Plans of many requests on a tree with a past, hashed."""
    random = np.random.default_rng(seed)
    # Names whose hashes depend on PYTHONHASHSEED.
    namespaces = ["tenant-a", ("lora", "salt"), "tenant-b"]
    twin = Twin(8, 1, 4)
    plans = []
    reused_tokens = 0

    def piece() -> list[int]:
        source = SOURCES[int(random.integers(0, len(SOURCES)))]
        start, size = int(random.integers(0, 300)), int(random.integers(20, 150))
        return source[start : start + size]

    for step in range(150):
        tokens = [token for _ in range(random.integers(1, 5)) for token in piece()]
        namespace = namespaces[int(random.integers(0, 3))]
        if step % 3 == 2 and twin.nodes:
            leaves = twin.leaves()
            twin.tree.touch(twin.segments[leaves[int(random.integers(0, len(leaves)))]])
        if step % 7 == 6:
            twin.remove(twin.leaves()[0])
        plan = make_plan(twin.tree, np.array(tokens), 0, len(tokens), namespace)
        reused_tokens += plan.reused_tokens if plan else 0
        plans.append(describe(plan))
        exact = bool(random.integers(0, 2))
        twin.insert_path(tokens, namespace, Provenance(exact, not exact, int(not exact)))
    assert reused_tokens > 1000, "the test plans nothing"
    return hashlib.sha256(repr(plans).encode()).hexdigest()


def test_same_plans_under_other_hash_seeds() -> None:
    seeds = ["0", "1", "4242"]
    code = "from tests.content.test_determinism import digest; print(digest())"
    answers = set()
    for seed in seeds:
        env = {**os.environ, "PYTHONHASHSEED": seed}
        result = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        answers.add(result.stdout.strip())
    assert answers == {digest()}


def test_digest_tells_plans_apart() -> None:
    assert digest(3) != digest(4)


def test_splits_change_no_decision() -> None:
    random = np.random.default_rng(8)
    whole, cut = Twin(8, 1), Twin(8, 1)
    for number, size in ((0, 500), (0, 400), (2, 300), (5, 200), (1, 500)):
        tokens = [number, *SOURCES[number][:size]]
        for twin in (whole, cut):
            twin.insert_path(tokens, None, Provenance())
        for _ in range(4):
            node = sorted(cut.nodes)[int(random.integers(0, len(cut.nodes)))]
            if len(cut.nodes[node].tokens) > 1:
                cut.split(node, int(random.integers(1, len(cut.nodes[node].tokens))))
        request = np.array(SOURCES[0][50:300] + SOURCES[5][3:90] + SOURCES[2][9:200] + [1])
        plans = [make_plan(t.tree, request, 0, len(request), None) for t in (whole, cut)]
        assert plans[0] is not None and plans[1] is not None
        assert plans[0].rows == plans[1].rows
        a, b = (
            [(r.begin, r.end, r.donor_begin, r.left_context_tokens) for r in plan.runs]
            for plan in plans
        )
        assert a == b


def test_asking_changes_nothing() -> None:
    twin = Twin(8, 1)
    twin.insert_path(SOURCES[0], None, Provenance())
    request = np.array(SOURCES[1][:50] + SOURCES[0][100:400])
    answers = [describe(make_plan(twin.tree, request, 0, len(request), None)) for _ in range(3)]
    assert answers[0] is not None and answers == [answers[0]] * 3
