"""Reuse at another offset on real engines that serve small models of several architectures.

Each engine loads a random-weight checkpoint with SGLang's own model class and our cache, and a
text is moved to a later and to an earlier offset. Keys and values that were copied must equal
those the engine computes in place after a flush. The checkpoint's attention adds nothing to the
hidden states, so this holds in every layer (and with it for every theta), not in layer 0 only.
Then the engine loads weights whose attention is at work, and its logits are held against
transformers': reuse leaves rows of a prefill, and every family must compute them right.

The bound is `rotary.proof.key_bound` in float32: per element, with r the norm of its pair,

    r * ((8 + c) * 2^-24 + (m + n) * frequency * 2^-22 + 2^-22)

for the model's own RoPE at both positions, its float32 angles, and the kernel's rotation, plus
c * 2^-24 of the largest key where the keys' content itself was summed in another order. c is
taken from the values, which carry no position: they differ by that alone, and by no more than
the worst case of float32 sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radix_rope.rotary.proof import key_bound
from radix_rope.rotary.reference import rotate
from tests.integration.engines import EngineUnderTest, exact, shifted
from tests.integration.tiny_checkpoints import write_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.long]

UNIT = 2.0**-24
NEAR, FAR, TEXT = 20, 407, 300
ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_total_tokens": 4096,
    "max_running_requests": 16,
}

# What the layers' rotations must look like: (rotary offset, rotary dim, NeoX halves).
FAMILIES: dict[str, list[tuple[int, int, bool]]] = {
    "llama3-scaling": [(0, 32, True)] * 2,
    "qwen2": [(0, 32, True)] * 2,
    "qwen3-yarn": [(0, 64, True)] * 2,
    "phi-partial": [(0, 16, True)] * 2,
    "glm4-partial-pairs": [(0, 16, False)] * 2,
    "gemma3-two-thetas": [(0, 32, True)] * 2,
    "cohere2-half-without": [(0, 32, False), (0, 0, True)],
    "deepseek-v2-mla": [(64, 16, False)] * 2,
}


def fresh(size: int, seed: int) -> list[int]:
    """Random tokens that no other call gives."""
    return np.random.default_rng(seed).integers(3, 128, size).tolist()


def moved_and_computed(engine: EngineUnderTest, begin: int, end: int) -> list[dict[str, Any]]:
    """The same request's cached KV: with a text moved from `begin` to `end`, and all computed."""
    text = fresh(TEXT, 1)
    request = [*fresh(end, 2), *text, 5]
    engine.flush()
    engine.one([*fresh(begin, 3), *text])
    answer = engine.one(request)
    assert (shifted(answer), exact(answer)) == (TEXT - 16, 0)
    moved = engine.probe("cached_kv", tokens=request)
    engine.flush()
    assert engine.one(request)["meta_info"]["cached_tokens"] == 0
    return [moved, engine.probe("cached_kv", tokens=request)]


Served = tuple[str, EngineUnderTest, dict[str, Any], Path]


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """An engine on a checkpoint with silent attention, and another checkpoint where it is not."""
    family = request.param
    silent, live = (tmp_path_factory.mktemp(family) for _ in range(2))
    config = write_checkpoint(family, silent)
    write_checkpoint(family, live, silent=False)
    engine = EngineUnderTest(silent, "radix_rope", {"check_plans": True}, **ENGINE)
    yield family, engine, config, live
    engine.stop()


def test_moved_keys_equal_those_computed_in_place(served: Served) -> None:
    family, engine, config, _ = served
    specs = engine.probe("rope_specs")
    assert [(s.rotary_offset, s.rotary_dim, s.is_neox) for s in specs] == FAMILIES[family]
    for begin, end in ((NEAR, FAR), (FAR, NEAR)):
        moved, computed = moved_and_computed(engine, begin, end)
        copied = [(b, e) for b, e, provenance in moved["nodes"] if provenance.copied]
        assert copied == [(end + 16, end + TEXT)]
        assert not any(p.copied for _, _, p in computed["nodes"])
        rows = slice(*copied[0])
        for layer, spec in enumerate(specs):
            both = (moved, computed)
            values = [torch.from_numpy(kv["v"][layer, rows]).double() for kv in both]
            keys = [torch.from_numpy(kv["k"][layer, rows]).double() for kv in both]
            assert_equal_to_the_bound(keys, values, spec, begin, end, layer, config)
    engine.assert_nothing_lost()


