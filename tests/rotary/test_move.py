"""What a move leaves in a pool: against the naive twin, on every kernel, in every layout."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_rope.rotary.corrector import (
    AVAILABLE_KERNELS,
    KernelUnavailable,
    available_kernels,
    make_corrector,
)
from radix_rope.rotary.request import SlotOverlap
from radix_rope.rotary.spec import RopeSpec
from tests.rotary import support

SPECS = [
    support.spec_of(16, 16),
    support.spec_of(16, 8, offset=4, neox=False),
    RopeSpec(16, 0, name="none"),
    support.spec_of(16, 16, base=1e6),
]


def moves(slots: int) -> st.SearchStrategy[tuple[list[int], list[int], list[int]]]:
    """Distinct destinations, any sources outside them, any distances."""

    def finish(
        order: list[int], count: int, picks: list[int], deltas: list[int]
    ) -> tuple[list[int], list[int], list[int]]:
        dst, rest = order[:count], order[count:]
        src = [rest[pick % len(rest)] for pick in picks[:count]]
        return src, dst, deltas[:count]

    return st.builds(
        finish,
        st.permutations(list(range(slots))),
        st.integers(0, slots // 2),
        st.lists(st.integers(0, slots), min_size=slots, max_size=slots),
        st.lists(
            st.sampled_from([0, 0, 1, -1, 17, -17, 4096, -4096, 131071]),
            min_size=slots,
            max_size=slots,
        ),
    )


@settings(max_examples=40, deadline=None)
@given(moves(24), st.sampled_from(support.DTYPES), st.sampled_from(["nhd", "hnd", "major"]))
def test_cpu_kernel_equals_the_naive_twin_in_any_slot_pattern(
    move: tuple[list[int], list[int], list[int]], dtype: torch.dtype, layout: str
) -> None:
    src, dst, delta = (torch.tensor(part, dtype=torch.int64) for part in move)
    pool = support.make_pool(SPECS, dtype, slots=24, layout=layout)
    support.build(pool.view, "cpu").move(src, dst, delta)
    untouched = torch.ones(24, dtype=torch.bool)
    untouched[dst] = False
    for layer, spec in enumerate(SPECS):
        before, after = pool.k_before[layer], support.flat(pool.view.k[layer])
        assert support.same_bits(after[untouched].clone(), before[untouched].clone())
        twin = support.naive_move(before.clone(), src, dst, delta, spec)
        # The twin rounds once from float64; float32 arithmetic may fall to the other side of
        # a rounding boundary, so the keys agree to the bound and the rest to the bit.
        support.assert_within_bound(
            support.rows(after, dst), support.rows(before, src), delta, spec
        )
        still = delta == 0
        assert support.same_bits(support.rows(after, dst[still]), support.rows(twin, dst[still]))
        assert support.same_bits(
            support.rows(pool.view.v[layer], dst), support.rows(pool.v_before[layer], src)
        )


@pytest.mark.parametrize("dtype", support.DTYPES)
@pytest.mark.parametrize("layout", ["nhd", "hnd", "major"])
@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_kernels_write_the_same_bits(dtype: torch.dtype, layout: str, kernel: str) -> None:
    if kernel not in AVAILABLE_KERNELS:
        pytest.skip(f"{kernel} is not installed")
    src, dst = support.slot_pattern("scattered", 40, 96, 4)
    delta = torch.arange(-20, 20) * 101
    pools = []
    for name in ("cpu", kernel):
        pool = support.make_pool(SPECS, dtype, layout=layout, v_dim=12)
        support.build(pool.view, name).move(src, dst, delta)
        pools.append(pool)
    for a, b in zip(pools[0].view.k, pools[1].view.k, strict=True):
        assert support.same_bits(support.flat(a), support.flat(b))
    for a, b in zip(pools[0].view.v, pools[1].view.v, strict=True):
        assert support.same_bits(support.flat(a), support.flat(b))


@pytest.mark.parametrize("kernel", support.KERNELS)
def test_mla_rows_move_only_their_rope_part(kernel: str) -> None:
    spec = support.spec_of(80, 16, offset=64, neox=False)
    pool = support.make_pool([spec, spec], torch.bfloat16, heads=1, v_dim=0)
    src, dst = support.slot_pattern("scattered", 30, 96, 4)
    delta = torch.full((30,), -777)
    support.build(pool.view, kernel).move(src, dst, delta)
    for before, after in zip(pool.k_before, pool.view.k, strict=True):
        source = support.rows(before, src)
        result = support.rows(after, dst)
        assert support.same_bits(result[..., :64].contiguous(), source[..., :64].contiguous())
        support.assert_within_bound(result, source, delta, spec)
        assert not support.same_bits(result, source)


@pytest.mark.parametrize("kernel", support.KERNELS)
def test_rotate_off_copies_keys_unrotated(kernel: str) -> None:
    pool = support.make_pool(SPECS, torch.float32)
    src, dst = support.slot_pattern("scattered", 10, 96, 4)
    support.build(pool.view, kernel, rotate=False).move(src, dst, torch.full((10,), 99))
    for before, after in zip(pool.k_before, pool.view.k, strict=True):
        assert support.same_bits(support.rows(after, dst), support.rows(before, src))


@pytest.mark.parametrize("kernel", support.KERNELS)
def test_a_token_gets_the_same_bits_whatever_else_is_moved(kernel: str) -> None:
    """Neither the rest of the batch nor its order nor the threads change a token's bits."""
    src, dst = support.slot_pattern("scattered", 40, 96, 4)
    delta = torch.randint(-5000, 5000, (40,), generator=torch.Generator().manual_seed(3))
    threads = torch.get_num_threads()
    results = []
    try:
        for order, count in (
            ([list(range(40))], 1),
            ([list(range(39, -1, -1))], 2),
            ([[i] for i in range(40)], 5),
        ):
            torch.set_num_threads(count)
            pool = support.make_pool(SPECS, torch.bfloat16)
            corrector = support.build(pool.view, kernel)
            for part in order:
                corrector.move(src[part], dst[part], delta[part])
            results.append(pool.view.k)
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert support.same_bits(a, b)


