"""Real SGLang engines for tests: started once, shared, stopped at the end."""

import contextlib
import json
import os
import pickle
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

STOCK = "sglang.srt.mem_cache.radix_cache:RadixCache"
PROBE = "tests.integration.probe:ProbeCache"


class EngineUnderTest:
    """An engine with short-hands for what the tests ask."""

    def __init__(self, model: Path, impl: str | None, config: dict[str, Any], **args: Any) -> None:
        import sglang

        # Scheduler processes inherit the environment, so set it for the start only.
        before = {
            key: os.environ.get(key) for key in ("RADIX_ROPE_CONFIG", "RADIX_ROPE_CACHE_IMPL")
        }
        os.environ["RADIX_ROPE_CONFIG"] = json.dumps(config)
        os.environ["RADIX_ROPE_CACHE_IMPL"] = PROBE
        if impl is not None and ":" in impl:
            from sglang.srt.plugins import load_plugins

            from radix_rope.integration.options import register_impl

            load_plugins()
            register_impl(impl)
            os.environ["RADIX_ROPE_CACHE_IMPL"] = f"{PROBE},{impl}"
        others = {process.pid for process in psutil.Process().children(recursive=True)}
        try:
            self.engine = sglang.Engine(
                **{
                    "model_path": str(model),
                    "dtype": "float32",
                    "max_total_tokens": 16000,
                    "max_running_requests": 32,
                    "disable_cuda_graph": True,
                    # An idle scheduler would otherwise keep one of two cores busy.
                    "sleep_on_idle": True,
                    "radix_cache_backend": impl,
                    "random_seed": 1,
                    "log_level": "warning",
                    **args,
                }
            )
        finally:
            for key, value in before.items():
                os.environ.pop(key, None)
                if value is not None:
                    os.environ[key] = value
        self.processes = [
            process
            for process in psutil.Process().children(recursive=True)
            # The resource tracker serves all engines of this process.
            if process.pid not in others and "resource_tracker" not in " ".join(process.cmdline())
        ]

    def activate(self) -> None:
        """Make this engine the one that SGLang's process-wide configuration describes.

        A process has one; what starts last replaces it, and requests are checked against it.
        """
        from sglang.srt.runtime_context import publish

        publish(self.engine.server_args, role="tokenizer")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 4,
        sampling: Sequence[dict[str, Any]] | dict[str, Any] | None = None,
        **args: Any,
    ) -> list[dict[str, Any]]:
        """Greedy completions of token-id prompts, sent together.

        sampling: more sampling parameters, for all or for each.
        """
        from sglang.srt.managers.io_struct import GenerateReqInput

        greedy = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        more = [{}] * len(prompts) if sampling is None else sampling
        more = [more] * len(prompts) if isinstance(more, dict) else more
        # Engine.generate knows fewer arguments (no extra_key) than the request has.
        request = GenerateReqInput(
            input_ids=[list(p) for p in prompts],
            sampling_params=[{**greedy, **own} for own in more],
            **args,
        )
        generator = self.engine.tokenizer_manager.generate_request(request, None)
        result: list[dict[str, Any]] = self.engine.loop.run_until_complete(anext(generator))
        return result

    def one(self, prompt: Sequence[int], max_new_tokens: int = 4, **args: Any) -> dict[str, Any]:
        """One greedy completion."""
        return self.generate([prompt], max_new_tokens, **args)[0]

    def probe(self, function: str, **arguments: Any) -> Any:
        """Run a function of `probe.py` in the scheduler process."""
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "result"
            self.engine.collective_rpc(
                "radix_rope_probe",
                function=function,
                output=str(output),
                arguments=pickle.dumps(arguments),
            )
            return pickle.loads(output.read_bytes())

    def flush(self) -> None:
        """Empty the cache."""
        # An answer is sent a moment before the scheduler counts as idle.
        for _ in range(100):
            if self.engine.flush_cache().success:
                return
            time.sleep(0.1)
        raise AssertionError("the scheduler did not become idle")

    def assert_nothing_lost(self) -> None:
        """Every slot is free or in the tree, nothing is locked or failed, tree and index agree."""
        for _ in range(100):
            state = self.probe("accounting")
            if state["free_requests"] == state["requests"]:
                break
            time.sleep(0.1)
        assert state["available"] + state["evictable"] == state["total"], state
        assert state["protected"] == 0, state
        assert state["free_requests"] == state["requests"], state
        # What failed is served all the same, so that no answer would show it.
        assert state["fallbacks"] == 0, state

    def stop(self) -> None:
        """End this engine's processes, and no others.

        `Engine.shutdown` kills every child of this process, which other
        engines' watchdogs would take for a crash.
        """
        watchdog = self.engine.tokenizer_manager._subprocess_watchdog
        if watchdog is not None:
            watchdog.stop()
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self.processes, timeout=30)


def shifted(result: dict[str, Any]) -> int:
    """Tokens a request took from approximate KV."""
    details = result["meta_info"]["cached_tokens_details"]
    return 0 if details is None else int(details.get("shifted", 0))


def exact(result: dict[str, Any]) -> int:
    """Tokens a request took from an exact prefix."""
    details = result["meta_info"]["cached_tokens_details"]
    return 0 if details is None else int(details["device"])