def assert_equal_to_the_bound(
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    spec: Any,
    begin: int,
    end: int,
    layer: int,
    config: dict[str, Any],
) -> None:
    """Moved and computed float64 `[tokens, heads, dim]` of one layer agree."""
    moved, computed = keys
    assert computed.abs().amax(-1).min() > 0
    noise = float((values[0] - values[1]).abs().max() / values[1].abs().max())
    # Sums of `hidden_size` products, one chain of them a layer.
    assert noise <= (layer + 1) * config["hidden_size"] * 2 * UNIT
    roundings = 2.0 + 4.0 * noise / UNIT
    content = float(computed.abs().max()) * roundings * UNIT
    error = (moved - computed).abs()
    bound = torch.full_like(error, content)
    if spec.has_rope:
        part = slice(spec.rotary_offset, spec.rotary_offset + spec.rotary_dim)
        pairs = computed[..., part]
        if spec.is_neox:
            first, second = pairs.chunk(2, dim=-1)
        else:
            first, second = pairs[..., 0::2], pairs[..., 1::2]
        each = key_bound(
            torch.hypot(first, second), spec, begin + TEXT, end + TEXT, torch.float32, roundings
        )
        bound[..., part] += (
            torch.cat((each, each), dim=-1) if spec.is_neox else each.repeat_interleave(2, dim=-1)
        )
        # Without the rotation it would have failed by far.
        unmoved = (rotate(computed, begin - end, spec) - computed).abs()
        assert float((unmoved / bound).max()) > 100
    assert float((error / bound).max()) <= 1.0


def test_rows_compute_what_transformers_does(served: Served) -> None:
    """With attention at work: cold, behind a prefix, and cut into the rows that reuse leaves."""
    from transformers import AutoModelForCausalLM

    family, engine, config, live = served
    assert engine.engine.update_weights_from_disk(str(live))[0]
    text, head = fresh(150, 1), fresh(40, 2)
    engine.flush()
    cold = [*text, *head]
    answers = [(cold, engine.one(cold, 6, return_logprob=True))]
    engine.flush()
    engine.one(text)
    answers.append((cold, engine.one(cold, 6, return_logprob=True)))
    assert exact(answers[-1][1]) == len(text)
    moved = [*head, *text, *fresh(30, 3), *text, 5]
    assert len(engine.probe("plan_of", tokens=moved)) == 2
    # The same plan with its runs computed, each in a row of its own: nothing approximate.
    engine.probe("set_plan_options", recompute_all=True, recompute_tokens=0)
    answers.append((moved, engine.one(moved, 6, return_logprob=True)))
    assert answers[-1][1]["meta_info"]["cached_tokens"] == 0
    # SGLang's Cohere 2 sees one token more than the window of its configuration.
    more = {"sliding_window": config["sliding_window"] + 1} if "cohere2" in family else {}
    model = AutoModelForCausalLM.from_pretrained(live, dtype=torch.float32, **more)
    for prompt, answer in answers:
        served_logprobs = answer["meta_info"]["output_token_logprobs"]
        tokens = [token for _, token, _ in served_logprobs]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.double().log_softmax(-1)
        chosen = wanted[torch.arange(len(tokens)), torch.tensor(tokens)]
        logprobs = [logprob for logprob, _, _ in served_logprobs]
        np.testing.assert_allclose(logprobs, chosen, rtol=0, atol=1e-4)
        # The likeliest, or as good as.
        assert float((wanted.amax(-1) - chosen).max()) <= 2e-4
