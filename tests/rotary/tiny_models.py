"""Runs small random-weight models of several architectures through SGLang, in one process.

A script, because SGLang's process-wide state wants a process of its own. For each model named
on the command line it loads, reads the specs, proves them, prefills a text at two offsets
and moves the keys of the one onto the other; it prints one JSON line per model.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LONGROPE = {
    "rope_type": "longrope",
    "type": "longrope",
    "short_factor": [1.0 + i / 16 for i in range(16)],
    "long_factor": [2.0 + i for i in range(16)],
    "original_max_position_embeddings": 1024,
}
TWO_KINDS = ["sliding_attention", "full_attention"]

MODELS: dict[str, dict[str, Any]] = {
    "llama3-scaling": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    },
    "llama-dynamic": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rope_theta": 1e6,
    },
    "qwen3-yarn": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 64,
        "rope_theta": 1e6,
        "rope_scaling": YARN,
    },
    "phi-partial": {
        "architectures": ["PhiForCausalLM"],
        "model_type": "phi",
        # SGLang's Phi reads no other size than this.
        "intermediate_size": 4 * 128,
        "partial_rotary_factor": 0.5,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu_new",
        "tie_word_embeddings": False,
        "num_key_value_heads": 4,
    },
    "glm4-partial-pairs": {
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "gemma3-two-thetas": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 32,
        "sliding_window": 64,
        "layer_types": TWO_KINDS,
        "query_pre_attn_scalar": 32,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "cohere2-half-without": {
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "layer_norm_eps": 1e-5,
        "logit_scale": 1.0,
        "sliding_window": 64,
        "layer_types": TWO_KINDS,
    },
    "phi3-longrope": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "tie_word_embeddings": False,
        "original_max_position_embeddings": 1024,
        "rope_scaling": LONGROPE,
    },
    "phi3-longrope-short": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "tie_word_embeddings": False,
        "max_position_embeddings": 1024,
        "original_max_position_embeddings": 1024,
        "rope_scaling": LONGROPE,
    },
    "gpt2-learned": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 128,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 1024,
    },
    "deepseek-v2-mla": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "rope_scaling": {
            **YARN,
            "type": "yarn",
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.3,
        },
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
}


def write_config(name: str, folder: Path) -> str:
    """Writes a model's config.json and returns its folder."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**COMMON, **MODELS[name]}))
    return str(path)


class Loader:
    """Loads models one after the other; the parallel runtime is set up once."""

    def __init__(self) -> None:
        self._first = True

    def load(self, path: str, dtype: str, kv_dtype: str) -> Any:
        from sglang.benchmark import one_batch
        from sglang.srt import runtime_context
        from sglang.srt.server_args import PortArgs, ServerArgs

        args = ServerArgs(
            model_path=path,
            tokenizer_path=path,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_total_tokens=1024,
            device="cpu",
            dtype=dtype,
            kv_cache_dtype=kv_dtype,
            random_seed=1,
            disable_cuda_graph=True,
        )
        args.resolve_once()
        ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
        runtime_context.publish(args, role="scheduler", ranks=ranks)
        if self._first:
            one_batch._init_process_global_configs()
            one_batch.get_tokenizer = lambda *a, **k: None
        else:
            one_batch.bootstrap.init_parallel_runtime = lambda **k: None
        self._first = False
        return one_batch.load_model(args, PortArgs.init_new(args), 0, 0)[0]


def prefill(runner: Any, tokens: list[int]) -> Any:
    """Prefills one request on its own and returns its slots, int64 [tokens]."""
    from array import array

    from sglang.benchmark.one_batch import prepare_synthetic_inputs_for_latency_test

    (req,) = prepare_synthetic_inputs_for_latency_test(1, 0, [array("q", tokens)])
    _, _, batch = runner.extend([req])
    slots: Any = batch.out_cache_loc.long()
    return slots


