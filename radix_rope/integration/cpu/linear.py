"""Float32 linear layers through oneDNN.

torch hands float32 products to MKL, which copies the weights into its own order on every call, the
dearer the fewer rows there are, and makes no use of AVX-512 on AMD's processors. On a recent one
oneDNN takes half the time; on another one it was faster for few rows and equal for many. Knows
nothing of the cache or of plans.
"""

from typing import Any

import torch
from torch.nn.functional import pad

from radix_rope.integration import seams


def takes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether `linear` can compute this: dense float32 on the CPU, and no gradient wanted."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    return (
        x.numel() > 0
        and weight.is_contiguous()
        and all(type(t.data) is torch.Tensor and t.layout is torch.strided for t in tensors)
        and all(t.dtype is torch.float32 and t.device.type == "cpu" for t in tensors)
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias` of what `takes` accepts.

    x: [..., in]; weight: [out, in]; bias: [out] or None. Returns [..., out].
    """
    flat = x.reshape(-1, x.shape[-1])
    rows = len(flat)
    padded = padded_rows(rows)
    if padded > rows:
        flat = pad(flat, (0, 0, 0, padded - rows))
    out = torch.ops.mkldnn._linear_pointwise(flat, weight, bias, "none", [], "")
    return out[:rows].reshape(*x.shape[:-1], len(weight))  # type: ignore[no-any-return]


def padded_rows(rows: int) -> int:
    """How many rows are computed for `rows`: at most 3 more, or an eighth.

    oneDNN compiles a kernel for every number of rows that it meets, which takes a millisecond and
    some hundred KiB each; eight sizes between two powers of two bound both.
    """
    step = max(4, (1 << rows.bit_length()) >> 4)
    # One row would be another kernel, which adds in another order than all others.
    return 2 if rows <= 2 else -(-rows // step) * step


def register() -> None:
    """Let SGLang's layers without quantization use it; safe to call more than once."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if has_onednn and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        seams.hook_now(seams.LINEAR, _apply)


def _apply(
    original: Any,
    method: Any,
    layer: Any,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    if takes(x, layer.weight, bias):
        return linear(x, layer.weight, bias)
    return original(method, layer, x, bias)  # type: ignore[no-any-return]
