"""Choosing and building the kernel that moves cached keys and values.

Owns the `Corrector` interface and the choice between its implementations. Knows which
kernels exist and what each needs; knows no SGLang.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Protocol

import torch

from radix_rope.rotary.pool import KVPoolView
from radix_rope.rotary.torch_kernel import TorchCorrector

logger = logging.getLogger(__name__)


class Corrector(Protocol):
    """Copies cached tokens to other slots and turns their keys to another position."""

    @property
    def name(self) -> str:
        """Which kernel this is, one of `AVAILABLE_KERNELS`."""
        ...

    def move(self, src: torch.Tensor, dst: torch.Tensor, delta: torch.Tensor) -> None:
        """Copies V, and rotates and copies K, from `src` slots to `dst` slots in all layers.

        Angles are formed in float64, applied in float32 and rounded once, to nearest even.
        Tokens with ``delta == 0`` are copied bit for bit. The bits written for a token do not
        depend on the other tokens of the call, on its order or on the number of threads, and
        are the same for every kernel but FlashInfer's. On a GPU the work is enqueued on the
        current stream.

        Args:
            src: slots to read, int64 ``[n]``; repeats are allowed.
            dst: slots to write, int64 ``[n]``, distinct.
            delta: target position minus source position in tokens, int64 ``[n]``; best on
                the CPU.

        Raises:
            SlotOverlap: `src` and `dst` intersect, or `dst` repeats; nothing was written.
            ValueError: wrong dtypes or shapes, or slots outside the pool.
        """
        ...


class KernelUnavailable(ValueError):
    """A kernel was asked for that does not exist or can't run here."""


def _torch(pool: KVPoolView, rotate: bool) -> Corrector:
    return TorchCorrector(pool, rotate)


def _cpu(pool: KVPoolView, rotate: bool) -> Corrector:
    from radix_rope.rotary.cpu_kernel import CpuCorrector

    return CpuCorrector(pool, rotate)


def _triton(pool: KVPoolView, rotate: bool) -> Corrector:
    from radix_rope.rotary.triton_kernel import TritonCorrector

    return TritonCorrector(pool, rotate)


def _flashinfer(pool: KVPoolView, rotate: bool) -> Corrector:
    from radix_rope.rotary.flashinfer_kernel import FlashInferCorrector, unsupported

    reason = unsupported(pool)
    if reason is not None:
        raise KernelUnavailable(f"kernel 'flashinfer' cannot serve this pool: {reason}")
    return FlashInferCorrector(pool, rotate)


def _not_installed(package: str) -> str | None:
    found = importlib.util.find_spec(package) is not None
    return None if found else f"{package} is not installed"


def _cpu_missing(device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"the pool lies on {device.type}"
    return _not_installed("numba")


def _triton_missing(device: torch.device) -> str | None:
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the pool lies on the CPU, where Triton only runs in its interpreter"
    return _not_installed("triton")


def _flashinfer_missing(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.cuda is None:
        return "FlashInfer needs an NVIDIA GPU"
    return _not_installed("flashinfer")


def _never_missing(device: torch.device) -> str | None:
    return None


_Builder = Callable[[KVPoolView, bool], Corrector]
_Check = Callable[[torch.device], str | None]

# In order of preference. Each kernel: how to build it, and why it can't run (or None).
_KERNELS: dict[str, tuple[_Builder, _Check]] = {
    "cpu": (_cpu, _cpu_missing),
    "triton": (_triton, _triton_missing),
    "flashinfer": (_flashinfer, _flashinfer_missing),
    "torch": (_torch, _never_missing),
}

AVAILABLE_KERNELS: tuple[str, ...] = tuple(_KERNELS)
"""All kernels that exist, in order of preference."""


def available_kernels(device: torch.device | str = "cpu") -> list[str]:
    """Names of the kernels that can run on a device here, the preferred one first."""
    where = torch.device(device)
    return [name for name, (_, missing) in _KERNELS.items() if missing(where) is None]


def make_corrector(pool: KVPoolView, kernel: str = "auto", rotate: bool = True) -> Corrector:
    """Builds the corrector for a pool, compiled and ready: the first move pays nothing.

    Args:
        pool: the pool to work in.
        kernel: ``"auto"`` or one of `AVAILABLE_KERNELS`.
        rotate: False copies keys unrotated; only to show what goes wrong without.

    Raises:
        KernelUnavailable: unknown kernel, or one that can't run on the pool's device.
    """
    usable = available_kernels(pool.device)
    if kernel == "auto":
        return _first_that_works(pool, rotate, usable)
    if kernel not in _KERNELS:
        raise KernelUnavailable(
            f"there is no kernel {kernel!r}; choose auto or one of {', '.join(AVAILABLE_KERNELS)}"
        )
    build, missing = _KERNELS[kernel]
    reason = missing(pool.device)
    if reason is not None:
        raise KernelUnavailable(
            f"kernel {kernel!r} cannot run here: {reason}; usable on {pool.device.type}: "
            f"{', '.join(usable)}"
        )
    return build(pool, rotate)


def _first_that_works(pool: KVPoolView, rotate: bool, usable: list[str]) -> Corrector:
    """The preferred kernel that builds; the last one, torch, always does."""
    for name in usable[:-1]:
        try:
            return _KERNELS[name][0](pool, rotate)
        except Exception as error:
            # A compiler missing at run time must not keep the server from starting.
            logger.warning("kernel %r does not build here (%s), trying the next", name, error)
    return _KERNELS[usable[-1]][0](pool, rotate)
