"""Moving copies of copies costs more with every generation; moving the original does not."""

from __future__ import annotations

import pytest
import torch

from radix_rope.rotary.roundings import error_after
from tests.rotary import support


@pytest.mark.parametrize("dtype", support.DTYPES, ids=lambda d: str(d).split(".")[1])
def test_only_the_copys_error_grows(dtype: torch.dtype) -> None:
    original = [error_after(dtype, count, copies=False).rms for count in (1, 2, 4, 8)]
    copies = [error_after(dtype, count, copies=True).rms for count in (1, 2, 4, 8)]
    assert original[0] == copies[0]
    # One rounding, whatever the distance: the four differ by chance only.
    assert max(original) < 1.1 * min(original)
    # Independent roundings add up as the root of their number: 1.41, 2, 2.83.
    for error, count in zip(copies, (1, 2, 4, 8), strict=True):
        assert error / copies[0] == pytest.approx(count**0.5, rel=0.15)


@pytest.mark.parametrize("kernel", ["cpu", "torch"])
def test_the_measurement_does_not_depend_on_the_kernel(kernel: str) -> None:
    one = error_after(torch.bfloat16, 2, copies=True, kernel=kernel)
    assert one == error_after(torch.bfloat16, 2, copies=True)
