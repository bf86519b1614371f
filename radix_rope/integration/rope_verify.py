"""`radix-rope verify`: the three statements about moving keys, on a model's real RoPE.

Owns the way from a model folder to rotary modules without loading weights: SGLang's own model
class is built with parameters that have no storage, so every rotary module is the one that
this class would make when serving. What is measured is `rotary.verify`'s business.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from radix_rope.integration.rope_layers import attention_layers, rotary_module
from radix_rope.integration.rope_modules import apply_rotary, read_rope
from radix_rope.rotary.spec import RopeSpec, UnsupportedRope
from radix_rope.rotary.verify import Apply, run_verification

# Without a model: Llama 3's RoPE, made by SGLang's own factory.
_DEFAULT_HEAD_DIM, _DEFAULT_BASE, _DEFAULT_CONTEXT = 128, 500000, 8192

_CACHE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


def verify_command(model_path: str | None) -> int:
    """Verifies a model's RoPE and prints a table.

    Args:
        model_path: folder with the model's ``config.json``; None for plain RoPE as SGLang's
            `get_rope` makes it. Weights are not read.

    Returns:
        0 if every statement holds, 1 if one fails, 2 if the model is refused or not there.
    """
    if model_path is not None and not (Path(model_path) / "config.json").is_file():
        print(
            f"cannot verify {model_path}: there is no config.json in it; give the folder of a "
            "Hugging Face model, for instance one that `radix-rope fetch-model` printed"
        )
        return 2
    try:
        if model_path is None:
            modules, context_len = [_plain_rope()], _DEFAULT_CONTEXT
        else:
            modules, context_len = _modules_of(model_path)
    except UnsupportedRope as refusal:
        print(refusal)
        return 2
    specs = [spec for spec, _ in modules]
    print(
        f"RoPE of {model_path or 'SGLang get_rope'}, context {context_len:,} tokens; "
        "measured <= bound, keys of unit variance"
    )
    report = run_verification(
        specs, _CACHE_DTYPES, context_len, [apply for _, apply in modules], torch.float32
    )
    print(report.table())
    print("all statements hold" if report.holds else "A STATEMENT FAILED: do not reuse keys")
    return 0 if report.holds else 1


def _plain_rope() -> tuple[RopeSpec, Apply]:
    from sglang.srt.layers.rotary_embedding import get_rope

    module = get_rope(
        _DEFAULT_HEAD_DIM,
        _DEFAULT_HEAD_DIM,
        _DEFAULT_CONTEXT,
        _DEFAULT_BASE,
        dtype=torch.float32,
    )
    return read_rope(module, "get_rope", _DEFAULT_HEAD_DIM), functools.partial(apply_rotary, module)


def _modules_of(model_path: str) -> tuple[list[tuple[RopeSpec, Apply]], int]:
    """One entry per distinct rotation of the model, and its context length."""
    model, context_len = _weightless_model(model_path)
    found: dict[tuple[float, ...], tuple[RopeSpec, Apply]] = {}
    for layer in attention_layers(model):
        module = rotary_module(model, layer)
        if module is None:
            continue
        head = int(getattr(module, "head_size", layer.attention.qk_head_dim))
        spec = read_rope(module, layer.name, head, context_len=context_len)
        found.setdefault(spec.inv_freq, (spec, functools.partial(apply_rotary, module)))
    if not found:
        raise UnsupportedRope(type(model).__name__, "no layer has rotary positions")
    return list(found.values()), context_len


def _weightless_model(model_path: str) -> tuple[torch.nn.Module, int]:
    """Builds the SGLang model class of a folder; parameters have no storage."""
    from sglang.srt import runtime_context
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_loader.utils import get_model_architecture
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=model_path,
        tokenizer_path=model_path,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        device="cpu",
        disable_cuda_graph=True,
    )
    args.resolve_once()
    ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
    runtime_context.publish(args, role="scheduler", ranks=ranks)
    config = ModelConfig.from_server_args(args)
    bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=_free_port())
    bootstrap.init_layer_runtime(model_config=config)
    model_class, _ = get_model_architecture(config)
    with _rotary_modules_with_storage(model_class), torch.device("meta"):
        model: torch.nn.Module = model_class(config=config.hf_config, quant_config=None)
    return model, int(config.context_len)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _rotary_modules_with_storage(model_class: type) -> Iterator[None]:
    """While active, rotary modules are made on the CPU whatever the default device is."""
    import sys

    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.rope_variant import (
        Phi3LongRoPEScaledRotaryEmbedding,
    )

    classes: list[Any] = [RotaryEmbedding, Phi3LongRoPEScaledRotaryEmbedding]
    gemma3 = getattr(sys.modules[model_class.__module__], "Gemma3RotaryEmbedding", None)
    if gemma3 is not None:
        classes.append(gemma3)
    originals = {kind: kind.__init__ for kind in classes}

    def on_cpu(make: Any) -> Any:
        @functools.wraps(make)
        def wrapped(*args: Any, **kwargs: Any) -> None:
            with torch.device("cpu"):
                make(*args, **kwargs)

        return wrapped

    try:
        for kind, make in originals.items():
            kind.__init__ = on_cpu(make)
        yield
    finally:
        for kind, make in originals.items():
            kind.__init__ = make
