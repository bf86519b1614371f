"""Random operations against the naive twin: nothing promised is missed, nothing wrong is found."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radix_rope.content import PlanOptions, Provenance, check_plan, fingerprint, make_plan, search
from radix_rope.content.fingerprint import Keys
from tests.content.twin import CACHED, Twin, text

Operation = tuple[Any, ...]
SPANS = st.integers(4, 24)
NAMESPACES = [None, "tenant", ("lora", "salt")]
PROVENANCES = [
    Provenance(),
    Provenance(exact=False, generations=1),
    Provenance(exact=False, copied=True, generations=1, roundings=1),
    Provenance(exact=False, copied=True, generations=3, roundings=2),
]

number = st.integers(0, 2**16)
piece = st.tuples(st.sampled_from([0, 0, 0, 1, 1, 2, 3, 4, 5]), st.integers(0, 8), SPANS)
pieces = st.lists(piece, min_size=1, max_size=4)
mixed = st.tuples(st.sampled_from([0, 1, 2, 7, CACHED, CACHED, CACHED]), st.integers(0, 20), SPANS)
questions = st.lists(mixed, min_size=1, max_size=4)
namespace = st.sampled_from([None, None, None, None, *NAMESPACES[1:]])
provenance = st.sampled_from([PROVENANCES[0], *PROVENANCES])
insert = st.tuples(st.just("insert"), pieces, namespace, provenance)
extend = st.tuples(st.just("extend"), pieces, number, provenance)
split = st.tuples(st.just("split"), number, number)
change = st.one_of(
    st.tuples(st.just("remove"), number),
    st.tuples(st.just("touch"), number),
    st.tuples(st.just("provenance"), number, provenance),
    st.tuples(st.just("reset"), number),
)
question = st.tuples(st.sampled_from(["match", "plan"]), questions, namespace, number, number)


@st.composite
def operation_sequences(draw: st.DrawFn) -> list[Operation]:
    """Fill the tree, then ask and change it in turns (hypothesis alone prefers short lists)."""
    ops: list[Operation] = [draw(insert), draw(extend), draw(insert), draw(split)]
    for _ in range(draw(st.integers(1, 4))):
        ops.append(draw(question))
        ops.append(draw(st.one_of(insert, extend, split, change)))
        ops.append(draw(st.one_of(insert, extend, split)))
    ops.append(draw(question))
    return ops


def pick(items: list[int], at: int) -> int:
    return items[at % len(items)]


def apply(twin: Twin, op: Operation, promise: bool = True) -> None:
    kind = op[0]
    if kind == "insert":
        twin.insert_path(text(twin, op[1]), op[2], op[3])
    elif kind == "match" or kind == "plan":
        tokens = text(twin, op[1])
        end = len(tokens) - op[4] % (len(tokens) // 4 + 1)
        begin = op[3] % (end // 2 + 1) if op[3] % 3 else 0
        space = op[2]
        if twin.nodes and op[4] % 8:
            space = twin.nodes[pick(sorted(twin.nodes), op[4])].namespace
        twin.check_candidates(tokens, space, begin, end, promise)
        if kind == "plan":
            check_random_plan(twin, tokens, space, begin, end, op[3] + op[4], promise)
    elif kind == "reset":
        if op[1] % 4 == 0:  # often would leave little to find
            twin.reset()
    elif twin.nodes:
        apply_to_node(twin, op)


def apply_to_node(twin: Twin, op: Operation) -> None:
    kind, nodes = op[0], sorted(twin.nodes)
    if kind == "extend":
        path, _ = twin._path(pick(twin.leaves(), op[2]))
        space = twin.nodes[pick(twin.leaves(), op[2])].namespace
        twin.insert_path([*path.tolist(), *text(twin, op[1])], space, op[3])
    elif kind == "split":
        node = pick(nodes, op[1])
        pages = len(twin.nodes[node].tokens) // twin.page_size
        if pages > 1:
            twin.split(node, twin.page_size * (1 + op[2] % (pages - 1)))
    elif kind == "remove":
        twin.remove(pick(twin.leaves(), op[1]))
    elif kind == "touch":
        before = twin.tree._clock
        segment = twin.segments[pick(nodes, op[1])]
        twin.tree.touch(segment)
        while segment is not None:
            assert segment.last_used > before
            segment = segment.parent
    elif kind == "provenance":
        segment = twin.segments[pick(nodes, op[1])]
        twin.tree.set_provenance(segment, op[2])
        assert segment.provenance == op[2]


def check_random_plan(
    twin: Twin, tokens: list[int], space: object, begin: int, end: int, seed: int, promise: bool
) -> None:
    options = PlanOptions(
        min_run_tokens=1 + seed % 9,
        recompute_tokens=(0, 1, 2, 3, 16)[seed % 5],
        repair=("head", "head", "none", "attention")[seed // 5 % 4],
        recompute_all=seed % 7 == 0,
        max_generations=(None, 0, 1, None)[seed % 4],
    )
    low = begin + seed % (end - begin + 1)
    must_compute = [(low, low + seed % 5)]
    array = np.array(tokens, dtype=np.int64)
    plan = make_plan(twin.tree, array, begin, end, space, options, must_compute)
    again = make_plan(twin.tree, array, begin, end, space, options, must_compute)
    assert plan == again
    if plan is not None:
        check_plan(plan, array)
        assert all(p.segment.namespace == space for run in plan.runs for p in run.pieces)
    if promise and not options.recompute_all:
        check_nothing_left(twin, tokens, space, begin, end, options, must_compute, plan)


def check_nothing_left(twin, tokens, space, begin, end, options, must_compute, plan):  # type: ignore[no-untyped-def]
    """No promised run of usable donors still fits, whole, between what the plan keeps."""
    taken = set(range(end - 1, end)) | {x for low, high in must_compute for x in range(low, high)}
    for run in plan.runs if plan else ():
        taken |= set(range(run.begin - run.head_tokens, run.end))
    limit = options.max_generations
    for run in twin.naive_runs(tokens, space, begin, end, 2 * twin.tree.stride - 1):
        length = 0
        for x in range(max(begin, run.begin), run.end):
            origin = twin.segments[run.node_at(x)].provenance
            usable = origin.exact or limit is None or origin.generations <= limit
            length = length + 1 if usable and x not in taken else 0
            first = x + 1 - length
            least = options.min_run_tokens
            if length:
                copied = twin.segments[run.node_at(first)].provenance.copied
                context = 0 if copied else min(512, first - run.begin)
                least += naive_head(options, context, first - run.begin + run.donor_begin)
            # Which of two siblings serves the last tokens before a page is full is left open.
            if length >= least and x < run.end - twin.page_size:
                raise AssertionError(f"{run} could still be reused up to {x}: {plan}")


def naive_head(options: PlanOptions, context: int, donor_begin: int) -> int:
    """The rule in words: recompute_tokens, less where the 256 tokens before match; the sink."""
    if options.repair == "head":
        share = Fraction(max(0, 256 - context), 256)
        head = math.ceil(options.recompute_tokens * share)
    else:
        head = 0
    return 1 if head == 0 and donor_begin == 0 else head


def run_sequence(ops: list[Operation], page_size: int, stride: int, promise: bool = True) -> None:
    twin = Twin(stride, page_size, 10**6 if promise else 2)
    for op in ops:
        apply(twin, op, promise)
        twin.check()


@pytest.fixture(autouse=True, scope="module")
def no_budget():  # type: ignore[no-untyped-def]
    """The promise is tested without the bound of work; test_bounds.py tests the bound."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "COMPARISONS_FIXED", 10**9)
        yield


