"""The grid: head and rotary dimension, layout, dtype, distance and slot pattern, all combined.

The product is complete for a single kernel: one move carries every distance (each token has
its own), so a case is one (head dimension, rotary dimension, layout, dtype, slot pattern).
That all kernels write the same bits is shown in `test_move`, on a selection.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from radix_rope.rotary.spec import RopeSpec, angle_table
from tests.rotary import support

HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)
LIMIT = 131072
DELTAS = (0, 1, -1, 17, -17, 4096, -4096, LIMIT - 1, 1 - LIMIT)
PATTERNS = ("contiguous", "scattered", "pages")
TOKENS = 2 * len(DELTAS)


@pytest.mark.parametrize("dtype", support.DTYPES, ids=lambda d: str(d).split(".")[1])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_combination_stays_within_its_bound(head_dim: int, dtype: torch.dtype) -> None:
    delta = torch.tensor(DELTAS * 2)
    for share, neox, pattern in itertools.product((1, 2, 4), (True, False), PATTERNS):
        rotary_dim = head_dim // share
        offset = 0 if share < 4 else head_dim - rotary_dim
        spec = support.spec_of(head_dim, rotary_dim, offset, neox, base=5e5)
        pool = support.make_pool([spec, spec], dtype, slots=64, heads=2, v_dim=8)
        src, dst = support.slot_pattern(pattern, TOKENS, 64, 4)
        support.build(pool.view, "cpu").move(src, dst, delta)
        for layer in range(2):
            source = support.rows(pool.k_before[layer], src)
            result = support.rows(pool.view.k[layer], dst)
            support.assert_within_bound(result, source, delta, spec)
            # A wrong sign, layout or frequency would not pass for a rounding.
            turned = delta != 0
            assert not support.same_bits(result[turned], source[turned])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("kernel", support.KERNELS)
def test_fp8_saturates_instead_of_overflowing(dtype: torch.dtype, kernel: str) -> None:
    """Two elements at the largest value rotate to 1.41 times it: they must stop there."""
    largest = torch.finfo(dtype).max
    spec = RopeSpec(2, 2, inv_freq=(torch.pi / 4,), name="eighth turn")
    pool = support.make_pool([spec], dtype, slots=8, heads=1)
    pool.view.k[0][0] = torch.tensor([[largest, -largest]]).to(dtype)
    support.build(pool.view, kernel).move(torch.tensor([0]), torch.tensor([1]), torch.tensor([1]))
    assert pool.view.k[0][1].float().tolist() == [[largest, 0.0]]


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All finite values of a dtype of one byte, else all that float16 can express."""
    if dtype.itemsize == 1:
        values = torch.arange(256, dtype=torch.uint8).view(dtype)
    else:
        halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
        values = halves[halves.isfinite()].float().to(dtype)
    return values[values.float().isfinite()]


@pytest.mark.parametrize("dtype", support.DTYPES, ids=lambda d: str(d).split(".")[1])
@pytest.mark.parametrize("kernel", ["cpu", "triton"])
def test_rounding_is_to_nearest_even_for_every_value(dtype: torch.dtype, kernel: str) -> None:
    """Every value times 31 cosines and sines, rounded as torch's own conversion rounds.

    A pair ``(x, 0)`` becomes ``(x cos, x sin)``, so each result is one float32 product and one
    rounding, subnormals included.
    """
    values = every_value(dtype)
    if kernel == "triton" and len(values) > 256:
        values = values[::97]
    turns = torch.arange(1, 32)
    stored, delta = values.repeat(31), turns.repeat_interleave(len(values))
    spec = RopeSpec(2, 2, inv_freq=(0.7227342478134157,), name="pair")
    count = len(stored)
    pool = support.make_pool([spec], dtype, slots=2 * count + count % 2 * 2, heads=1, v_dim=0)
    pool.view.k[0][:count, 0, 0] = stored
    pool.view.k[0][:count, 0, 1] = torch.zeros(count).to(dtype)
    slots = torch.arange(count)
    support.build(pool.view, kernel).move(slots, slots + count, delta)
    result = pool.view.k[0][count : 2 * count, 0]
    limit = torch.finfo(dtype).max
    for column, table in enumerate(angle_table(spec.inv_freq, delta.numpy())):
        product = stored.float() * torch.from_numpy(table)[:, 0]
        expected = product.clamp(-limit, limit).to(dtype)
        assert torch.equal(result[:, column].float(), expected.float())
