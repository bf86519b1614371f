"""Our use of FlashInfer's operator, against a stand-in with the installed signature."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from radix_rope.rotary.flashinfer_kernel import FlashInferCorrector, unsupported
from radix_rope.rotary.pool import KVPoolView
from radix_rope.rotary.spec import RopeSpec
from tests.rotary import support

rope = pytest.importorskip("flashinfer.rope")


class StandIn:
    """Takes exactly what FlashInfer's operator takes, checks it as its CUDA side does.

    The checks are those of `csrc/rope.cu` and of the head sizes compiled for
    `BatchQKApplyRotaryPosIdsCosSinCache` in FlashInfer 0.7; the rotation is its documented
    meaning: row i of the table holds cosines, then sines.
    """

    def __init__(self) -> None:
        self.signature = inspect.signature(rope.apply_rope_with_cos_sin_cache_inplace)
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        positions, query, key = given["positions"], given["query"], given["key"]
        table, size = given["cos_sin_cache"], given["head_size"]
        assert table.dtype == torch.float32 and table.dim() == 2 and table.is_contiguous()
        assert positions.dtype in (torch.int32, torch.int64) and positions.is_contiguous()
        assert query.dtype == key.dtype and key.dtype in (torch.float16, torch.bfloat16)
        assert query.stride(-1) == key.stride(-1) == 1
        assert query.shape[0] == key.shape[0] == positions.shape[0]
        assert size in (64, 128, 256, 512) and table.shape[1] <= size
        assert int(positions.min()) >= 0 and int(positions.max()) < table.shape[0]
        half = table.shape[1] // 2
        assert half % (16 if size == 512 else 8) == 0
        heads = key.view(key.shape[0], -1, size)
        cos, sin = (part[:, None] for part in table[positions].split(half, dim=-1))
        if given["is_neox"]:
            first, second = slice(0, half), slice(half, 2 * half)
        else:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        a, b = heads[..., first].float(), heads[..., second].float()
        heads[..., first] = (a * cos - b * sin).to(key.dtype)
        heads[..., second] = (b * cos + a * sin).to(key.dtype)
        self.calls += 1


SPECS = [
    support.spec_of(128, 128),
    support.spec_of(128, 96, base=1e6),
    support.spec_of(128, 32, offset=64, neox=False),
    RopeSpec(128, 0, name="none"),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_calls_the_operator_as_it_is_declared(dtype: torch.dtype, layout: str) -> None:
    ours = support.make_pool(SPECS, dtype, layout=layout)
    stand_in = StandIn()
    corrector = FlashInferCorrector(ours.view, operator=stand_in)
    src, dst = support.slot_pattern("scattered", 30, 96, 4)
    delta = (torch.arange(30) - 15) * 333
    corrector.move(src, dst, delta)
    assert stand_in.calls == 3
    other = support.make_pool(SPECS, dtype, layout=layout)
    support.build(other.view, "torch").move(src, dst, delta)
    for a, b in zip((*ours.view.k, *ours.view.v), (*other.view.k, *other.view.v), strict=True):
        assert support.same_bits(support.flat(a), support.flat(b))


def test_says_what_the_operator_does_not_take() -> None:
    def view(dtype: torch.dtype, spec: RopeSpec) -> KVPoolView:
        return support.make_pool([spec], dtype).view

    assert unsupported(view(torch.bfloat16, SPECS[0])) is None
    assert "float32" in str(unsupported(view(torch.float32, SPECS[0])))
    odd = support.spec_of(80, 20)
    assert "rotary dimension 20" in str(unsupported(view(torch.bfloat16, odd)))