relaxed = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


@settings(relaxed, max_examples=1500)
@given(operation_sequences(), st.sampled_from([1, 2, 3, 4, 7, 8]))
def test_page_size_1(ops, stride):  # type: ignore[no-untyped-def]
    run_sequence(ops, 1, stride)


@settings(relaxed, max_examples=400)
@given(operation_sequences(), st.sampled_from([2, 5, 8, 16, 20]))
def test_page_size_16(ops, stride):  # type: ignore[no-untyped-def]
    run_sequence(ops, 16, stride)


@settings(relaxed, max_examples=200)
@given(operation_sequences(), st.sampled_from([8, 16, 32, 48]))
def test_page_size_64(ops, stride):  # type: ignore[no-untyped-def]
    run_sequence(ops, 64, stride)


@settings(relaxed, max_examples=200)
@given(operation_sequences(), st.sampled_from([2, 4]))
def test_few_candidates_allowed_never_gives_a_wrong_run(ops, stride):  # type: ignore[no-untyped-def]
    run_sequence(ops, 1, stride, promise=False)


@settings(relaxed, max_examples=200)
@given(operation_sequences(), st.sampled_from([2, 4, 8]), st.sampled_from([0, 1, 7]))
def test_colliding_fingerprints_never_give_a_wrong_run(ops, stride, mask):  # type: ignore[no-untyped-def]
    finished = fingerprint._finished

    def colliding(sums: Keys, salt: int) -> Keys:
        return finished(sums, salt) & np.uint64(mask)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprint, "_finished", colliding)
        run_sequence(ops, 1, stride)
