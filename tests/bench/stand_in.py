"""An HTTP server with the API of an SGLang worker, over a prefix cache of token ids and no model.

Also stands in for the router: it serves all requests itself. Started with a port, the name its
answers carry, and after how many requests it refuses them (-1: never).
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

from bench.servers import free_port
from bench.workers import Worker


def stand_in(name: str, log: Path, fails_after: int = -1) -> Worker:
    """Start one in a process of its own."""
    port = free_port()
    command = [sys.executable, "-m", "tests.bench.stand_in", str(port), name, str(fails_after)]
    return Worker(name, command, port, log)


class _Handler(BaseHTTPRequestHandler):
    held: set[tuple[object, ...]]
    requests: count[int]
    name: str
    fails_after: int

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/flush_cache":
            self.held.clear()
            return self._answer({})
        if next(self.requests) == self.fails_after:
            return self._answer({"error": "out of\nmemory"}, 500)
        asked = json.loads(body)
        prompt = asked["input_ids"]
        # One prefix per increment would do; every prefix, hashed on the way, is simplest.
        hashes, state = [], hash(asked.get("extra_key"))
        for token in prompt:
            state = hash((state, token))
            hashes.append((state,))
        # The last token of a prompt is always computed.
        hits = next((i for i, one in enumerate(hashes[:-1]) if one not in self.held), None)
        self.held.update(hashes)
        meta: dict[str, Any] = {
            "prompt_tokens": len(prompt),
            "cached_tokens": len(prompt) - 1 if hits is None else hits,
            "cached_tokens_details": None,
            "weight_version": self.name,
        }
        tokens = [1] * asked["sampling_params"]["max_new_tokens"]
        # As in SGLang, the KV of an answer's last token is never computed.
        for token in tokens[:-1]:
            state = hash((state, token))
            self.held.add((state,))
        self._answer({"meta_info": meta, "output_ids": tokens})

    def _answer(self, body: dict[str, Any], status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


def _serve(port: int, name: str, fails_after: int) -> None:
    _Handler.held, _Handler.requests = set(), count()
    _Handler.name, _Handler.fails_after = name, fails_after
    ThreadingHTTPServer(("127.0.0.1", port), _Handler).serve_forever()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
