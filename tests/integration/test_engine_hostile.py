"""Everything at once on a small engine: what is computed is right, what is labelled true.

A small pool, few rows, tiny runs, chunks with decoding requests mixed in, overlap
scheduling, in-batch prefix order, and requests of every kind arriving one by one.
"""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.engines import EngineUnderTest, exact, shifted

pytestmark = pytest.mark.engine

Documents = list[list[int]]


@pytest.fixture(scope="module")
def tight(model_folder: Path) -> Iterator[EngineUnderTest]:
    engine = EngineUnderTest(
        model_folder,
        "radix_rope",
        {"check_plans": True, "min_run_tokens": 8, "recompute_tokens": 2, "stride": 4},
        max_running_requests=6,
        enable_mixed_chunk=True,
        chunked_prefill_size=128,
        max_total_tokens=2500,
        schedule_policy="lpm",
        context_length=2000,
    )
    yield engine
    engine.stop()


def requests(documents: Documents, seed: int) -> list[dict[str, Any]]:
    """Requests of every kind over few documents, each with the delay it arrives after."""
    rng = np.random.default_rng(seed)

    def piece() -> list[int]:
        document = documents[int(rng.integers(0, 4))]
        begin = int(rng.integers(0, 200))
        return document[begin : begin + int(rng.integers(20, 150))]

    made: list[dict[str, Any]] = []
    for i in range(30):
        prompt = documents[8 + i % 6][: int(rng.integers(1, 40))] + piece() + piece()
        if i % 7 == 3:
            prompt = [int(rng.integers(5, 500))] * int(rng.integers(1, 150))
        if i % 7 == 5:
            prompt = prompt[: int(rng.integers(1, 12))]
        made.append({"prompt": prompt, "delay": float(rng.random() * 0.4), "new": int(i % 4) * 4})
        if i % 5 == 2:
            start = int(rng.choice([0, len(prompt) // 2, len(prompt) - 1, len(prompt), -1]))
            made[-1] |= {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 2}
        if i % 5 == 4:
            made[-1] |= {"extra_key": "tenant", "priority": None}
    return made


def serve(
    engine: EngineUnderTest, load: list[dict[str, Any]], abort: Callable[[int], bool] | None = None
) -> list[Any]:
    """Send requests at their times; results in order, None for aborted ones."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    manager = engine.engine.tokenizer_manager

    async def one(i: int, wanted: dict[str, Any]) -> Any:
        args = {k: v for k, v in wanted.items() if k not in ("prompt", "delay", "new")}
        sampling = {"temperature": 0, "max_new_tokens": wanted["new"], "ignore_eos": True}
        await asyncio.sleep(wanted["delay"])
        kills = abort is not None and abort(i)
        request = GenerateReqInput(
            input_ids=wanted["prompt"],
            sampling_params=sampling,
            rid=f"r{i:02}",
            stream=kills,
            **args,
        )
        if not kills:
            return await anext(manager.generate_request(request, None))
        asyncio.get_running_loop().call_later(0.3 * (i % 3), manager.abort_request, f"r{i:02}")
        async for _ in manager.generate_request(request, None):
            pass
        return None

    async def all_of_them() -> list[Any]:
        work = asyncio.gather(*(one(i, wanted) for i, wanted in enumerate(load)))
        return await asyncio.wait_for(work, timeout=170)

    return list(engine.engine.loop.run_until_complete(all_of_them()))


def values(result: dict[str, Any], name: str) -> list[float]:
    entries = result["meta_info"].get(name) or []
    return [entry[0] for entry in entries if entry[0] is not None]


def test_rows_give_stock_answers_in_any_company(
    tight: EngineUnderTest, engines: Callable[[str], EngineUnderTest], documents: Documents
) -> None:
    tight.flush()
    # Runs are found and split off, but computed: whatever differs from stock is a bug.
    tight.probe("set_plan_options", recompute_all=True)
    load = requests(documents, seed=1)
    try:
        mine = serve(tight, load)
    finally:
        tight.probe("set_plan_options", recompute_all=False)
    stock = engines("stock")
    stock.flush()
    theirs = serve(stock, [{**wanted, "delay": 0.0} for wanted in load])
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert a["output_ids"] == b["output_ids"], i
        assert shifted(a) == 0
        for name in ("input_token_logprobs", "output_token_logprobs"):
            if name.startswith("output") and not load[i]["new"]:
                continue  # stock's own answer depends on what else was in the batch
            x, y = values(a, name), values(b, name)
            assert len(x) == len(y), (i, name)
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-3, err_msg=f"{i} {name}")
    tight.assert_nothing_lost()


def test_labels_stay_true_in_any_company(tight: EngineUnderTest, documents: Documents) -> None:
    tight.flush()
    load = requests(documents, seed=2)
    results = serve(tight, load, abort=lambda i: i % 6 == 1)
    assert sum(shifted(r) for r in results if r) > 300
    for wanted, result in zip(load, results, strict=True):
        if result is not None:
            cached = result["meta_info"]["cached_tokens"]
            assert cached == exact(result) + shifted(result) < len(wanted["prompt"])
            assert len(result["output_ids"]) == wanted["new"]
    tight.assert_nothing_lost()
    paths = []
    for wanted, result in zip(load, results, strict=True):
        if result is not None and wanted.get("extra_key") is None:
            path = wanted["prompt"] + result["output_ids"]
            paths.append((path, tight.probe("cached_kv", tokens=path)))
    tight.flush()
    exact_tokens = copied_tokens = 0
    for path, held in paths:
        if not held["nodes"]:
            continue
        tight.flush()
        tight.one(path, 1)
        plain = tight.probe("cached_kv", tokens=path)
        for begin, end, provenance in held["nodes"]:
            if provenance.exact:
                exact_tokens += end - begin
                for part in ("k", "v"):
                    np.testing.assert_allclose(
                        held[part][:, begin:end], plain[part][:, begin:end], rtol=0, atol=5e-3
                    )
            elif provenance.copied:
                copied_tokens += end - begin
                # Layer 0 sees token and position alone.
                np.testing.assert_allclose(
                    held["k"][0, begin:end], plain["k"][0, begin:end], rtol=0, atol=1e-3
                )
    assert exact_tokens > 100 and copied_tokens > 50
