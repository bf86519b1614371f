"""Asks at start-up whether the model has passed the quality check.

Reads what `radix-rope check` stored and logs it; refuses only where the operator required a
verdict.
"""

from __future__ import annotations

import logging
from pathlib import Path

from radix_rope.config import RadixRopeConfig
from radix_rope.quality.store import StoredVerdict, load_verdict

logger = logging.getLogger(__name__)


class CheckRequired(ValueError):
    """`require_check` is set, and the model has no verdict that allows reuse."""


def check_verdict(config: RadixRopeConfig, model_path: str, dtype: str) -> None:
    """Log the model's verdict.

    model_path: the folder that is served. dtype: of the model there, as in "float32".

    Raises:
        CheckRequired: with `require_check`, when there is no verdict or it is not a pass.
    """
    command = f"radix-rope check --model-path {model_path}"
    verdict: StoredVerdict | None = None
    try:
        verdict = load_verdict(Path(model_path).expanduser())
        said = "no verdict"
    except ValueError as error:
        said = str(error)
    if verdict is not None:
        result = "passed" if verdict.passed else "failed"
        said = f"{result} on {verdict.date} in {verdict.dtype}, recommended {verdict.options}"
        if verdict.dtype != dtype:
            said += f"; it is served in {dtype} now"
    if config.require_check and (verdict is None or not verdict.passed):
        raise CheckRequired(
            f"radix_rope: require_check is set, and the quality check of {model_path} says: "
            f"{said}. Shifted reuse is refused until it passes: run `{command}` (with the same "
            "RADIX_ROPE_CACHE), or serve with mode exact, or without require_check."
        )
    if verdict is None:
        logger.info("radix_rope: quality check of this model: %s; `%s` makes one", said, command)
    elif verdict.passed:
        logger.info("radix_rope: quality check of this model: %s", said)
    else:
        logger.warning("radix_rope: quality check of this model: %s", said)
