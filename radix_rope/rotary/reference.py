"""The float64 reference that every kernel and every proof in `rotary` is held to.

Owns the plain statement of what moving a key means: no speed, no cache dtypes, no slots.
"""

from __future__ import annotations

import torch

from radix_rope.rotary.spec import RopeSpec


def rotate(k: torch.Tensor, delta: torch.Tensor | int, spec: RopeSpec) -> torch.Tensor:
    """Moves keys by `delta` positions, in float64.

    Args:
        k: keys ``[..., heads, head_dim]``, any floating dtype.
        delta: distance in tokens, one number or an integer tensor that matches ``k``'s
            leading dimensions (all but the last two).
        spec: the layer's rotation.

    Returns:
        float64 tensor of ``k``'s shape, on ``k``'s device. Elements outside the rotated part
        are ``k``'s values unchanged.

    Example:
        >>> spec = RopeSpec(head_dim=2, rotary_dim=2, inv_freq=(1.0,))
        >>> rotate(torch.tensor([[[1.0, 0.0]]]), 1, spec)[0, 0].round(decimals=4).tolist()
        [0.5403, 0.8415]
    """
    out = k.to(torch.float64).clone()
    if not spec.has_rope:
        return out
    distance = torch.as_tensor(delta, device=k.device).to(torch.float64)
    frequency = torch.tensor(spec.inv_freq, dtype=torch.float64, device=k.device)
    # [..., 1, frequencies]: the same angle for every head of a token.
    angle = (distance.unsqueeze(-1) * frequency).unsqueeze(-2)
    cos, sin = angle.cos(), angle.sin()
    part = out[..., spec.rotary_offset : spec.rotary_offset + spec.rotary_dim]
    if spec.is_neox:
        half = spec.rotary_dim // 2
        first, second = part[..., :half].clone(), part[..., half:].clone()
        part[..., :half] = first * cos - second * sin
        part[..., half:] = second * cos + first * sin
    else:
        first, second = part[..., 0::2].clone(), part[..., 1::2].clone()
        part[..., 0::2] = first * cos - second * sin
        part[..., 1::2] = second * cos + first * sin
    return out
