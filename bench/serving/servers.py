"""Servers under test: started on free ports of 127.0.0.1, stopped by process id.

Owns processes and their logs. May not know what is asked of them.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import requests

_START_SECONDS = 600
_STOP_SECONDS = 60
_LOG_LINES_SHOWN = 30


class ServerError(RuntimeError):
    """A server did not start; the message holds the end of its log."""


@contextmanager
def stopped_at_exit() -> Iterator[list[Server]]:
    """A list of servers that are stopped when the context ends, also by SIGTERM."""

    def leave(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    servers: list[Server] = []
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield servers
    finally:
        # All are told before any is waited for: who sends SIGTERM may not wait long.
        for server in servers:
            server.terminate()
        for server in servers:
            server.stop()
        signal.signal(signal.SIGTERM, before)


class Server:
    """One SGLang server process, in a process group of its own.

    Args:
        name: for messages.
        model_path: folder of the model.
        options: further options of `sglang.launch_server`.
        log_path: where its output goes.
    """

    def __init__(self, name: str, model_path: str, options: Sequence[str], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{port}"
        command = [
            *(sys.executable, "-W", "ignore", "-m", "sglang.launch_server"),
            *("--model-path", model_path, "--host", "127.0.0.1", "--port", str(port)),
            # An idle scheduler would keep a core busy that another server is measured on.
            "--sleep-on-idle",
            *options,
        ]
        # Options are given on the command line only, so that they can be listed.
        inherited = {k: v for k, v in os.environ.items() if k != "RADIX_ROPE_CONFIG"}
        with log_path.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=inherited,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the launcher, the parent of the scheduler."""
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Return when it answers.

        Raises:
            ServerError: it ended, or took longer than ten minutes.
        """
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(
                    f"{self.name} ended with exit code {self._process.returncode} while it "
                    f"started. {self._log_end()}"
                )
            try:
                if requests.get(f"{self.base_url}/health", timeout=5).status_code == 200:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.5)
        raise ServerError(f"{self.name} did not start in {_START_SECONDS} s. {self._log_end()}")

    def terminate(self) -> None:
        """Ask the process to end itself and those it started; returns at once."""
        if self._process.poll() is None:
            self._process.terminate()

    def stop(self) -> None:
        """End the process and those it started."""
        self.terminate()
        try:
            self._process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _log_end(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
        return "\n".join([f"The end of {self.log_path}:", *lines])
