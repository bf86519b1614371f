"""The arguments of a move, checked once for every kernel.

Owns the rules that a slot list must obey; a kernel that runs after `MoveChecker.check` may
write in any order, on any number of threads, and give the same bits.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import torch


class SlotOverlap(ValueError):
    """Source and destination slots of one move intersect, or a destination repeats."""


@dataclass(frozen=True)
class Move:
    """A checked move.

    Attributes:
        src: source slots, int64 ``[n]`` on the pool's device, contiguous.
        dst: destination slots, likewise; distinct and none of them in `src`.
        deltas: the distinct distances, int64 ``[rows]`` on the CPU, ascending.
        row: for every token its index into `deltas`, int64 ``[n]`` on the pool's device.
    """

    src: torch.Tensor
    dst: torch.Tensor
    deltas: torch.Tensor
    row: torch.Tensor


class MoveChecker:
    """Checks moves against one pool.

    Keeps one int32 per slot as scratch, so a check costs O(n) and not O(n log n). Safe to
    call from several threads.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        """Allocates scratch for `num_slots` slots on `device`."""
        self._num_slots = num_slots
        self._device = device
        self._owner = torch.full((num_slots,), -1, dtype=torch.int32, device=device)
        self._lock = threading.Lock()

    def check(self, src: torch.Tensor, dst: torch.Tensor, delta: torch.Tensor) -> Move:
        """Checks one move and groups its distances.

        On a GPU this waits for the device once (twice if `delta` lies there), so give
        `delta` as a CPU tensor where it is known on the host.

        Args:
            src: source slots, int64 ``[n]``; repeats are allowed.
            dst: destination slots, int64 ``[n]``.
            delta: signed distances in tokens, int64 ``[n]``.

        Raises:
            ValueError: wrong dtype, shape or a slot outside the pool.
            SlotOverlap: a slot is both read and written, or written twice.
        """
        for name, tensor in (("src", src), ("dst", dst), ("delta", delta)):
            if tensor.dtype != torch.int64 or tensor.dim() != 1:
                raise ValueError(
                    f"{name} must be a one-dimensional int64 tensor, got {tensor.dtype} "
                    f"{tuple(tensor.shape)}"
                )
        if not src.numel() == dst.numel() == delta.numel():
            raise ValueError(
                "src, dst and delta must have one entry per token, got "
                f"{src.numel()}, {dst.numel()} and {delta.numel()}"
            )
        src = src.to(self._device).contiguous()
        dst = dst.to(self._device).contiguous()
        if src.numel():
            self._check_slots(src, dst)
        deltas, row = np.unique(delta.cpu().numpy(), return_inverse=True)
        row_of_token = torch.from_numpy(row).to(self._device)
        return Move(src, dst, torch.from_numpy(deltas), row_of_token)

    def _check_slots(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        both = torch.stack((src, dst))
        low, high = torch.aminmax(both)
        if int(low) < 0 or int(high) >= self._num_slots:
            raise ValueError(
                f"slots must lie in [0, {self._num_slots}), got {int(low)} to {int(high)}; "
                "the plan and the pool do not belong together"
            )
        with self._lock:
            order = torch.arange(dst.numel(), dtype=torch.int32, device=self._device)
            self._owner[dst] = order
            repeated = (self._owner[dst] != order).any()
            shared = (self._owner[src] >= 0).any()
            repeats, overlaps = torch.stack((repeated, shared)).tolist()
            self._owner[dst] = -1
        if overlaps:
            common = src[torch.isin(src, dst)]
            raise SlotOverlap(
                f"{common.numel()} source slots are also destinations (one is "
                f"{int(common[0])}); moving in place would read rotated keys: move them "
                "through other slots"
            )
        if repeats:
            raise SlotOverlap("a destination slot occurs twice; which key wins is undefined")
