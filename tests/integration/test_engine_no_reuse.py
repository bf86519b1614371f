"""Servers that have nothing to reuse: radix_rope stands aside and says so."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radix_rope.integration import seams
from tests.integration.engines import EngineUnderTest, shifted

pytestmark = pytest.mark.engine

Documents = list[list[int]]

ARGS: dict[str, Any] = {
    "max_running_requests": 8,
    "max_total_tokens": 3000,
    "context_length": 2500,
    "chunked_prefill_size": 256,
}


def ask(engine: EngineUnderTest, request: Any) -> Any:
    manager = engine.engine.tokenizer_manager
    return engine.engine.loop.run_until_complete(anext(manager.generate_request(request, None)))


@pytest.fixture
def embedder(
    tiny_folder: Path, capfd: pytest.CaptureFixture[str]
) -> Iterator[tuple[EngineUnderTest, str]]:
    """An engine, and what was written while it started."""
    engine = EngineUnderTest(tiny_folder, "radix_rope", {}, is_embedding=True, **ARGS)
    yield engine, "".join(capfd.readouterr())
    engine.stop()


def test_embeddings_are_exact(embedder: tuple[EngineUnderTest, str], documents: Documents) -> None:
    from sglang.srt.managers.io_struct import EmbeddingReqInput

    engine, log = embedder
    assert "radix_rope: an embedding model pools over every token of a prompt" in log
    assert "--disable-radix-cache" not in log

    def embed(tokens: list[int]) -> list[float]:
        result: list[float] = ask(engine, EmbeddingReqInput(input_ids=tokens))["embedding"]
        return result

    prompt = documents[5][:20] + documents[0] + documents[6][:10]
    cold = embed(prompt)
    assert np.isfinite(cold).all() and np.any(cold)
    engine.flush()
    embed(documents[0])
    np.testing.assert_array_equal(embed(prompt), cold)
    # Only requests are looked at in this server, nothing on the way of a batch.
    forms = engine.probe("forms")
    assert {target for target, form in forms.items() if form != "none"} <= {seams.ADD_REQUEST}
    engine.assert_nothing_lost()


@pytest.fixture
def uncached(
    tiny_folder: Path, capfd: pytest.CaptureFixture[str]
) -> Iterator[tuple[EngineUnderTest, str]]:
    """An engine, and what was written while it started."""
    # SGLang makes bfloat16 of input embeddings whatever the model's dtype.
    engine = EngineUnderTest(
        tiny_folder, "radix_rope", {}, disable_radix_cache=True, dtype="bfloat16", **ARGS
    )
    yield engine, "".join(capfd.readouterr())
    engine.stop()


def test_without_a_radix_cache_nothing_is_reused(
    uncached: tuple[EngineUnderTest, str], documents: Documents
) -> None:
    from sglang.srt.managers.io_struct import GenerateReqInput

    engine, log = uncached
    assert "radix_rope: with --disable-radix-cache no KV outlives its request" in log
    prompt = documents[5][:20] + documents[0] + documents[6][:10]
    cold = engine.one(prompt, 6)
    engine.one(documents[0])
    warm = engine.one(prompt, 6)
    assert warm["output_ids"] == cold["output_ids"]
    assert warm["meta_info"]["cached_tokens"] == shifted(warm) == 0
    # The one way in which SGLang takes input embeddings.
    rng = np.random.default_rng(1)
    vectors = (rng.standard_normal((40, 128)) * 0.12).tolist()
    request = GenerateReqInput(
        input_embeds=vectors, sampling_params={"temperature": 0, "max_new_tokens": 3}
    )
    assert len(ask(engine, request)["output_ids"]) == 3
    engine.assert_nothing_lost()
