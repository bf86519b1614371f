"""The CPU platform's linear layers against float64."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from radix_rope.integration.cpu import linear as module
from radix_rope.integration.cpu.linear import linear, padded_rows, register, takes


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 51, 129, 600])
@pytest.mark.parametrize(("inside", "outside"), [(576, 960), (1536, 576), (7, 5)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_equal_the_reference(
    rows: int, inside: int, outside: int, with_bias: bool
) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inside), torch.randn(outside, inside)
    bias = torch.randn(outside) if with_bias else None
    assert takes(x, weight, bias)
    out = linear(x, weight, bias)
    assert out.shape == (rows, outside) and out.dtype is torch.float32
    torch.testing.assert_close(out.double(), reference(x, weight, bias), rtol=1e-5, atol=5e-4)


def test_shapes_and_strides_of_the_input() -> None:
    torch.manual_seed(0)
    weight = torch.randn(24, 32)
    for x in (
        torch.randn(32),
        torch.randn(3, 5, 32),
        torch.randn(9, 96).split(32, dim=1)[1],
        torch.randn(32, 9).T,
        torch.randn(1, 32).expand(6, 32),
    ):
        out = linear(x, weight)
        assert out.shape == (*x.shape[:-1], 24)
        torch.testing.assert_close(out.double(), reference(x, weight, None), rtol=1e-5, atol=5e-4)


def test_weights_written_in_place_are_seen() -> None:
    """Nothing is kept of weights: a write through `.data`, as SGLang makes it, counts."""
    x, weight = torch.randn(4, 32), torch.nn.Parameter(torch.randn(8, 32), requires_grad=False)
    before = linear(x, weight)
    weight.data.copy_(torch.randn(8, 32))
    after = linear(x, weight)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after.double(), reference(x, weight, None), rtol=1e-5, atol=5e-4)


def test_what_is_left_to_sglang() -> None:
    x, weight = torch.randn(4, 32), torch.randn(8, 32)
    assert takes(x, weight, None)
    assert not takes(x.bfloat16(), weight.bfloat16(), None)
    assert not takes(x, weight, torch.randn(8).bfloat16())
    assert not takes(x[:0], weight, None)
    assert not takes(x, torch.randn(32, 8).T, None)
    assert not takes(x.to("meta"), weight.to("meta"), None)
    assert not takes(x, torch.nn.Parameter(weight), None)
    with torch.no_grad():
        assert takes(x, torch.nn.Parameter(weight), None)


def test_few_sizes_are_computed_and_little_is_added() -> None:
    sizes = {padded_rows(rows) for rows in range(1, 8193)}
    assert len(sizes) < 80
    for rows in range(1, 8193):
        assert 0 <= padded_rows(rows) - rows <= max(3, rows / 8)
    assert all(padded_rows(1 << power) == 1 << power for power in range(1, 14))


def test_layers_of_sglang_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    register()
    calls = []

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        calls.append(len(x))
        return linear(x, weight, bias)

    monkeypatch.setattr(module, "linear", counted)
    layer = SimpleNamespace(weight=torch.nn.Parameter(torch.randn(8, 32), requires_grad=False))
    x, bias = torch.randn(3, 32), torch.randn(8)
    out = UnquantizedLinearMethod().apply(layer, x, bias)
    torch.testing.assert_close(out.double(), reference(x, layer.weight, bias), rtol=1e-5, atol=5e-4)
    half = SimpleNamespace(weight=layer.weight.bfloat16())
    assert UnquantizedLinearMethod().apply(half, x.bfloat16(), None).dtype is torch.bfloat16
    assert calls == [3]
