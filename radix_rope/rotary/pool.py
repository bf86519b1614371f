"""A KV pool as the correction kernels see it: tensors, strides and one spec per layer.

Owns the addressing of slots in every supported layout. Knows no SGLang class; whoever has a
pool builds a `KVPoolView` of it. Nothing here copies a buffer: the view aliases the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from radix_rope.rotary.dtypes import cache_dtype
from radix_rope.rotary.spec import RopeSpec


@dataclass(frozen=True)
class RowGeometry:
    """Where the row of a slot lies in a buffer, in elements.

    ``offset(slot, head) = (slot // page_tokens) * page_stride
    + (slot % page_tokens) * token_stride + head * head_stride``, and the row's elements are
    contiguous from there.
    """

    page_tokens: int
    page_stride: int
    token_stride: int
    head_stride: int
    heads: int
    head_dim: int

    @property
    def packed(self) -> bool:
        """Whether all heads of a slot are one contiguous piece."""
        return self.heads == 1 or self.head_stride == self.head_dim


def geometry(buffer: torch.Tensor) -> RowGeometry:
    """Reads the geometry of one layer's buffer.

    Args:
        buffer: ``[slots, heads, dim]`` (NHD, or any strided view of that shape), or
            ``[pages, page_tokens, heads, dim]`` (paged layouts: an HND buffer
            ``[pages, heads, page_tokens, dim]`` with its middle dimensions swapped, or a
            page-major one). The last dimension is contiguous.

    Raises:
        ValueError: another rank, or rows that are not contiguous.
    """
    if buffer.dim() not in (3, 4):
        raise ValueError(
            "a KV buffer must be [slots, heads, dim] or [pages, page_tokens, heads, dim], "
            f"got shape {tuple(buffer.shape)}"
        )
    if buffer.stride(-1) != 1 and buffer.shape[-1] != 1:
        raise ValueError(
            f"the rows of a KV buffer must be contiguous, got stride {buffer.stride(-1)}"
        )
    heads, dim = buffer.shape[-2], buffer.shape[-1]
    if buffer.dim() == 3:
        return RowGeometry(1, buffer.stride(0), 0, buffer.stride(1), heads, dim)
    page_tokens = buffer.shape[1]
    return RowGeometry(
        page_tokens, buffer.stride(0), buffer.stride(1), buffer.stride(2), heads, dim
    )


def slot_count(buffer: torch.Tensor) -> int:
    """How many slots a buffer holds."""
    return int(buffer.shape[0] * (buffer.shape[1] if buffer.dim() == 4 else 1))


@dataclass(frozen=True)
class KVPoolView:
    """All layers of a KV pool, aliased, with the rotation of each.

    Attributes:
        k: one key buffer per layer, shapes as `geometry` says; dtype float32, float16,
            bfloat16, float8_e4m3fn or float8_e5m2. For MLA the latent rows ``[slots, 1, dim]``.
        v: one value buffer per layer, or empty for MLA, whose rows hold both.
        specs: one `RopeSpec` per layer; ``specs[i].head_dim`` is ``k[i].shape[-1]``.
        k_scale: per layer the number that stored keys are multiplied by to get real ones
            (fp8), or None. A rotation is linear and both elements of a pair share the scale,
            so ``quantise(rotate(dequantise(x))) = round(rotate(x))`` in stored units: the
            kernels never need its value, only that it is one number per layer.
    """

    k: Sequence[torch.Tensor]
    v: Sequence[torch.Tensor]
    specs: Sequence[RopeSpec]
    k_scale: Sequence[float | None] | None = None

    def __post_init__(self) -> None:
        """Checks that the parts fit together.

        Raises:
            ValueError: counts, shapes, devices or dtypes that contradict each other.
            UnsupportedRope: a cache dtype without a proven rule.
        """
        layers = len(self.k)
        if layers == 0:
            raise ValueError("a KV pool needs at least one layer")
        if len(self.specs) != layers or len(self.v) not in (0, layers):
            raise ValueError(
                f"{layers} key buffers need as many specs ({len(self.specs)}) and as many "
                f"value buffers or none ({len(self.v)})"
            )
        if self.k_scale is not None and len(self.k_scale) != layers:
            raise ValueError(f"{layers} layers need as many scales, got {len(self.k_scale)}")
        for index, (buffer, spec) in enumerate(zip(self.k, self.specs, strict=True)):
            cache_dtype(buffer.dtype)
            if geometry(buffer).head_dim != spec.head_dim:
                raise ValueError(
                    f"layer {index} ({spec.name}): rows of {buffer.shape[-1]} elements do not "
                    f"match the spec's head_dim {spec.head_dim}"
                )
        for buffer in self.v:
            geometry(buffer)
        slots = {slot_count(t) for t in (*self.k, *self.v)}
        devices = {t.device for t in (*self.k, *self.v)}
        dtypes = {t.dtype for t in self.k}
        if len(slots) > 1 or len(devices) > 1 or len(dtypes) > 1:
            raise ValueError(
                "all layers must agree on slots, device and key dtype, got "
                f"{sorted(slots)}, {sorted(map(str, devices))}, {sorted(map(str, dtypes))}"
            )

    @property
    def num_layers(self) -> int:
        """Number of attention layers."""
        return len(self.k)

    @property
    def num_slots(self) -> int:
        """Number of token slots, the same in every layer."""
        return slot_count(self.k[0])

    @property
    def device(self) -> torch.device:
        """Device of all buffers."""
        return self.k[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of all key buffers."""
        return self.k[0].dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return sum(t.shape[-1] * t.shape[-2] * t.element_size() for t in (*self.k, *self.v))
