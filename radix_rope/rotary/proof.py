"""The start-up proof: does the correction map a key at one position to another position?

Owns the positions that are tried, the error bound that follows from the dtypes, and the
verdict. It is given keys, or a function that makes them with the model's own RoPE; where
these come from is not its business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from radix_rope.rotary.reference import rotate
from radix_rope.rotary.spec import RopeSpec

# Offsets around which keys are taken, clipped to the context length; their differences
# cover 0, small and large distances of both signs.
_PROOF_POSITIONS = (0, 1, 2, 17, 18, 64, 1000, 1017, 4096, 4113, 8192, 32768, 65536, 131072)

# Bound of a relative float32 angle error, as SGLang's tables are made: the frequency is
# used as it is, one rounding of position * frequency, and cos and sin of that to a unit or
# two. Four roundings leave room for a device's own sin and cos.
_ANGLE_ROUNDINGS = 4.0 * 2.0**-24


class ProofFailed(ValueError):
    """The correction does not reproduce the model's own RoPE within the bound."""


@dataclass(frozen=True)
class Proof:
    """Worst case over all pairs of positions of one layer.

    Attributes:
        error: largest difference between a moved key and the model's own key at that position.
        bound: the bound that element had to keep.
        ratio: largest error in units of its bound over all elements; at most 1 when proven.
        origin, target: the two positions of the worst element.
        element: its index in the key row.
        pairs: ordered pairs of positions that were compared.
    """

    error: float
    bound: float
    ratio: float
    origin: int
    target: int
    element: int
    pairs: int

    @property
    def holds(self) -> bool:
        """Whether every element kept its bound. A NaN does not."""
        return self.ratio <= 1.0


def proof_positions(context_len: int) -> list[int]:
    """Positions to prove a model of this context length at, ascending and distinct."""
    last = max(context_len - 1, 1)
    near_end = (last - 17, last - 1, last)
    return sorted({p for p in (*_PROOF_POSITIONS, *near_end) if 0 <= p <= last})


def key_bound(
    pair_norm: torch.Tensor,
    spec: RopeSpec,
    origin: int,
    target: int,
    dtype: torch.dtype,
    content_roundings: float = 0.0,
) -> torch.Tensor:
    """Bound of ``|move(k at origin) - k at target|`` when both come from a correct RoPE.

    In units of ``r = hypot`` of the element's pair, with ``u`` the unit roundoff of the dtype
    the model computes in: each of the two keys carries a rounded cosine or sine (u), two
    rounded products (u) and a rounded sum (u), 3u by Cauchy-Schwarz and 4u with higher
    orders. The angle itself is made in float32 by the model and errs by 4 * 2**-24 of its
    size, at both positions.

    Args:
        pair_norm: ``[..., rotary_dim // 2]``, norm of each rotated pair.
        spec: the rotation, for its frequencies.
        origin, target: the two positions.
        dtype: dtype that the model keeps its cosines and keys in.
        content_roundings: how many roundings of `dtype` the keys before RoPE may differ by.

    Returns:
        float64, shape of `pair_norm`.
    """
    unit = torch.finfo(dtype).eps / 2
    frequency = torch.tensor(spec.inv_freq, dtype=torch.float64, device=pair_norm.device)
    angle_error = (origin + target) * frequency.abs() * _ANGLE_ROUNDINGS
    floor = torch.finfo(dtype).smallest_normal
    return pair_norm * ((8.0 + content_roundings) * unit + angle_error + 2.0**-22) + floor


