"""An out-of-tree SGLang platform for CPUs that SGLang itself does not serve.

SGLang's own CPU path needs AMX and a kernel build that PyPI does not have.
As an out-of-tree platform with dispatch key "native", the CUDA kernel package
is never imported and every operator takes its pure torch form.
"""

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

ATTENTION_BACKEND = "radix_rope_cpu"


class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """CPU without AMX, torch-native operators, no graphs, no Triton."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Put our attention backend where the user named none.

        SGLang has by then filled in its AMX backend for every CPU, which falls
        back to torch_native on this one.
        """
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = ATTENTION_BACKEND

    def get_default_attention_backend(self) -> str:
        """Name of the attention backend used when the user names none."""
        return ATTENTION_BACKEND

    def get_device(self, device_id: int = 0) -> str:
        """Device name; argument resolution of out-of-tree platforms wants a string."""
        return "cpu"

    def get_compile_backend(self, mode: str | None = None) -> str:
        """No compilation: torch.compile brings nothing on two cores at start-up cost."""
        return "eager"

    def init_backend(self) -> None:
        """Register the attention backend and the linear layers in every worker process."""
        from radix_rope.integration.cpu import attention, linear

        attention.register()
        linear.register()

    def get_torch_profiler_activity_str(self) -> str:
        """Name of the profiler activity."""
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        """Profiler activity of torch."""
        return torch.profiler.ProfilerActivity.CPU