def test_many_pieces_on_many_threads_cover_every_token() -> None:
    """Big enough that the CPU kernel divides the work among its threads."""
    specs = [support.spec_of(64, 64)] * 3
    pool = support.make_pool(specs, torch.float32, slots=4096, heads=4)
    src, dst = support.slot_pattern("scattered", 2000, 4096, 4)
    delta = torch.arange(2000) % 7 * 13
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        support.build(pool.view, "cpu").move(src, dst, delta)
    finally:
        torch.set_num_threads(threads)
    for layer, spec in enumerate(specs):
        source = support.rows(pool.k_before[layer], src)
        support.assert_within_bound(support.rows(pool.view.k[layer], dst), source, delta, spec)
        assert support.same_bits(
            support.rows(pool.view.v[layer], dst), support.rows(pool.v_before[layer], src)
        )


def test_two_threads_may_move_at_once() -> None:
    specs = [support.spec_of(64, 64)] * 2
    pool = support.make_pool(specs, torch.float32, slots=2048, heads=4)
    corrector = support.build(pool.view, "cpu")
    src, dst = support.slot_pattern("contiguous", 1000, 2048, 4)
    delta = torch.arange(1000) % 5
    parts = [slice(0, 500), slice(500, 1000)]
    failures: list[BaseException] = []

    def work(part: slice) -> None:
        try:
            for _ in range(20):
                corrector.move(src[part], dst[part], delta[part])
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(part,)) for part in parts]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    source = support.rows(pool.k_before[0], src)
    support.assert_within_bound(support.rows(pool.view.k[0], dst), source, delta, specs[0])


def _move_in_child(queue: multiprocessing.Queue[bool]) -> None:
    torch.set_num_threads(4)
    spec = support.spec_of(64, 64)
    pool = support.make_pool([spec] * 2, torch.float32, slots=2048, heads=4)
    src, dst = support.slot_pattern("contiguous", 1000, 2048, 4)
    delta = torch.full((1000,), 5)
    support.build(pool.view, "cpu").move(src, dst, delta)
    source = support.rows(pool.k_before[0], src)
    support.assert_within_bound(support.rows(pool.view.k[0], dst), source, delta, spec)
    queue.put(True)


def test_a_forked_child_moves_with_threads_of_its_own() -> None:
    """The parent's helper threads exist already; a fork does not inherit them.

    In an interpreter of its own whose torch has one OpenMP thread: more of them,
    started before the fork, would hang torch itself in the child.
    """
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = "from tests.rotary.test_move import fork_and_move; fork_and_move()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, env=one_thread
    )
    assert done.returncode == 0, done.stderr


