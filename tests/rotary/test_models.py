"""End to end on small random-weight models of several architectures, through SGLang's engine.

Each group runs in a process of its own (`tiny_models`): SGLang's loader, model classes, KV
pools, attention backend and prefill are the real ones. Layer-0 keys depend on the token and
its position alone, so after a move they must equal the keys prefilled in place, to the bound.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("sglang")

GROUPS: dict[str, tuple[str, str, list[str]]] = {
    # At most one model with experts, at the end: SGLang keeps its expert table per process.
    "float32": (
        "float32",
        "auto",
        [
            "llama3-scaling",
            "qwen2",
            "qwen3-yarn",
            "phi-partial",
            "glm4-partial-pairs",
            "gemma3-two-thetas",
            "cohere2-half-without",
            "phi3-longrope",
            "phi3-longrope-short",
            "gpt2-learned",
            "llama-dynamic",
            "deepseek-v2-mla",
        ],
    ),
    "bfloat16": (
        "bfloat16",
        "auto",
        ["llama3-scaling", "gemma3-two-thetas", "qwen3-moe"],
    ),
    "fp8": ("bfloat16", "fp8_e4m3", ["llama3-scaling", "glm4-partial-pairs", "deepseek-v2-mla"]),
}
REFUSED = {
    "phi3-longrope": "--context-length 1024 or less",
    "gpt2-learned": "learned positions",
    "llama-dynamic": "DynamicNTKScaling",
}


@pytest.fixture(scope="module", params=GROUPS)
def group(request: pytest.FixtureRequest) -> tuple[str, dict[str, dict[str, Any]]]:
    dtype, kv_dtype, names = GROUPS[request.param]
    done = subprocess.run(
        [sys.executable, "-m", "tests.rotary.tiny_models", dtype, kv_dtype, *names],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    results = {result["model"]: result for result in map(json.loads, lines)}
    assert list(results) == names, done.stderr[-3000:]
    return request.param, results


@pytest.mark.engine
def test_layer0_keys_after_a_move_equal_those_in_place(
    group: tuple[str, dict[str, dict[str, Any]]],
) -> None:
    name, results = group
    for model, result in results.items():
        if model in REFUSED:
            assert REFUSED[model] in result["refused"]
            continue
        assert "refused" not in result, result
        # In units of the bound; a NaN is no pass.
        assert 0.0 < result["proof"] <= 1.0, result
        assert 0.0 < result["layer0"] <= 1.0, result
        expected = {"float32": "float32", "bfloat16": "bfloat16", "fp8": "float8_e4m3fn"}
        assert result["cache"] == f"torch.{expected[name]}"
    if name == "float32":
        # Gemma 3: the second layer's angles come from the model, scaled by 8, and not from
        # the rotary module that the layer holds.
        assert results["gemma3-two-thetas"]["frequency"] == [1.0, 0.125]
        assert results["cohere2-half-without"]["rotary"][1][1] == 0
        assert results["phi-partial"]["rotary"][0] == [0, 16, True]
        assert results["glm4-partial-pairs"]["rotary"][0] == [0, 16, False]
        assert results["deepseek-v2-mla"]["rotary"][0] == [64, 16, False]
        assert results["deepseek-v2-mla"]["pool"] == "MLATokenToKVPool"
