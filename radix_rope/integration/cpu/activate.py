"""Decides whether the CPU platform is used. Imports nothing of SGLang.

SGLang calls `activate` in every process while it looks for a platform, so it
must be cheap and must answer `None` wherever something better is present.
"""

import os

import torch

PLATFORM_CLASS = "radix_rope.integration.cpu.platform.CpuPlatform"


def activate() -> str | None:
    """Entry point of the group `sglang.srt.platforms`.

    Returns the dotted path of the platform class when this machine has no
    accelerator and the user asked for no other platform, else `None`.
    """
    if _user_chose_another() or _accelerator_present():
        return None
    return PLATFORM_CLASS


def _user_chose_another() -> bool:
    # SGLANG_USE_CPU_ENGINE=1 selects SGLang's own AMX-only CPU path.
    return (
        os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1"
        or os.environ.get("SGLANG_PLATFORM", "radix_rope_cpu") != "radix_rope_cpu"
    )


def _accelerator_present() -> bool:
    # torch.accelerator covers cuda, rocm, xpu, mps and registered private-use
    # devices; npu and hpu register themselves as attributes of torch.
    if torch.accelerator.is_available():
        return True
    return any(
        getattr(getattr(torch, name, None), "is_available", bool)()
        for name in ("npu", "hpu", "musa")
    )
