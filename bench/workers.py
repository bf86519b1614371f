"""SGLang workers and SGLang's router, asked one request at a time for what they reused.

Owns requests and the counts in their answers. May not know what is measured.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from bench.servers import Server, ServerError, free_port, sglang_command


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request reports: prompt tokens by where their KV came from, and who served it.

    Attributes:
        prompt_tokens: length of the prompt.
        exact_tokens: prompt tokens from an exact prefix.
        shifted_tokens: prompt tokens from approximate KV, whatever its offset was.
        output: the token ids of the answer.
        worker: the `name` of the worker that answered.
    """

    prompt_tokens: int
    exact_tokens: int
    shifted_tokens: int
    output: tuple[int, ...]
    worker: str

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that went through the model."""
        return self.prompt_tokens - self.exact_tokens - self.shifted_tokens


class Worker(Server):
    """A server that generates: an SGLang worker, or the router in front of some."""

    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 1,
        *,
        extra_key: str | None = None,
        headers: Mapping[str, str] = {},
    ) -> Answer:
        """Greedy answer to a prompt of token ids.

        Raises:
            ServerError: it refused the request, or is gone.
        """
        body: dict[str, Any] = {
            "input_ids": list(prompt),
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": max_new_tokens,
                "ignore_eos": True,
            },
        }
        if extra_key is not None:
            body["extra_key"] = extra_key
        try:
            answer = self.post("/generate", body, headers)
        except urllib.error.HTTPError as error:
            reason = " ".join(error.read().decode(errors="replace").split())
            raise ServerError(f"{self.name} refused a request: {error}: {reason}") from error
        except (OSError, HTTPException) as error:
            raise ServerError(f"{self.name} does not answer: {error}") from error
        meta = answer["meta_info"]
        shifted = int((meta["cached_tokens_details"] or {}).get("shifted", 0))
        return Answer(
            meta["prompt_tokens"],
            meta["cached_tokens"] - shifted,
            shifted,
            tuple(answer["output_ids"]),
            meta["weight_version"],
        )

    def flush(self) -> None:
        """Empty the cache of a worker.

        Raises:
            ServerError: it is never idle, or is gone.
        """
        # An answer is sent a moment before the scheduler counts as idle.
        for _ in range(300):
            try:
                self.post_empty("/flush_cache")
                return
            except urllib.error.HTTPError:
                time.sleep(0.1)
            except (OSError, HTTPException) as error:
                raise ServerError(f"{self.name} does not answer: {error}") from error
        raise ServerError(f"{self.name} did not become idle, so its cache cannot be emptied")


def worker(
    model: Path,
    name: str,
    cache: str,
    log: Path,
    *,
    max_total_tokens: int,
    layers: int | None = None,
) -> Worker:
    """Start an SGLang worker.

    name: what its answers carry in `Answer.worker` (SGLang's `--weight-version`).
    cache: `STOCK_CACHE` or `OUR_CACHE`.
    layers: only so many layers, with random weights; None or 0 takes the whole model. Counts do
        not depend on weights; this makes prefill cheap where nothing but counts is measured.
    """
    port = free_port()
    options = [
        *("--dtype", "float32", "--max-total-tokens", str(max_total_tokens)),
        *("--weight-version", name, "--disable-cuda-graph", "--enable-cache-report"),
        *("--random-seed", "1", "--radix-cache-impl", cache),
    ]
    if layers:
        override = json.dumps({"num_hidden_layers": layers})
        options += ["--load-format", "dummy", "--json-model-override-args", override]
    # Two workers at once, each with a thread per core, would wait for each other's threads.
    threads = {"OMP_NUM_THREADS": "1"}
    return Worker(name, sglang_command(model, port, *options), port, log, threads)


def router(workers: Sequence[Server], policy: str, log: Path, *options: str) -> Worker:
    """Start SGLang's router in front of running workers; it is ready when it knows them all.

    options: more of `sglang-router launch`.
    """
    port = free_port()
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"),
        *("--port", str(port), "--prometheus-host", "127.0.0.1"),
        *("--prometheus-port", str(free_port()), "--worker-startup-check-interval", "1"),
        *("--policy", policy, "--log-level", "warn", *options),
        *("--worker-urls", *(one.url for one in workers)),
    ]
    started = Worker("the router", command, port, log)
    try:
        started.wait_until_ready("/readiness")
        deadline = time.monotonic() + 60
        while healthy_workers(started) != {one.url for one in workers}:
            if time.monotonic() > deadline:
                raise ServerError(f"the router did not find its workers: {started.get('/workers')}")
            time.sleep(0.2)
    except BaseException:
        started.stop()
        raise
    return started


def healthy_workers(started: Server) -> set[str]:
    """The addresses of the workers that a router takes for healthy."""
    listed = json.loads(started.get("/workers"))["workers"]
    return {one["url"] for one in listed if one["is_healthy"]}