def fork_and_move() -> None:
    """Move here, then in a forked child; raises when the child fails or hangs."""
    pool = support.make_pool([support.spec_of(64, 64)] * 2, torch.float32, slots=2048, heads=4)
    src, dst = support.slot_pattern("contiguous", 1000, 2048, 4)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        support.build(pool.view, "cpu").move(src, dst, torch.full((1000,), 5))
    finally:
        torch.set_num_threads(threads)
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[bool] = context.Queue()
    child = context.Process(target=_move_in_child, args=(queue,))
    child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
        raise RuntimeError("the forked child hung")
    assert child.exitcode == 0 and queue.get(timeout=5)


@pytest.mark.parametrize("kernel", support.KERNELS)
class TestRefusals:
    def check(self, kernel: str, src: list[int], dst: list[int], delta: list[int]) -> None:
        pool = support.make_pool(SPECS[:1], torch.float32)
        corrector = support.build(pool.view, kernel)
        try:
            corrector.move(torch.tensor(src), torch.tensor(dst), torch.tensor(delta))
        finally:
            # Nothing was written.
            assert support.same_bits(support.flat(pool.view.k[0]), pool.k_before[0])
            assert support.same_bits(support.flat(pool.view.v[0]), pool.v_before[0])
            # And the next move is not disturbed by the refused one.
            corrector.move(torch.tensor([1]), torch.tensor([2]), torch.tensor([1]))

    def test_overlap(self, kernel: str) -> None:
        with pytest.raises(SlotOverlap, match="one is 5"):
            self.check(kernel, [3, 5], [5, 7], [1, 1])

    def test_repeated_destination(self, kernel: str) -> None:
        with pytest.raises(SlotOverlap, match="twice"):
            self.check(kernel, [3, 4], [7, 7], [1, 1])

    def test_slot_outside_the_pool(self, kernel: str) -> None:
        with pytest.raises(ValueError, match=r"\[0, 96\).*-1 to 96"):
            self.check(kernel, [3, -1], [7, 96], [1, 1])

    def test_lengths_differ(self, kernel: str) -> None:
        with pytest.raises(ValueError, match="one entry per token"):
            self.check(kernel, [3, 4], [7, 8], [1])

    def test_wrong_dtype(self, kernel: str) -> None:
        pool = support.make_pool(SPECS[:1], torch.float32)
        slots = torch.tensor([1], dtype=torch.int32)
        with pytest.raises(ValueError, match="src must be a one-dimensional int64"):
            support.build(pool.view, kernel).move(slots, slots.long() + 1, slots.long())

    def test_no_tokens_is_no_work(self, kernel: str) -> None:
        pool = support.make_pool(SPECS[:1], torch.float32)
        none = torch.zeros(0, dtype=torch.int64)
        support.build(pool.view, kernel).move(none, none, none)
        assert support.same_bits(support.flat(pool.view.k[0]), pool.k_before[0])


class TestChoice:
    def test_auto_is_the_compiled_kernel_on_a_cpu(self) -> None:
        pool = support.make_pool(SPECS[:1], torch.float32)
        assert make_corrector(pool.view).name == available_kernels("cpu")[0] == "cpu"

    def test_unknown_kernel_lists_those_that_exist(self) -> None:
        pool = support.make_pool(SPECS[:1], torch.float32)
        with pytest.raises(KernelUnavailable, match=r"'magic'.*cpu, triton, flashinfer, torch"):
            make_corrector(pool.view, "magic")

    def test_unavailable_kernel_says_why_and_what_works(self) -> None:
        pool = support.make_pool(SPECS[:1], torch.float32)
        with pytest.raises(KernelUnavailable, match="NVIDIA GPU; usable on cpu: cpu, torch"):
            make_corrector(pool.view, "flashinfer")
        with pytest.raises(KernelUnavailable, match="interpreter; usable on cpu: cpu, torch"):
            make_corrector(pool.view, "triton")

    def test_a_kernel_that_does_not_build_falls_through(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from radix_rope.rotary import corrector

        def broken(view: object, rotate: bool) -> object:
            raise RuntimeError("no compiler")

        original = corrector._KERNELS["cpu"]
        monkeypatch.setitem(corrector._KERNELS, "cpu", (broken, original[1]))
        pool = support.make_pool(SPECS[:1], torch.float32)
        assert make_corrector(pool.view).name == "torch"
        with pytest.raises(RuntimeError, match="no compiler"):
            make_corrector(pool.view, "cpu")
