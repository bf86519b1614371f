"""The errors of fetching a model. Imports nothing, so every part may raise them."""


class FetchError(RuntimeError):
    """A model cannot be fetched; the message says why and what to do instead."""


class ConversionError(FetchError):
    """The GGUF file is not one that the converter can turn into a Llama model."""