def _pairs(part: torch.Tensor, is_neox: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if is_neox:
        first, second = part.chunk(2, dim=-1)
        return first, second
    return part[..., 0::2], part[..., 1::2]


def check_keys(
    keys: torch.Tensor,
    positions: Sequence[int],
    spec: RopeSpec,
    dtype: torch.dtype,
    content_roundings: float = 0.0,
) -> Proof:
    """Compares keys of one content at several positions with each other, moved.

    Args:
        keys: ``[positions, heads, head_dim]``: what the model would cache for the same
            content at each position.
        positions: the positions.
        spec: the rotation to prove; without RoPE the keys must agree at all positions.
        dtype: dtype the model computed them in.
        content_roundings: see `key_bound`.

    Returns:
        The worst pair. `Proof.holds` says whether the rotation is proven.
    """
    exact = keys.to(torch.float64)
    lo, hi = spec.rotary_offset, spec.rotary_offset + spec.rotary_dim
    unit = torch.finfo(dtype).eps / 2
    worst = Proof(0.0, 0.0, 0.0, positions[0], positions[0], 0, 0)
    pairs = 0
    for i, origin in enumerate(positions):
        first, second = _pairs(exact[i][..., lo:hi], spec.is_neox)
        norm = torch.hypot(first, second)
        # Elements that no rotation touches may differ by their content's rounding only.
        bound_still = exact[i].abs().amax() * content_roundings * unit
        for j, target in enumerate(positions):
            moved = rotate(exact[i], target - origin, spec)
            error = (moved - exact[j]).abs()
            bound = torch.full_like(error, float(bound_still))
            if spec.has_rope:
                each = key_bound(norm, spec, origin, target, dtype, content_roundings)
                # The content may differ by a rounding of any element of the row.
                each = each + bound_still
                out_first, out_second = _pairs(bound[..., lo:hi], spec.is_neox)
                out_first.copy_(each)
                out_second.copy_(each)
            # 0 of 0 is fine; anything of 0 is not.
            ratio = torch.where(error == 0, error, error / bound)
            # A comparison that NaN can't pass: NaN must end as the worst.
            flat = torch.nan_to_num(ratio, nan=float("inf")).flatten()
            index = int(flat.argmax())
            pairs += 1
            if float(flat[index]) > worst.ratio:
                worst = Proof(
                    float(error.flatten()[index]),
                    float(bound.flatten()[index]),
                    float(flat[index]),
                    origin,
                    target,
                    index % spec.head_dim,
                    0,
                )
    return Proof(
        worst.error,
        worst.bound,
        worst.ratio,
        worst.origin,
        worst.target,
        worst.element,
        pairs,
    )


def prove(
    apply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    spec: RopeSpec,
    dtype: torch.dtype,
    context_len: int,
    device: torch.device | str = "cpu",
    heads: int = 2,
) -> Proof:
    """Proves a spec against a model's own RoPE.

    Args:
        apply: ``apply(positions, keys)`` returns the keys after the model's RoPE;
            ``positions`` int64 ``[n]``, ``keys`` ``[n, heads, head_dim]`` in `dtype`.
        spec: the rotation read from that model.
        dtype: dtype the model computes in.
        context_len: positions are tried up to here.
        device: where the model is.
        heads: heads per key.

    Raises:
        ProofFailed: names the spec, the worst error, its bound and the two positions.
    """
    positions = proof_positions(context_len)
    generator = torch.Generator().manual_seed(20240917)
    content = torch.randn(1, heads, spec.head_dim, generator=generator).to(dtype)
    keys = content.repeat(len(positions), 1, 1).to(device)
    moved = apply(torch.tensor(positions, dtype=torch.int64, device=device), keys)
    proof = check_keys(moved.reshape(keys.shape), positions, spec, dtype)
    require(proof, spec)
    return proof


def require(proof: Proof, spec: RopeSpec, hint: str = "") -> None:
    """Raises `ProofFailed` unless the proof holds."""
    if not proof.holds:
        raise ProofFailed(
            f"{spec.name}: a key moved from position {proof.origin} to {proof.target} differs "
            f"from the model's own key there by {proof.error:.3g} in element {proof.element}; "
            f"the bound is {proof.bound:.3g}{hint}. No proof, no reuse: serve this model with "
            "the stock radix cache, and please report it"
        )
