"""What of SGLang radix_rope stands on, and which versions were tested.

Everything that would differ for another SGLang version is named here: the
functions that are wrapped, and what the wrapped code is expected to have.
"""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

TESTED_SGLANG_VERSIONS = ("0.5.23",)

BACKEND_NAME = "radix_rope"

# Dotted targets of the hooks, by purpose.
ADD_CLI_ARGS = "sglang.srt.server_args.ServerArgs.add_cli_args"
RESOLVE_ARGS = "sglang.srt.server_args.ServerArgs.resolve_once"
PREPARE_FOR_EXTEND = "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend"
FORWARD_BATCH_INIT = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"
FORWARD_RAW = "sglang.srt.model_executor.model_runner.ModelRunner._forward_raw"
LOGITS_METADATA = "sglang.srt.layers.logits_processor.LogitsMetadata.from_forward_batch"
PREFILL_STATS = "sglang.srt.managers.scheduler_components.metrics_reporter.PrefillStats.from_adder"
PREFILL_LOG = (
    "sglang.srt.managers.scheduler_components.metrics_reporter"
    ".SchedulerMetricsReporter.report_prefill_stats"
)
CACHED_TOKENS_DETAILS = (
    "sglang.srt.managers.scheduler_components.output_streamer"
    ".SchedulerOutputStreamer.get_cached_tokens_details"
)


class SGLangVersionError(RuntimeError):
    """The installed SGLang is not one that was tested."""


def check_version(allow_untested: bool = False, installed: str | None = None) -> None:
    """Refuse an SGLang version that was not tested.

    Args:
        allow_untested: accept any version.
        installed: the version found; looked up when None.

    Raises:
        SGLangVersionError: naming the tested versions and the way to override.
    """
    if installed is None:
        try:
            installed = version("sglang")
        except PackageNotFoundError:
            raise SGLangVersionError(
                "radix_rope: SGLang is not installed. Install "
                f"sglang=={TESTED_SGLANG_VERSIONS[-1]}."
            ) from None
    if installed not in TESTED_SGLANG_VERSIONS and not allow_untested:
        raise SGLangVersionError(
            f"radix_rope: SGLang {installed} was not tested; it wraps functions of "
            f"{', '.join(TESTED_SGLANG_VERSIONS)}. Install one of these, or set "
            'allow_untested_sglang in the configuration: {"allow_untested_sglang": true}.'
        )


def hook(target: str, wrapper: Callable[..., Any]) -> None:
    """Wrap `target`: `wrapper(original, *args, **kwargs)` is called instead."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, wrapper, HookType.AROUND)
