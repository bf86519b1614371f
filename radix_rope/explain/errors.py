"""The error of this package. Imports nothing, so every part may raise it."""


class ExplainError(ValueError):
    """A prompt cannot be explained as asked; the message says why and what to do instead."""
