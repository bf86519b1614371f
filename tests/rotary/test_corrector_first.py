import torch

from radix_rope.rotary.corrector import make_corrector
from radix_rope.rotary.pool import KVPoolView
from radix_rope.rotary.reference import rotate
from radix_rope.rotary.spec import RopeSpec, standard_inv_freq


def test_cpu_and_torch_kernels_write_the_same_bits_and_match_the_reference() -> None:
    spec = RopeSpec(64, 64, inv_freq=standard_inv_freq(64, 1e5))
    source = torch.randn(40, 3, 64)
    results = []
    for kernel in ("cpu", "torch"):
        k, v = source.clone(), source.clone()
        pool = KVPoolView([k], [v], [spec])
        src, dst = torch.arange(10), torch.arange(20, 30)
        make_corrector(pool, kernel).move(src, dst, torch.full((10,), 77))
        results.append(k)
        assert torch.equal(v[20:30], source[:10])
        assert (k[20:30] - rotate(source[:10], 77, spec)).abs().max() < 2e-6
    assert torch.equal(results[0], results[1])