def liven(model: Any) -> None:
    """Larger weights than the loader's dummies, whose keys would vanish in fp8."""
    import torch

    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            values = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.data.copy_(values.to(parameter.dtype))
        else:
            parameter.data.fill_(1.0)


def served_keys(runner: Any) -> tuple[Any, Any]:
    """Prefills one text at positions 20 and 210; returns its slots in both requests."""
    text = [7 + i * 13 % 100 for i in range(60)]
    first, second = [3] * 20, [9 + i % 50 for i in range(210)]
    there = prefill(runner, first + text + [5])[20:80]
    here = prefill(runner, second + text + [6])[210:270]
    return there, here


def layer0_ratio(runner: Any, specs: Any, view: Any) -> float:
    """Worst layer-0 key after a move, in units of its bound, against the key in place."""
    import torch

    from radix_rope.rotary.corrector import make_corrector
    from radix_rope.rotary.dtypes import cache_dtype
    from radix_rope.rotary.proof import key_bound

    there, here = served_keys(runner)
    # fp8 tensors have no indexing: read bytes.
    rows = lambda slots: view.k[0].view(torch.uint8)[slots].view(view.dtype).double()  # noqa: E731
    wanted = rows(here)
    view.k[0].view(torch.uint8)[here] = 0
    delta = torch.full((60,), 190)
    make_corrector(view, "cpu").move(there, here, delta)
    spec = specs[0]
    got = rows(here)
    part = slice(spec.rotary_offset, spec.rotary_offset + spec.rotary_dim)
    a, b = wanted[..., part], got[..., part]
    half = spec.rotary_dim // 2
    order = [slice(0, half), slice(half, None)] if spec.is_neox else [slice(0, None, 2)] * 2
    if not spec.is_neox:
        order[1] = slice(1, None, 2)
    norm = torch.hypot(a[..., order[0]], a[..., order[1]])
    cache = cache_dtype(view.dtype).unit_roundoff
    bound = key_bound(norm, spec, 80, 270, runner.torch_runner.dtype, 2.0) + 3.0 * cache * norm
    bound = bound + 2.0 * cache_dtype(view.dtype).smallest_step
    worst = max(float(((a - b)[..., side].abs() / bound).max()) for side in order)
    if not bool((got.abs().amax() > 0) & (wanted.abs().amax() > 0)):
        return float("nan")
    return worst


def report(loader: Loader, name: str, folder: Path, dtype: str, kv_dtype: str) -> dict[str, Any]:
    """Everything about one model, or its refusal."""
    from radix_rope.integration import rope_specs
    from radix_rope.rotary.proof import ProofFailed
    from radix_rope.rotary.spec import UnsupportedRope

    runner = loader.load(write_config(name, folder), dtype, kv_dtype)
    model, pool = runner.torch_runner.model, runner.torch_runner.token_to_kv_pool
    context_len = runner.torch_runner.model_config.context_len
    liven(model)
    try:
        specs = rope_specs.read_rope_specs(model, pool.layer_num, pool, context_len)
        view = rope_specs.pool_view(pool, specs)
        proofs = rope_specs.prove_rotation(model, specs, runner.torch_runner.dtype, context_len)
    except (UnsupportedRope, ProofFailed) as refusal:
        return {"model": name, "refused": str(refusal)}
    return {
        "model": name,
        "pool": type(pool).__name__,
        "cache": str(view.dtype),
        "rotary": [[s.rotary_offset, s.rotary_dim, s.is_neox] for s in specs],
        "frequency": [s.inv_freq[0] if s.inv_freq else 0.0 for s in specs],
        "proof": max(proof.model.ratio for proof in proofs),
        "layer0": layer0_ratio(runner, specs, view),
    }


def main(arguments: list[str]) -> None:
    """Arguments: dtype, cache dtype, then model names (at most one with experts, last)."""
    dtype, kv_dtype, *names = arguments
    loader = Loader()
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            print("RESULT " + json.dumps(report(loader, name, Path(folder), dtype, kv_dtype)))
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
