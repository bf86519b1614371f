"""`sglang serve` as a user starts it: options, usage field, log line, clean stop."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine


class Server:
    """A server process, its port and its log."""

    def __init__(self, model: Path, log: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log_path = log
        command = [
            str(Path(sys.executable).with_name("sglang")), "serve",
            "--model-path", str(model), "--host", "127.0.0.1", "--port", str(self.port),
            "--dtype", "float32", "--max-total-tokens", "8000", "--sleep-on-idle",
            "--enable-cache-report", *options,
        ]  # fmt: skip
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RADIX_ROPE_CO")}
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                command, stdout=stream, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )  # fmt: skip

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log_path.read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(self.log_path.read_text()[-3000:])

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            result: dict[str, Any] = json.load(answer)
            return result

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    server = Server(
        model_folder, log,
        "--radix-cache-impl", "radix_rope", "--radix-rope-config", '{"recompute_tokens": 8}',
    )  # fmt: skip
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def test_usage_details_and_log_line(
    server: Server, documents: list[list[int]], encode: Callable[[str], list[int]]
) -> None:
    head = encode("Something else first. ")
    first = {"prompt": documents[0], "max_tokens": 2, "temperature": 0, "model": "default"}
    cold = server.post("/v1/completions", first)
    moved = server.post("/v1/completions", {**first, "prompt": head + documents[0] + head})
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert moved["usage"]["prompt_tokens_details"]["cached_tokens"] == 300 - 8
    native = server.post(
        "/generate",
        {
            "input_ids": documents[1][:20] + documents[0] + documents[1][20:40],
            "sampling_params": {"max_new_tokens": 2, "temperature": 0},
        },
    )
    details = native["meta_info"]["cached_tokens_details"]
    assert (details["device"], details["shifted"]) == (0, 300 - 8)
    assert native["meta_info"]["cached_tokens"] == 300 - 8
    log = server.log_path.read_text()
    assert f"#cached-token: 0, #shifted-token: {300 - 8}, " in log
    assert f"#new-token: {20 + 8 + 20}, #cached-token: 0, #shifted-token: {300 - 8}, " in log


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_options_of_a_request_on_every_api(
    server: Server, encode: Callable[[str], list[int]], path: str
) -> None:
    def body(options: dict[str, Any]) -> dict[str, Any]:
        custom = {"radix_rope": options}
        if path == "/generate":
            return {"text": "Hello", "sampling_params": {"custom_params": custom}}
        said = {"prompt": "Hello"} if path == "/v1/completions" else {
            "messages": [{"role": "user", "content": "Hello"}]
        }  # fmt: skip
        return {**said, "model": "default", "max_tokens": 2, "custom_params": custom}

    server.post(path, body({"mode": "exact"}))
    with pytest.raises(urllib.error.HTTPError) as error:
        server.post(path, body({"mode": "quick"}))
    assert error.value.code == 400
    assert "one of shifted, exact" in error.value.read().decode()


def test_no_prompt_content_in_the_log(server: Server, encode: Callable[[str], list[int]]) -> None:
    secret = "Zanzibarquux"
    server.post("/v1/completions", {"prompt": f"{secret} " * 90, "max_tokens": 1, "model": "x"})
    log = server.log_path.read_text()
    assert secret not in log
    assert ", ".join(map(str, encode(f"{secret} ")[:3])) not in log


def test_an_unknown_option_stops_the_server_at_once(model_folder: Path, tmp_path: Path) -> None:
    server = Server(
        model_folder, tmp_path / "log",
        "--radix-cache-impl", "radix_rope", "--radix-rope-config", '{"min_run": 8}',
    )  # fmt: skip
    try:
        assert server.process.wait(timeout=120) != 0
    finally:
        server.stop()
    log = server.log_path.read_text()
    assert "unknown option 'min_run'" in log
    assert "min_run_tokens: integer from 1" in log
