"""Pool views: what they accept, and how they say no."""

from __future__ import annotations

import pytest
import torch

from radix_rope.rotary.pool import KVPoolView, geometry, slot_count
from radix_rope.rotary.spec import UnsupportedRope
from tests.rotary import support

SPEC = support.spec_of(16, 16)


def buffers(
    count: int = 2, dtype: torch.dtype = torch.float32, dim: int = 16
) -> list[torch.Tensor]:
    return [torch.zeros(8, 2, dim, dtype=dtype) for _ in range(count)]


@pytest.mark.parametrize("layout", ["nhd", "hnd", "major"])
def test_geometry_addresses_every_element(layout: str) -> None:
    """The formula in `RowGeometry` against torch's own indexing."""
    pool = support.make_pool([SPEC, SPEC], torch.float32, slots=16, heads=3, layout=layout)
    for buffer in (*pool.view.k, *pool.view.v):
        where = geometry(buffer)
        storage = torch.as_strided(
            buffer, (buffer.untyped_storage().nbytes() // 4,), (1,), storage_offset=0
        )
        for slot in range(slot_count(buffer)):
            for head in range(3):
                start = (
                    buffer.storage_offset()
                    + slot // where.page_tokens * where.page_stride
                    + slot % where.page_tokens * where.token_stride
                    + head * where.head_stride
                )
                expected = support.flat(buffer)[slot, head]
                assert torch.equal(storage[start : start + where.head_dim], expected)


def test_counts_slots_and_bytes() -> None:
    view = support.make_pool([SPEC, SPEC], torch.bfloat16, slots=96, heads=2, v_dim=8).view
    assert (view.num_layers, view.num_slots, view.dtype) == (2, 96, torch.bfloat16)
    assert view.bytes_per_token == 2 * 2 * (16 + 8) * 2


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float64, torch.float8_e4m3fnuz])
def test_other_cache_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedRope, match=f"KV cache dtype {dtype}.*use one of float32"):
        KVPoolView(buffers(dtype=dtype), buffers(), [SPEC, SPEC])


def test_parts_must_fit_together() -> None:
    for make, text in (
        (lambda: KVPoolView([], [], []), "at least one layer"),
        (lambda: KVPoolView(buffers(), buffers(), [SPEC]), "2 key buffers need as many specs"),
        (lambda: KVPoolView(buffers(), buffers(1), [SPEC] * 2), "value buffers or none"),
        (lambda: KVPoolView(buffers(), [], [SPEC] * 2, [1.0]), "as many scales, got 1"),
        (lambda: KVPoolView(buffers(dim=8), [], [SPEC] * 2), "rows of 8 elements"),
        (
            lambda: KVPoolView([*buffers(1), torch.zeros(9, 2, 16)], [], [SPEC] * 2),
            "agree on slots",
        ),
        (
            lambda: KVPoolView([*buffers(1), *buffers(1, torch.float16)], [], [SPEC] * 2),
            "agree on slots, device and key dtype",
        ),
        (lambda: geometry(torch.zeros(4, 4)), "got shape"),
        (lambda: geometry(torch.zeros(4, 4, 4).transpose(1, 2)), "rows of a KV buffer must be"),
    ):
        with pytest.raises(ValueError, match=text):
            make()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_tensor_parallel_rank_moves_its_heads_as_the_whole_would(ranks: int) -> None:
    """Ranks hold some heads each; only shapes differ, and the bits of a head don't."""
    src, dst = support.slot_pattern("scattered", 20, 96, 4)
    delta = torch.arange(20) * 7
    whole = support.make_pool([SPEC], torch.bfloat16, heads=4)
    shards = []
    for rank in range(ranks):
        part = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
        k, v = (t[0][:, part].clone() for t in (whole.view.k, whole.view.v))
        support.build(KVPoolView([k], [v], [SPEC]), "cpu").move(src, dst, delta)
        shards.append(k)
    support.build(whole.view, "cpu").move(src, dst, delta)
    assert support.same_bits(torch.cat(shards, dim=1), whole.view.k[0])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("scale", [1.0, 0.25, 0.013])
def test_a_scale_cancels(dtype: torch.dtype, scale: float) -> None:
    """Dequantise, rotate, requantise and saturate equals rotating the stored values."""
    spec = support.spec_of(16, 16)
    pool = support.make_pool([spec], dtype, v_dim=0)
    view = KVPoolView(pool.view.k, [], [spec], [scale])
    src, dst = support.slot_pattern("scattered", 30, 96, 4)
    delta = torch.full((30,), 123)
    support.build(view, "cpu").move(src, dst, delta)
    stored = support.rows(pool.k_before[0], src).double()
    from radix_rope.rotary.dtypes import round_to
    from radix_rope.rotary.reference import rotate

    requantised = round_to(rotate(stored * scale, delta, spec) / scale, dtype)
    result = support.rows(view.k[0], dst)
    # Equal up to float32 arithmetic at a rounding boundary: one code at most, and rarely.
    apart = (support.bits(result).int() - support.bits(requantised).int()).abs()
    assert int(apart.max()) <= 1 and float((apart > 0).float().mean()) < 0.002
