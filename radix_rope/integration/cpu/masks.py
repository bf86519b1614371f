"""Causal masks for torch's attention, kept from one layer of a forward to the next.

Every layer of a forward hides the same positions. Owns the tensors and the bound on their bytes;
knows nothing of SGLang.
"""

import torch

_Key = tuple[int, int, int, int | None, torch.dtype]


class CausalMasks:
    """Additive masks of one forward, by shape, within `max_bytes`.

    When they would take more, all are forgotten.
    """

    def __init__(self, max_bytes: int) -> None:
        """Start empty."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: dict[_Key, torch.Tensor] = {}

    def clear(self) -> None:
        """Forget all masks: another forward begins, whose shapes are others."""
        self._kept.clear()
        self._bytes = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of all masks that are kept."""
        return self._bytes

    def get(
        self, tokens: int, prefix_tokens: int, group: int, window: int | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """The mask of `tokens` queries behind `prefix_tokens`, `group` times below one another.

        Returns [group * tokens, prefix_tokens + tokens] of `dtype`: 0 where a query may look, minus
        infinity where it may not: at later positions and, with a window, at those more than
        `window` before its own.
        """
        key = (tokens, prefix_tokens, group, window, dtype)
        mask = self._kept.get(key)
        if mask is None:
            mask = _additive(*key)
            self._keep(key, mask)
        return mask

    def _keep(self, key: _Key, mask: torch.Tensor) -> None:
        if mask.nbytes > self._max_bytes:
            return
        if self._bytes + mask.nbytes > self._max_bytes:
            self.clear()
        self._kept[key] = mask
        self._bytes += mask.nbytes


def _additive(
    tokens: int, prefix_tokens: int, group: int, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    end = prefix_tokens + tokens
    position = torch.arange(prefix_tokens, end).unsqueeze(1)
    column = torch.arange(end).unsqueeze(0)
    seen = column <= position
    if window is not None:
        seen &= column >= position - window
    # A mask of booleans would be turned into this one on every call.
    mask = torch.zeros(tokens, end, dtype=dtype).masked_fill_(~seen, float("-inf"))
    return mask.repeat(group, 1)
