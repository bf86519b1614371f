"""The converted weights, against transformers' own reading of the same GGUF file."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from radix_rope.models.convert import convert, deinterleave, hugging_face_name
from radix_rope.models.errors import ConversionError
from tests.models.tiny import write_gguf


def reference_checkpoint(gguf_path: Path, folder: Path) -> dict[str, dict]:
    """What `AutoModelForCausalLM.from_pretrained(..., gguf_file=...)` reads from the file.

    That call itself asks for the accelerate package, which this part does not need.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return load_gguf_checkpoint(str(gguf_path), return_tensors=True, model_to_load=model)


def test_real_model_equals_transformers_own_dequantisation(
    model_folder: Path, gguf_path: Path
) -> None:
    reference = reference_checkpoint(gguf_path, model_folder)
    weights = load_file(model_folder / "model.safetensors")
    assert weights.keys() == reference["tensors"].keys()
    assert len(weights) == 2 + 9 * 30
    for name, weight in weights.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, reference["tensors"][name]), name

    config = AutoConfig.from_pretrained(model_folder)
    expected = reference["config"]
    for key in (
        "model_type",
        "num_hidden_layers",
        "max_position_embeddings",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "head_dim",
        "bos_token_id",
        "eos_token_id",
        "tie_word_embeddings",
    ):
        assert getattr(config, key) == expected[key], key
    assert config.pad_token_id == expected["pad_token_id"]
    assert config.rope_parameters == {"rope_theta": 1e5, "rope_type": "default"}
    assert config.rms_norm_eps == 1e-5
    assert config.dtype == torch.float32


def test_greedy_completion_of_a_known_fact(model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(answer[0, prompt.input_ids.shape[1] :]) == " Paris"


def test_deinterleave_makes_both_rope_layouts_agree() -> None:
    """Rotating neighbours before equals rotating halves after, for the same angles."""
    heads, head_dim, hidden = 3, 8, 5
    random = np.random.default_rng(0)
    stored = random.standard_normal((heads * head_dim, hidden), dtype=np.float32)
    x = random.standard_normal(hidden)
    angle = random.standard_normal(head_dim // 2)
    turn = np.exp(1j * angle)

    neighbours = (stored @ x).reshape(heads, head_dim // 2, 2)
    turned = (neighbours[..., 0] + 1j * neighbours[..., 1]) * turn

    halves = (deinterleave(stored, heads) @ x).reshape(heads, 2, head_dim // 2)
    np.testing.assert_allclose((halves[:, 0] + 1j * halves[:, 1]) * turn, turned, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiny_model_in_both_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    gguf = tmp_path / "tiny.gguf"
    parameters = write_gguf(gguf)
    folder = tmp_path / "model"
    folder.mkdir()
    convert(gguf, folder, str(dtype).removeprefix("torch."))

    weights = load_file(folder / "model.safetensors")
    reference = reference_checkpoint(gguf, folder)["tensors"]
    assert weights.keys() == reference.keys()
    for name, weight in weights.items():
        assert weight.dtype == dtype
        assert torch.equal(weight, reference[name].to(dtype)), name
    assert sum(weight.numel() for weight in weights.values()) == parameters
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert model.dtype == dtype
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    modes = {path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert len(modes) == 1, "the weights must be as readable as the other files"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "gpt2"}, "holds the architecture 'gpt2'; only 'llama'"),
        ({"pre_tokenizer": "qwen2"}, "'gpt2' with the pre-tokenizer 'qwen2': only .* 'smollm'"),
        ({"extra_tensor": "output.weight"}, "GGUF tensor 'output.weight'"),
        ({"extra_tensor": "blk.0.attn_q.bias"}, "GGUF tensor 'blk.0.attn_q.bias'"),
        ({"left_out_key": "llama.vocab_size"}, "no metadata 'llama.vocab_size'"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, change: dict[str, str], message: str) -> None:
    gguf = tmp_path / "other.gguf"
    write_gguf(gguf, **change)
    with pytest.raises(ConversionError, match=message):
        convert(gguf, tmp_path, "float32")


@pytest.mark.parametrize("name", ["token_embd", "blk.x.y.z.weight", "blk.0.attn_z.weight", ""])
def test_unknown_tensor_names_are_refused(name: str) -> None:
    with pytest.raises(ConversionError, match="cannot convert the GGUF tensor"):
        hugging_face_name(name)
