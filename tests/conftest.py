"""Shared fixtures: the small model, its tokenizer, real engines, long text."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# `make test-patched`: the same tests against an SGLang built with `patches/`. The tree must
# be in front before anything imports sglang, here and in the processes that tests start.
PATCHED = os.environ.get("RADIX_ROPE_PATCHED") == "1"
if PATCHED:
    from radix_rope.patching import apply

    assert "sglang" not in sys.modules
    _root = str(apply()[0])
    sys.path.insert(0, _root)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_root, os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """SmolLM2-135M-Instruct in float32; fetched and converted on first use."""
    from radix_rope.models.fetch import fetch_model

    return fetch_model("smollm2-135m-instruct", None, "float32")


@pytest.fixture(scope="session")
def encode(model_folder: Path) -> Callable[[str], list[int]]:
    """Text to token ids, without special tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="session")
def documents(encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Distinct English documents of 300 tokens: no 16 tokens occur in two places."""
    from tests.texts import english_documents

    return english_documents(encode)


@pytest.fixture(scope="session")
def tiny_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama of random weights with SmolLM2's tokenizer."""
    from tests.integration.tiny_llama import write_tiny_llama

    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "one", model_folder, seed=1)


@pytest.fixture(scope="session")
def engines(model_folder: Path, tiny_folder: Path) -> Iterator[Callable[..., object]]:
    """Start engines by name; each is started once and stopped at the end of the session."""
    from tests.integration.engines import STOCK, EngineUnderTest

    kinds: dict[str, tuple[str | None, dict[str, object], dict[str, object]]] = {
        "stock": (STOCK, {}, {}),
        "shifted": ("radix_rope", {"check_plans": True}, {}),
        # Everything at once that changes how a prefill is cut.
        "chunked": (
            "radix_rope",
            {"check_plans": True, "min_run_tokens": 32},
            {
                "page_size": 16,
                "chunked_prefill_size": 256,
                "enable_mixed_chunk": True,
                "disable_overlap_schedule": True,
                "max_total_tokens": 4096,
            },
        ),
        # What a server can be asked for at once; also what two ranks are compared with.
        "features": (
            "radix_rope",
            {"check_plans": True, "min_run_tokens": 32, "recompute_tokens": 8},
            {
                "model_path": str(tiny_folder),
                "chunked_prefill_size": 256,
                "max_running_requests": 8,
                "max_total_tokens": 6000,
                "enable_priority_scheduling": True,
                "enable_return_hidden_states": True,
            },
        ),
        "bf16": ("radix_rope", {"check_plans": True}, {"dtype": "bfloat16"}),
    }
    started: dict[str, EngineUnderTest] = {}

    def start(name: str) -> EngineUnderTest:
        if name not in started:
            impl, config, args = kinds[name]
            started[name] = EngineUnderTest(model_folder, impl, config, **args)
        started[name].activate()
        return started[name]

    yield start
    for engine in started.values():
        engine.stop()
