"""The client against a server that answers as it is told: times, counts, failures."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from bench.serving.__main__ import _running
from bench.serving.client import Client, RequestError


class Handler(BaseHTTPRequestHandler):
    """Streams one chunk; the first prompt token says of which kind."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body.get("input_ids") or body.get("prompt")
        if prompt[0] == 13:
            self.send_error(400, "unlucky")
            return
        chunk: dict[str, Any]
        if self.path == "/generate":
            meta: dict[str, Any] = {
                "prompt_tokens": len(prompt),
                "completion_tokens": 1,
                "cached_tokens": 7,
                "cached_tokens_details": {"device": 2, "shifted": 5},
            }
            if prompt[0] == 2:
                meta["cached_tokens_details"]["recomputed"] = 4
            chunk = {"text": "" if prompt[0] == 0 else "a", "meta_info": meta}
        else:
            chunk = {"choices": [{"text": "a"}], "usage": {"prompt_tokens": len(prompt)}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "its-name"}]}')

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Tokenizer:
    """One token a character."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(c) for c in text]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("first", [0, 1])
def test_a_first_token_counts_with_and_without_text(url: str, first: int) -> None:
    answer = Client("one", url, "sglang", "m", Tokenizer()).one((first, *range(9)))
    assert answer.ttft_ms > 0
    assert (answer.prompt_tokens, answer.exact_tokens, answer.shifted_tokens) == (10, 2, 5)
    assert answer.computed_tokens == 3


def test_what_a_second_pass_computes_is_computed(url: str) -> None:
    answer = Client("one", url, "sglang", "m", Tokenizer()).one((2, *range(9)))
    assert (answer.recomputed_tokens, answer.computed_tokens) == (4, 10 - 2 - 5 + 4)


def test_other_servers_report_no_shares(url: str) -> None:
    answer = Client("one", f"{url}/", "openai", "m", Tokenizer()).one((1, 2, 3))
    assert answer.ttft_ms > 0
    assert (answer.prompt_tokens, answer.computed_tokens) == (3, None)


def test_a_running_server_is_asked_for_its_model(url: str) -> None:
    (client,) = _running([f"llama.cpp={url}/v1/"], Tokenizer())
    assert (client.name, client.base_url, client._model) == ("llama.cpp", url, "its-name")


def test_a_burst_has_the_metrics_of_sglang(url: str) -> None:
    client = Client("one", url, "sglang", "m", Tokenizer())
    burst = client.burst([(1, 2), (3, 4, 5)], float("inf"), 1, seed=0)
    assert burst.metrics["completed"] == 2
    assert burst.metrics["total_input"] == 5
    assert burst.metrics["p99_ttft_ms"] >= burst.metrics["median_ttft_ms"] > 0
    assert [answer.prompt_tokens for answer in burst.answers] == [2, 3]


def test_a_refused_request_is_an_error(url: str) -> None:
    with pytest.raises(RequestError, match=r"one .*unlucky"):
        Client("one", url, "sglang", "m", Tokenizer()).one((13,))
