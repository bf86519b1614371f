"""Small random-weight checkpoints of real architectures, written as users' checkpoints are.

transformers builds the model and writes its weights; the configuration is that of
`tests.rotary.tiny_models`, in the older spelling that most published checkpoints have.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.rotary.tiny_models import COMMON, MODELS

# The matrix behind attention, by the names that the architectures give it.
_OUT_PROJECTIONS = ("self_attn.o_proj.weight", "self_attn.dense.weight")


def write_checkpoint(name: str, folder: Path, silent: bool = True) -> dict[str, Any]:
    """Write a checkpoint of `tiny_models.MODELS[name]`; returns its configuration.

    Where `silent`, attention adds nothing to the hidden states in any layer, so keys and values
    of all layers depend on their own token and position alone: what only layer 0 of a trained
    model allows to compare, these allow in every layer.

    Args:
        name: a model of `tiny_models`.
        folder: where `config.json` and `model.safetensors` go.
        silent: see above.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {**COMMON, **MODELS[name], "initializer_range": 0.1}
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config)
    (folder / "config.json").write_text(text)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    silenced = 0
    for parameter_name, parameter in model.named_parameters():
        if silent and parameter_name.endswith(_OUT_PROJECTIONS):
            torch.nn.init.zeros_(parameter)
            silenced += 1
        elif parameter.dim() == 1 and parameter_name != "lm_head.bias":
            # Norm weights and biases as training leaves them: not all alike. The head's
            # bias, which Phi has, is left at zero: SGLang's logits leave it out.
            torch.nn.init.normal_(parameter, parameter.mean().item(), 0.1)
    assert silenced == (config["num_hidden_layers"] if silent else 0)
    model.save_pretrained(folder)
    # transformers writes its newest spelling; keep the one that checkpoints have.
    (folder / "config.json").write_text(text)
    return config
