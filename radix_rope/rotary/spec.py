"""What one attention layer's rotary embedding does to a key, in numbers.

Owns `RopeSpec`, the only description of a RoPE that the rest of `rotary` reads, and
`UnsupportedRope`, the refusal. Knows nothing of model configs, of SGLang's classes or of
slots: whoever reads a model fills in the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


class UnsupportedRope(ValueError):
    """A RoPE, pool or cache dtype that can't be corrected by a proven rotation.

    The message always names the type, the reason and what to do instead.
    """

    def __init__(
        self,
        what: str,
        reason: str,
        instead: str = "serve this model with the stock radix cache (or mode `exact`)",
    ) -> None:
        """Makes the message.

        Args:
            what: name of the refused thing, for instance ``"FourierRotaryEmbedding"``.
            reason: why its keys can't be moved.
            instead: what the user can do.
        """
        self.what = what
        self.reason = reason
        self.instead = instead
        super().__init__(f"{what}: keys cannot be moved to another position: {reason}; {instead}.")


@dataclass(frozen=True)
class RopeSpec:
    """The rotation of one attention layer's keys.

    A key row has `head_dim` elements, of which ``[rotary_offset, rotary_offset + rotary_dim)``
    are rotated. Frequency ``i`` turns the pair ``(i, i + rotary_dim // 2)`` (NeoX halves) or
    ``(2i, 2i + 1)`` (GPT-J pairs) of that part by ``position * inv_freq[i]`` radians.

    A magnitude factor (YaRN, LongRoPE) is deliberately absent: the cached key carries it
    already, and moving a key is a rotation of magnitude one.

    Attributes:
        head_dim: elements of one key row per head; for MLA the whole latent row.
        rotary_dim: how many of them are rotated; 0 for a layer without RoPE.
        rotary_offset: index of the first rotated element.
        is_neox: NeoX halves (True) or GPT-J interleaved pairs (False).
        inv_freq: radians per position in float64, ``rotary_dim // 2`` of them; ``()`` for a
            layer without RoPE.
        name: what to call it in messages, normally the class name and the layer.
        text_only: the positions are one-dimensional for text only (mRoPE): requests with
            images must not be moved with this spec. No server takes any: the integration
            refuses multimodal models.
    """

    head_dim: int
    rotary_dim: int
    rotary_offset: int = 0
    is_neox: bool = True
    inv_freq: tuple[float, ...] = ()
    name: str = "RoPE"
    text_only: bool = False

    def __post_init__(self) -> None:
        """Refuses numbers that contradict each other."""
        if self.head_dim <= 0:
            raise ValueError(f"{self.name}: head_dim must be positive, got {self.head_dim}")
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"{self.name}: rotary_dim must be even and between 0 and head_dim "
                f"({self.head_dim}), got {self.rotary_dim}"
            )
        if not 0 <= self.rotary_offset <= self.head_dim - self.rotary_dim:
            raise ValueError(
                f"{self.name}: the rotated part [{self.rotary_offset}, "
                f"{self.rotary_offset + self.rotary_dim}) leaves the row of {self.head_dim}"
            )
        if len(self.inv_freq) != self.rotary_dim // 2:
            raise ValueError(
                f"{self.name}: rotary_dim {self.rotary_dim} needs {self.rotary_dim // 2} "
                f"frequencies, got {len(self.inv_freq)}"
            )
        if not all(math.isfinite(f) for f in self.inv_freq):
            raise ValueError(f"{self.name}: a frequency is not finite: {self.inv_freq}")

    @property
    def has_rope(self) -> bool:
        """Whether moving a key of this layer changes it at all."""
        return self.rotary_dim > 0


def standard_inv_freq(rotary_dim: int, base: float) -> tuple[float, ...]:
    """Frequencies of plain RoPE, ``base ** (-2i / rotary_dim)``, in float64.

    Source: Su et al., "RoFormer" (arXiv 2104.09864), section 3.2.2.

    >>> standard_inv_freq(4, 10000.0)
    (1.0, 0.01)
    """
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    return tuple(float(f) for f in 1.0 / np.power(float(base), exponents))


def angle_table(
    inv_freq: Sequence[float], deltas: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosines and sines that move keys by each distance.

    The angle is formed in float64 and only its cosine and sine are rounded to float32, so
    the table is right to half a float32 unit at any distance.

    Args:
        inv_freq: radians per position, float64.
        deltas: signed distances in tokens, int64 ``[rows]``.

    Returns:
        ``(cos, sin)``, each float32 ``[rows, len(inv_freq)]``, C-contiguous.
    """
    angles = np.multiply.outer(deltas.astype(np.float64), np.asarray(inv_freq, dtype=np.float64))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
