"""Reads a `RopeSpec` out of one of SGLang's rotary modules.

Owns the list of RoPE classes that are understood and of those that are refused, each with
the reason. Works on class names and attributes, so it imports nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from radix_rope.rotary.spec import RopeSpec, UnsupportedRope

_Frequencies = Callable[[Any], torch.Tensor]


def _from_base(module: Any) -> torch.Tensor:
    frequencies: torch.Tensor = module._compute_inv_freq(module.base)
    return frequencies


def _from_factor(module: Any) -> torch.Tensor:
    frequencies: torch.Tensor = module._compute_inv_freq(module.scaling_factor)
    return frequencies


def _linear(module: Any) -> torch.Tensor:
    factors = module.scaling_factors
    if len(factors) != 1:
        raise UnsupportedRope(
            "LinearScalingRotaryEmbedding with several factors",
            "the factor depends on the adapter of the request",
        )
    # The model divides positions by the factor; dividing the frequencies in float64 is the
    # same angle.
    return _from_base(module).to(torch.float64) / float(factors[0])


def _ntk_alpha(module: Any) -> torch.Tensor:
    exponent = module.rotary_dim / (module.rotary_dim - 2)
    frequencies: torch.Tensor = module._compute_inv_freq(
        module.base * module.scaling_alpha**exponent
    )
    return frequencies


# Classes of sglang.srt.layers.rotary_embedding by exact name, with the way to their
# frequencies as the module itself computes them.
_SUPPORTED: dict[str, _Frequencies] = {
    "RotaryEmbedding": _from_base,
    "LinearScalingRotaryEmbedding": _linear,
    "Llama3RotaryEmbedding": _from_base,
    "YaRNScalingRotaryEmbedding": _from_factor,
    "DeepseekScalingRotaryEmbedding": _from_factor,
    "DynamicNTKAlphaRotaryEmbedding": _ntk_alpha,
    "Gemma4RotaryEmbedding": _from_base,
    "MRotaryEmbedding": _from_base,
    "YaRNScalingMRotaryEmbedding": _from_factor,
    "Ernie4_5_VLRotaryEmbedding": _from_base,
    "BailingMRotaryEmbedding": _from_base,
}

_TEXT_ONLY = frozenset(
    {
        "MRotaryEmbedding",
        "YaRNScalingMRotaryEmbedding",
        "Ernie4_5_VLRotaryEmbedding",
        "BailingMRotaryEmbedding",
    }
)

_REFUSED: dict[str, str] = {
    "DynamicNTKScalingRotaryEmbedding": (
        "dynamic NTK ties the base to the length: keys cached for one length are wrong for "
        "another, and SGLang extends its table with the unscaled base"
    ),
    "DualChunkRotaryEmbedding": (
        "dual-chunk attention takes positions modulo the chunk, so a key's angle is no "
        "function of its distance"
    ),
    "FourierRotaryEmbedding": (
        "Fourier positions mix several frequencies per element, which is no rotation"
    ),
    "Llama4VisionRotaryEmbedding": "its positions are two-dimensional image patches",
}

# Kept by name rather than by isinstance: a subclass may compute something else entirely.
ROTARY_PACKAGE = "sglang.srt.layers.rotary_embedding"
_HF_STYLE = "Gemma3RotaryEmbedding"
_LONGROPE = "Phi3LongRoPEScaledRotaryEmbedding"


def is_rotary_module(module: torch.nn.Module) -> bool:
    """Whether a module looks like a rotary embedding, understood or not."""
    kind = type(module)
    name = kind.__name__.lower()
    return kind.__module__.startswith(ROTARY_PACKAGE) or "rotary" in name or "rope" in name


def read_rope(
    module: torch.nn.Module,
    name: str,
    row_dim: int,
    rotary_offset: int = 0,
    context_len: int | None = None,
) -> RopeSpec:
    """Reads what a rotary module does to one key row.

    The frequencies are the module's own float32 numbers, widened: recomputing them in
    float64 would be closer to the formula and farther from the model.

    Args:
        module: a rotary module of SGLang.
        name: what to call the layer in messages.
        row_dim: elements per cached key row.
        rotary_offset: where in the row the module's head begins (MLA: after the latent).
        context_len: longest context served; LongRoPE needs it.

    Raises:
        UnsupportedRope: a class that is refused or unknown.
    """
    kind = type(module).__name__
    any_module: Any = module
    title = f"{kind} ({name})"
    if kind == _HF_STYLE:
        frequencies, rotary_dim, is_neox = _read_hf_style(any_module, title), row_dim, True
    elif kind == _LONGROPE:
        frequencies = _read_longrope(any_module, title, context_len)
        rotary_dim, is_neox = int(any_module.rotary_dim), True
    elif kind in _REFUSED:
        raise UnsupportedRope(title, _REFUSED[kind])
    elif kind in _SUPPORTED and type(module).__module__.startswith(ROTARY_PACKAGE):
        # Where the module made its table, so that the same float32 numbers come out.
        with torch.device(any_module.cos_sin_cache.device):
            frequencies = _SUPPORTED[kind](any_module)
        rotary_dim, is_neox = int(any_module.rotary_dim), bool(any_module.is_neox_style)
    else:
        raise UnsupportedRope(
            title,
            "this rotary class is not among those whose rotation was studied "
            f"({', '.join(sorted({*_SUPPORTED, _LONGROPE, _HF_STYLE}))})",
        )
    inv_freq = tuple(float(f) for f in frequencies.to(device="cpu", dtype=torch.float64))
    return RopeSpec(
        head_dim=row_dim,
        rotary_dim=rotary_dim,
        rotary_offset=rotary_offset,
        is_neox=is_neox,
        inv_freq=inv_freq,
        name=title,
        text_only=kind in _TEXT_ONLY,
    )


def _read_hf_style(module: Any, title: str) -> torch.Tensor:
    """Gemma 3 computes angles at model level, in the manner of transformers."""
    if module.rope_type not in ("default", "linear", "llama3", "yarn"):
        raise UnsupportedRope(
            f"{title} of type {module.rope_type!r}", "its frequencies change with the length"
        )
    frequencies: torch.Tensor = module.inv_freq
    return frequencies


def _read_longrope(module: Any, title: str, context_len: int | None) -> torch.Tensor:
    original = int(module.original_max_position_embeddings)
    if context_len is None or context_len > original:
        served = "unknown" if context_len is None else str(context_len)
        raise UnsupportedRope(
            title,
            "LongRoPE switches every key of a batch to other frequencies as soon as one "
            f"position of the batch reaches {original}, so keys of short and long requests do "
            f"not mix (context length served: {served})",
            f"serve it with --context-length {original} or less, where only the short "
            "factors are ever used, or use the stock radix cache",
        )
    frequencies: torch.Tensor = module._compute_inv_freq(module.short_factor)
    return frequencies


def apply_rotary(
    module: torch.nn.Module, positions: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """Applies a rotary module to keys, as the model's layers do.

    Args:
        module: a module that `read_rope` understood.
        positions: int64 ``[tokens]``.
        keys: ``[tokens, heads, head]`` in the model's dtype; not changed.

    Returns:
        The rotated keys, same shape.
    """
    any_module: Any = module
    tokens, heads, head = keys.shape
    if type(module).__name__ == _HF_STYLE:
        cos, sin = any_module(keys, positions.unsqueeze(0))
        cos, sin = (t.reshape(tokens, 1, head).to(keys.dtype) for t in (cos, sin))
        first, second = keys.chunk(2, dim=-1)
        turned: torch.Tensor = keys * cos + torch.cat((-second, first), dim=-1) * sin
        return turned
    work = keys.clone()
    if type(module).__name__ != "DeepseekScalingRotaryEmbedding":
        # All but DeepSeek's take heads flattened; some accept nothing else.
        work = work.reshape(tokens, heads * head)
    with torch.inference_mode():
        rotated: torch.Tensor = any_module(positions, work.clone(), work)[1]
    return rotated.reshape(tokens, heads, head)
