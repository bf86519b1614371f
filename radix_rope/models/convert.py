"""Turns a Llama-architecture GGUF file into a Hugging Face model folder.

Owns the weight layout and the configuration. Knows
nothing of wheels, caches or locks, and leaves the tokenizer to `tokenizer`.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors import SafetensorError
from safetensors.torch import save_file

from radix_rope.models.errors import ConversionError
from radix_rope.models.layout import CONFIG_FILES, WEIGHTS_FILE
from radix_rope.models.tokenizer import write_tokenizer

Metadata = Callable[[str], Any]
"""Value of a GGUF metadata key; KeyError names a missing one."""

_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def hugging_face_name(gguf_name: str) -> str:
    """Name of a GGUF tensor in `LlamaForCausalLM`'s state dict.

    >>> hugging_face_name("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    if gguf_name in _TOP:
        return _TOP[gguf_name]
    parts = gguf_name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _MODULES and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{_MODULES[parts[2]]}.weight"
    raise ConversionError(
        f"cannot convert the GGUF tensor {gguf_name!r}: it is no weight of a Llama model with "
        f"tied embeddings and without biases; use a GGUF file of that architecture"
    )


def deinterleave(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of a q or k projection in the order that NeoX-style RoPE expects.

    llama.cpp rotates neighbouring pairs (2i, 2i+1), Hugging Face rotates (i, i + d/2), so
    llama.cpp's converter stores each head's rows as (0, d/2, 1, d/2 + 1, ...). This undoes it.

    Args:
        weight: float32 [heads * head_dim, hidden] as stored in the GGUF file; not changed.
        heads: number of heads stacked in `weight` (key heads for a k projection).

    Returns:
        float32 of the same shape.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def convert(gguf_path: Path, folder: Path, dtype: str) -> None:
    """Write a model folder that transformers and SGLang load.

    Weights are dequantised to float32 and then, for another dtype, rounded once to nearest even.

    Args:
        gguf_path: GGUF file, architecture `llama`, byte-level BPE tokenizer.
        folder: existing folder; its weights, configuration and tokenizer files are created in it.
        dtype: dtype of the stored weights, one of `catalog.DTYPES`.

    Raises:
        ConversionError: the file holds another kind of model or tokenizer.
        OSError: a file cannot be written.
    """
    reader = GGUFReader(gguf_path)

    def metadata(key: str) -> Any:
        field = reader.get_field(key)
        if field is None:
            raise ConversionError(f"{gguf_path.name} has no metadata {key!r}; it is incomplete")
        return field.contents()

    if metadata("general.architecture") != "llama":
        raise ConversionError(
            f"{gguf_path.name} holds the architecture {metadata('general.architecture')!r}; "
            f"only 'llama' can be converted"
        )
    write_tokenizer(metadata, folder)
    for name, content in zip(
        CONFIG_FILES, (_config(metadata, dtype), _generation_config(metadata)), strict=True
    ):
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    _save(_weights(reader, metadata, getattr(torch, dtype)), folder / WEIGHTS_FILE)


def _save(weights: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(weights, path, metadata={"format": "pt"})
    except SafetensorError as error:
        # safetensors hides the error number of a failed write in its text.
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    # safetensors makes the file private; it should be as readable as the folder's other files.
    path.chmod((path.parent / CONFIG_FILES[0]).stat().st_mode)


def _weights(reader: GGUFReader, metadata: Metadata, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    heads_of = {
        "attn_q": metadata("llama.attention.head_count"),
        "attn_k": metadata("llama.attention.head_count_kv"),
    }
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        name = hugging_face_name(tensor.name)
        # GGUF lists the fastest dimension first; `dequantize` already returns [out, in].
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        heads = heads_of.get(tensor.name.split(".")[-2])
        if heads is not None:
            weight = deinterleave(weight, heads)
        stored = torch.from_numpy(np.array(weight, order="C"))
        weights[name] = stored.to(dtype)
    return weights


def _config(metadata: Metadata, dtype: str) -> dict[str, Any]:
    hidden = metadata("llama.embedding_length")
    heads = metadata("llama.attention.head_count")
    rope_theta = _short(metadata("llama.rope.freq_base"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": metadata("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata("tokenizer.ggml.padding_token_id"),
        "dtype": dtype,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": metadata("llama.feed_forward_length"),
        "max_position_embeddings": metadata("llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": metadata("llama.block_count"),
        "num_key_value_heads": metadata("llama.attention.head_count_kv"),
        "rms_norm_eps": _short(metadata("llama.attention.layer_norm_rms_epsilon")),
        # transformers 5 reads rope_parameters, everything older reads rope_theta.
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        "rope_theta": rope_theta,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": metadata("llama.vocab_size"),
    }


def _generation_config(metadata: Metadata) -> dict[str, Any]:
    return {
        "bos_token_id": metadata("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata("tokenizer.ggml.padding_token_id"),
    }


def _short(value: float) -> float:
    """The decimal that was meant by a float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
