"""The kernels on a GPU. Needs torch, pytest and Triton; FlashInfer is used if present."""

from __future__ import annotations

import pytest
import torch

from radix_rope.rotary.corrector import available_kernels, make_corrector
from radix_rope.rotary.flashinfer_kernel import DTYPES
from radix_rope.rotary.pool import KVPoolView
from tests.rotary import support


def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here: the Triton and FlashInfer kernels were not run")
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["triton", "flashinfer", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_moves_as_the_torch_path_does_on_the_cpu(kernel: str, dtype: str) -> None:
    device = gpu()
    if kernel not in available_kernels(device):
        pytest.skip(f"{kernel} is not installed here")
    kind = getattr(torch, dtype)
    if kernel == "flashinfer" and kind not in DTYPES:
        pytest.skip(f"FlashInfer's RoPE does not take {dtype}")
    specs = [
        support.spec_of(128, 128),
        support.spec_of(128, 64, neox=False),
        support.spec_of(128, 128, base=1e6),
    ]
    src, dst = support.slot_pattern("scattered", 400, 1024, 16)
    delta = torch.arange(400) % 9 * 1001 - 4000
    here = support.make_pool(specs, kind, slots=1024, heads=4)
    there = support.make_pool(specs, kind, slots=1024, heads=4)
    view = KVPoolView(
        [t.to(device) for t in there.view.k], [t.to(device) for t in there.view.v], specs
    )
    support.build(here.view, "torch").move(src, dst, delta)
    make_corrector(view, kernel).move(src.to(device), dst.to(device), delta)
    for layer, spec in enumerate(specs):
        result = view.k[layer].cpu()
        if kernel == "triton":
            assert support.same_bits(result, here.view.k[layer])
        source = support.rows(here.k_before[layer], src)
        support.assert_within_bound(support.rows(result, dst), source, delta, spec)
        assert support.same_bits(view.v[layer].cpu(), here.view.v[layer])
