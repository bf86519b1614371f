"""What of SGLang radix_rope stands on, and which versions were tested.

Everything that would differ for another SGLang version is named here: the
functions that are wrapped, and what the wrapped code is expected to have. An
SGLang built with the series in `patches/` offers the same functions as *steps*
that need no hook; whether it does is decided here, function by function.
"""

import ast
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

TESTED_SGLANG_VERSIONS = ("0.5.23",)

BACKEND_NAME = "radix_rope"

# Dotted targets of the hooks, by purpose.
ADD_CLI_ARGS = "sglang.srt.server_args.ServerArgs.add_cli_args"
RESOLVE_ARGS = "sglang.srt.server_args.ServerArgs.resolve_once"
ADD_REQUEST = "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue"
PREFIX_MATCHES = "sglang.srt.managers.schedule_policy.SchedulePolicy._compute_prefix_matches"
ADD_ONE_REQ = "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req"
ADD_CHUNKED_REQ = "sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req"
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

# Replaced by the CPU platform alone, whatever cache is used.
LINEAR = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"

# Every function that takes part in serving; wrapped when a cache is built.
SERVING_PATH = (
    ADD_REQUEST,
    PREFIX_MATCHES,
    ADD_ONE_REQ,
    ADD_CHUNKED_REQ,
    PREPARE_FOR_EXTEND,
    FORWARD_BATCH_INIT,
    FORWARD_RAW,
    LOGITS_METADATA,
    PREFILL_STATS,
    PREFILL_LOG,
    CACHED_TOKENS_DETAILS,
)

# What the patched functions carry: None, or the wrapper to call in their place;
# and the decorator that gives it to them.
STEP_ATTRIBUTE = "around"
STEP_DECORATOR = "extend_step"


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


def reports_metrics() -> bool:
    """Whether this scheduler reports metrics: `--enable-metrics`, and one rank unless all do."""
    from sglang.srt.runtime_context import get_observability, get_parallel

    parallel, wanted = get_parallel(), get_observability()
    first = parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0
    return bool(wanted.enable_metrics and (first or wanted.enable_metrics_for_all_schedulers))


def metric_labels() -> tuple[dict[str, Any], Any]:
    """SGLang's labels of this scheduler, and its collector class with the kinds of metrics.

    The same as in `SchedulerMetricsCollector.init_new`, whose result a cache never sees.
    """
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.observability import metrics_collector
    from sglang.srt.runtime_context import (
        get_disagg,
        get_observability,
        get_parallel,
        get_serving,
    )

    parallel = get_parallel()
    labels = {
        "model_name": get_serving().served_model_name,
        "engine_type": DisaggregationMode.to_engine_type(get_disagg().disaggregation_mode),
        "tp_rank": parallel.tp_rank,
        "pp_rank": parallel.pp_rank,
        "moe_ep_rank": parallel.moe_ep_rank,
    }
    if parallel.dp_rank is not None:
        labels["dp_rank"] = parallel.dp_rank
    labels.update(get_observability().extra_metric_labels or {})
    kinds = metrics_collector.resolve_collector_class(
        metrics_collector.STAT_LOGGER_ROLE_SCHEDULER,
        metrics_collector.SchedulerMetricsCollector,
    )
    return labels, kinds


def device_timer(report: Callable[[float], None]) -> Any:
    """SGLang's timer of work on the GPU; reports seconds without waiting for it."""
    from sglang.srt.utils.device_timer import DeviceTimer

    return DeviceTimer(lambda t: report(t))


def hook(target: str, wrapper: Callable[..., Any]) -> None:
    """Wrap `target`: `wrapper(original, *args, **kwargs)` is called instead."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, wrapper, HookType.AROUND)


def hook_now(target: str, wrapper: Callable[..., Any]) -> None:
    """Wrap `target` after SGLang has applied its plugins' hooks; safe to call again.

    Where it cannot be wrapped SGLang logs it and goes on as it is.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    if target not in HookRegistry._patched:
        hook(target, wrapper)
        HookRegistry.apply_hooks()


def step_of(target: str) -> Callable[..., Any] | None:
    """The step at `target` where SGLang was built with our patches, else None."""
    try:
        function = resolve_name(target)
    except (ImportError, AttributeError):
        return None  # Wrapping it will fail and say so.
    found = None
    # A hook of another plugin copies the step's attributes, so go to the innermost.
    while function is not None:
        function = getattr(function, "__func__", function)
        if hasattr(function, STEP_ATTRIBUTE):
            found = function
        function = getattr(function, "__wrapped__", None)
    return found


def wrap(wrappers: dict[str, Callable[..., Any]]) -> None:
    """Wrap functions of SGLang in this process: steps where it has them, else hooks.

    Args:
        wrappers: by target; each is called as `wrapper(original, *args, **kwargs)`.
            Safe to call again with the same.

    Raises:
        RuntimeError: a target cannot be wrapped, or another cache has taken its step.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooked = []
    for target, wrapper in wrappers.items():
        step = step_of(target)
        if step is None:
            hooked.append(target)
            if target not in HookRegistry._patched:
                hook(target, wrapper)
        elif getattr(step, STEP_ATTRIBUTE) not in (None, wrapper):
            raise RuntimeError(
                f"radix_rope: another cache has taken {target}; only one can. Drop one of them."
            )
        else:
            setattr(step, STEP_ATTRIBUTE, wrapper)
    HookRegistry.apply_hooks()
    missing = [target for target in hooked if target not in HookRegistry._patched]
    if missing:
        # SGLang logs and goes on; without all hooks reuse would be wrong.
        raise RuntimeError(
            f"radix_rope: could not wrap {', '.join(missing)}; this SGLang differs from the "
            f"tested {', '.join(TESTED_SGLANG_VERSIONS)}. Install one of these."
        )


def read_steps(package: Path) -> dict[str, bool | None]:
    """Read from the source, without importing it, which functions are steps.

    Args:
        package: folder of an `sglang` package.

    Returns:
        By target of `SERVING_PATH`: whether it is a step, None where there is no such function.
    """
    return {target: _is_step(package, target) for target in SERVING_PATH}


def has_impl_option(package: Path) -> bool:
    """Whether the SGLang in `package` brings `--radix-cache-impl` itself."""
    source = package / "srt" / "server_args.py"
    return source.is_file() and '"--radix-cache-impl"' in source.read_text()


def _is_step(package: Path, target: str) -> bool | None:
    *module, owner, name = target.split(".")
    source = package.joinpath(*module[1:]).with_suffix(".py")
    if not source.is_file():
        return None
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == owner:
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == name:
                    return any(
                        isinstance(mark, ast.Name) and mark.id == STEP_DECORATOR
                        for mark in item.decorator_list
                    )
    return None
