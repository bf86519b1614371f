"""Sending requests with SGLang's own benchmark client, and its metrics.

Owns the adaptation of `sglang.benchmark.serving` (its request functions, arrival process and
metrics) to prompts of token ids. May not know workloads.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import requests
from sglang.benchmark import serving
from sglang.benchmark.datasets import DatasetRow

from bench.serving.records import Answer
from bench.serving.writer import Tokens

# What `sglang.benchmark.serving` reads from its command line while it sends requests.
_ARGUMENTS = argparse.Namespace(
    disable_stream=False,
    disable_ignore_eos=False,
    return_logprob=False,
    return_routed_experts=False,
    logprob_start_len=-1,
    top_logprobs_num=0,
    token_ids_logprob=None,
    temperature=0.0,
    top_p=1.0,
    cache_report=True,
    header=None,
    print_requests=False,
)


class RequestError(RuntimeError):
    """A server refused or lost a request; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests sent together: their answers, and SGLang's metrics over all of them.

    metrics: fields of `sglang.benchmark.serving.BenchmarkMetrics`.
    """

    answers: tuple[Answer, ...]
    metrics: dict[str, float]


class Client:
    """Speaks to one server.

    backend: `sglang` (its own API) or `openai` (completions with a prompt of token ids).
    """

    def __init__(self, name: str, base_url: str, backend: str, model: str, tokenizer: Any) -> None:
        """Keep the address; nothing is sent yet."""
        self.name = name
        self.base_url = base_url.rstrip("/")
        self.backend = backend
        self._model = model
        self._tokenizer = tokenizer
        self._kind, path = {
            "sglang": ("sglang", "/generate"),
            "openai": ("sglang-oai", "/v1/completions"),
        }[backend]
        self._api_url = self.base_url + path

    def flush(self) -> None:
        """Empty the server's cache, where it can be asked to."""
        if self.backend == "sglang":
            serving.flush_server_cache(self.base_url, self._kind)

    def attention_backend(self) -> str | None:
        """What the server computes attention with; None where it does not say."""
        if self.backend != "sglang":
            return None
        answer = requests.get(f"{self.base_url}/server_info", timeout=30)
        answer.raise_for_status()
        return str(answer.json()["attention_backend"])

    def one(self, prompt: Tokens, output_tokens: int = 1) -> Answer:
        """Send one request and wait for it."""
        return self.burst([prompt], float("inf"), output_tokens, seed=0).answers[0]

    def burst(self, prompts: Sequence[Tokens], rate: float, output_tokens: int, seed: int) -> Burst:
        """Send requests at `rate` per second (exponential gaps by `seed`; inf: all at once).

        Raises:
            RequestError: a request failed.
        """
        serving.set_global_args(_ARGUMENTS)
        np.random.seed(seed)
        rows = [DatasetRow(list(p), len(p), output_tokens) for p in prompts]
        outputs, seconds = asyncio.run(self._send(rows, rate))
        for output in outputs:
            if not output.success:
                raise RequestError(f"{self.name} ({self._api_url}): {output.error.strip()}")
            # A first token that is half a character has no text yet, so no time was taken.
            output.ttft = output.ttft or output.latency
        metrics, _ = serving.calculate_metrics(rows, outputs, seconds, self._tokenizer, self._kind)
        return Burst(
            tuple(map(self._answer, outputs)),
            {name: float(value) for name, value in vars(metrics).items()},
        )

    async def _send(self, rows: list[DatasetRow], rate: float) -> tuple[list[Any], float]:
        send = serving.ASYNC_REQUEST_FUNCS[self._kind]
        begin = perf_counter()
        tasks = []
        async for row in serving.get_request(rows, rate):
            request = serving.RequestFuncInput(
                prompt=row.prompt,
                api_url=self._api_url,
                prompt_len=row.prompt_len,
                output_len=row.output_len,
                model=self._model,
                # Stock SGLang refuses an empty name.
                lora_name=None,
                image_data=None,
                extra_request_body={},
            )
            tasks.append(asyncio.create_task(send(request)))
        outputs = list(await asyncio.gather(*tasks))
        return outputs, perf_counter() - begin

    def _answer(self, output: Any) -> Answer:
        exact = shifted = None
        details = output.cached_tokens_details or {}
        if self.backend == "sglang":
            shifted = int(details.get("shifted", 0))
            exact = output.cached_tokens - shifted
        recomputed = int(details.get("recomputed", 0))
        return Answer(1e3 * output.ttft, output.prompt_len, exact, shifted, recomputed)
