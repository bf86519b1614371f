"""Server processes for benchmarks that talk HTTP: SGLang workers and SGLang's router.

Owns starting them on a free port of 127.0.0.1, asking them, and ending them by process id. May not
know what is measured.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from radix_rope.config import ENV_VAR

STOCK_CACHE = "sglang.srt.mem_cache.radix_cache:RadixCache"
OUR_CACHE = "radix_rope"

_START_S = 600
_ANSWER_S = 600
_LOG_LINES_SHOWN = 30


class ServerError(RuntimeError):
    """A server that did not start; the message ends with the last lines of its log."""


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


class Server:
    """One process that serves HTTP on 127.0.0.1; a context manager that ends it.

    Leaving the context asks the process to end; an exception in it ends it at once.
    """

    def __init__(
        self, command: Sequence[str], port: int, log: Path, environment: Mapping[str, str] = {}
    ) -> None:
        """Start it; `wait_until_ready` waits for it."""
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._command = list(command)
        self._log = log
        inherited = {k: v for k, v in os.environ.items() if k != ENV_VAR}
        self._environment = {**inherited, **environment}
        self.start()

    def start(self) -> None:
        """Start the process again after `stop` or `kill`, on the same port."""
        with self._log.open("a") as stream:
            self._process = subprocess.Popen(
                self._command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    def wait_until_ready(self, path: str = "/health") -> None:
        """Wait until a GET of `path` succeeds.

        Raises:
            ServerError: the process ended, or is not ready after ten minutes.
        """
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self.get(path)
                return
            except OSError:
                time.sleep(0.2)
        lines = self.log().splitlines()[-_LOG_LINES_SHOWN:]
        raise ServerError(
            f"{' '.join(self._command[1:4])} ... (exit code {self._process.poll()}) did not become "
            "ready; the end of its log:\n" + "\n".join(lines)
        )

    @property
    def pid(self) -> int:
        """Process id of the process that was started, the parent of all others."""
        return self._process.pid

    def log(self) -> str:
        """Everything it printed so far."""
        return self._log.read_text(errors="replace")

    def get(self, path: str) -> str:
        """The body of a GET."""
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            body: bytes = answer.read()
            return body.decode()

    def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] = {}) -> Any:
        """The JSON answer to a POST of JSON."""
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **headers},
        )
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            return json.load(answer)

    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 1,
        *,
        extra_key: str | None = None,
        headers: Mapping[str, str] = {},
    ) -> Answer:
        """Greedy answer to a prompt of token ids."""
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
        answer = self.post("/generate", body, headers)
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
        """Empty the cache of a worker."""
        # An answer is sent a moment before the scheduler counts as idle.
        for _ in range(300):
            try:
                self.post_empty("/flush_cache")
                return
            except urllib.error.HTTPError:
                time.sleep(0.1)
        raise ServerError(f"{self.url} did not become idle, so its cache cannot be emptied")

    def post_empty(self, path: str) -> None:
        """A POST without a body whose answer does not matter."""
        request = urllib.request.Request(self.url + path, b"", method="POST")
        with urllib.request.urlopen(request, timeout=_ANSWER_S):
            pass

    def kill(self) -> None:
        """End the process and those it started at once, as a crash would."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Ask the process to end, and end it after a minute."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Whoever interrupts a benchmark should not have to wait for it.
        if kind is None:
            self.stop()
        else:
            self.kill()


def worker(
    model: Path,
    name: str,
    cache: str,
    log: Path,
    *,
    max_total_tokens: int,
    layers: int | None = None,
    config: str = "{}",
) -> Server:
    """Start an SGLang worker.

    name: what its answers carry in `Answer.worker` (SGLang's `--weight-version`).
    cache: `STOCK_CACHE` or `OUR_CACHE`.
    layers: only so many layers, with random weights. Counts do not depend on weights; this makes
        prefill cheap where nothing but counts is measured.
    config: options of radix_rope, as JSON.
    """
    port = _free_port()
    command = [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--max-total-tokens", str(max_total_tokens), "--weight-version", name),
        *("--disable-cuda-graph", "--sleep-on-idle", "--enable-cache-report"),
        *("--random-seed", "1", "--radix-cache-impl", cache),
    ]
    if layers is not None:
        override = json.dumps({"num_hidden_layers": layers})
        command += ["--load-format", "dummy", "--json-model-override-args", override]
    return Server(command, port, log, {ENV_VAR: config} if cache == OUR_CACHE else {})


def router(workers: Sequence[Server], policy: str, log: Path, *options: str) -> Server:
    """Start SGLang's router in front of running workers; it is ready when it knows them all.

    options: more of `sglang-router launch`.
    """
    port = _free_port()
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"),
        *("--port", str(port), "--prometheus-host", "127.0.0.1"),
        *("--prometheus-port", str(_free_port()), "--worker-startup-check-interval", "1"),
        *("--policy", policy, "--log-level", "warn", *options),
        *("--worker-urls", *(one.url for one in workers)),
    ]
    started = Server(command, port, log)
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


def exit_on_termination() -> None:
    """Let SIGTERM end this process as Ctrl-C does, so that the servers it started end too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
