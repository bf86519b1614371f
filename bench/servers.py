"""Server processes for benchmarks and tests: on free ports of 127.0.0.1, ended by process id.

Owns processes, their logs, and how SGLang is started. May not know what is asked of them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from radix_rope.config import ENV_VAR

STOCK_CACHE = "sglang.srt.mem_cache.radix_cache:RadixCache"
OUR_CACHE = "radix_rope"

_START_S = 600
_STOP_S = 60
_ANSWER_S = 600
_LOG_LINES_SHOWN = 30


class ServerError(RuntimeError):
    """A server that did not do what it is for; where it did not start, with the end of its log."""


class Server:
    """One process that serves HTTP on 127.0.0.1, in a process group of its own.

    A context manager too: leaving it asks the process to end; an exception in it ends it at once.

    Args:
        name: for messages.
        command: starts it; it must listen on `port`.
        log: where its output goes, instead of what the file held before.
        variables: of its environment, besides those of this process.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        port: int,
        log: Path,
        variables: Mapping[str, str] = {},
    ) -> None:
        """Start it; `wait_until_ready` waits for it."""
        self.name = name
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._command = list(command)
        self._log = log
        self._variables = dict(variables)
        log.write_text("")
        self.start()

    def start(self) -> None:
        """Start the process again after `stop` or `kill`, on the same port."""
        # Options are given on the command line only, so that they can be listed.
        inherited = {key: value for key, value in os.environ.items() if key != ENV_VAR}
        with self._log.open("a") as stream:
            self._process = subprocess.Popen(
                self._command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**inherited, **self._variables},
                start_new_session=True,
            )
        self._ended = False

    @property
    def pid(self) -> int:
        """Process id of the process that was started, the parent of all others."""
        return self._process.pid

    def wait_until_ready(self, path: str = "/health") -> None:
        """Wait until a GET of `path` succeeds.

        Raises:
            ServerError: the process ended, or is not ready after ten minutes.
        """
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if (code := self._process.poll()) is not None:
                raise ServerError(
                    f"{self.name} ended with exit code {code} while it started. {self._log_end()}"
                )
            try:
                self.get(path)
                return
            except OSError:
                time.sleep(0.2)
        raise ServerError(f"{self.name} did not start in {_START_S} s. {self._log_end()}")

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

    def post_empty(self, path: str) -> None:
        """A POST without a body whose answer does not matter."""
        request = urllib.request.Request(self.url + path, b"", method="POST")
        with urllib.request.urlopen(request, timeout=_ANSWER_S):
            pass

    def terminate(self) -> None:
        """Ask the process to end itself and those it started; returns at once."""
        if self._process.poll() is None:
            self._process.terminate()

    def stop(self) -> None:
        """Ask the process to end, and end after a minute what is left of it."""
        self.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_STOP_S)
        self.kill()

    def kill(self) -> None:
        """End the process and those it started at once, as a crash would."""
        if not self._ended:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._ended = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Whoever interrupts a benchmark should not have to wait for it.
        if kind is None:
            self.stop()
        else:
            self.kill()

    def _log_end(self) -> str:
        lines = self.log().splitlines()[-_LOG_LINES_SHOWN:]
        return "\n".join([f"The end of {self._log}:", *lines])


@contextmanager
def stopped_at_exit() -> Iterator[list[Server]]:
    """A list of servers that are stopped when the context ends, also by SIGTERM or SIGHUP.

    Servers run in sessions of their own, so a terminal that is closed reaches only this process.
    """

    def leave(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    servers: list[Server] = []
    # What is ignored already stays so: `nohup` is there to outlive the terminal.
    before = {
        signum: handler
        for signum in (signal.SIGTERM, signal.SIGHUP)
        if (handler := signal.getsignal(signum)) is not signal.SIG_IGN
    }
    for signum in before:
        signal.signal(signum, leave)
    try:
        yield servers
    finally:
        # Who sends a signal may not wait long, and may send another.
        for signum in before:
            signal.signal(signum, signal.SIG_IGN)
        for server in servers:
            server.terminate()
        for server in servers:
            server.stop()
        for signum, handler in before.items():
            signal.signal(signum, handler)


def sglang_command(model: str | Path, port: int, *options: str) -> list[str]:
    """The command that starts an SGLang server. options: more of `sglang.launch_server`."""
    return [
        *(sys.executable, "-W", "ignore", "-m", "sglang.launch_server"),
        *("--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)),
        # An idle scheduler would keep a core busy that another server is measured on.
        *("--sleep-on-idle", *options),
    ]


def sglang_server(name: str, model: str | Path, options: Sequence[str], log: Path) -> Server:
    """Start an SGLang server."""
    port = free_port()
    return Server(name, sglang_command(model, port, *options), port, log)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
