"""Asks at start-up whether the model has passed the quality check with this server's options.

Reads what `radix-rope check` stored, compares and logs; refuses only where the operator required a
verdict.
"""

from __future__ import annotations

import logging
from typing import Any

from radix_rope.config import RadixRopeConfig
from radix_rope.models.hub import model_folder
from radix_rope.quality.store import StoredVerdict, load_verdict

logger = logging.getLogger(__name__)


class CheckRequired(ValueError):
    """`require_check` is set, and no passing check covers this server's options."""


def check_verdict(config: RadixRopeConfig, model_path: str, dtype: str) -> None:
    """Log the model's verdict, and what of the server's options it does not cover.

    model_path: the folder that is served, or its name on the hub. dtype: of the model there, as
    in "float32".

    Raises:
        CheckRequired: with `require_check`, when there is no verdict, it is not a pass, or the
            server's options are less careful than what passed.
    """
    command = f"radix-rope check --model-path {model_path}"
    verdict: StoredVerdict | None = None
    missing: list[str] = []
    try:
        verdict = load_verdict(model_folder(model_path))
        said = "no verdict"
    except ValueError as error:
        said = str(error)
    if verdict is not None:
        result = "passed" if verdict.passed else "failed"
        said = f"{result} on {verdict.date} in {verdict.dtype}, recommended {verdict.options}"
        if verdict.changed_limits:
            said += f"; judged by other limits: {', '.join(verdict.changed_limits)}"
        if verdict.dtype != dtype:
            said += f"; it is served in {dtype} now"
        missing = not_covered(config, verdict) if verdict.passed else []
        if missing:
            said += f"; not covered: {'; '.join(missing)}"
    good = verdict is not None and verdict.passed and not missing
    if config.require_check and not good:
        raise CheckRequired(
            f"radix_rope: require_check is set, and the quality check of {model_path} says: "
            f"{said}. Shifted reuse is refused until a check passes that covers the server's "
            f"options: run `{command}` (with the same RADIX_ROPE_CACHE), give the options that it "
            "recommends, serve with mode exact, or leave require_check out."
        )
    if verdict is None:
        logger.info("radix_rope: quality check of this model: %s; `%s` makes one", said, command)
    elif good:
        logger.info("radix_rope: quality check of this model: %s", said)
    else:
        logger.warning("radix_rope: quality check of this model: %s", said)


def not_covered(config: RadixRopeConfig, verdict: StoredVerdict) -> list[str]:
    """What of a server's options is less careful than what passed; empty when nothing is.

    A server's repair is covered when, of the settings measured with that repair and at most as
    many tokens computed again, the one with the most passed; `max_generations` when the verdict
    recommends no fewer. Other options (`min_run_tokens`, `stride`, ...) and what single requests
    ask for are not compared.
    """
    missing = []
    kind, amount = _care(config.repair, config.recompute_tokens, config.attention_percent)
    default = RadixRopeConfig()
    judged = {_care_of(options): passed for options, passed in verdict.judged}
    nearest = max((care for care in judged if care[0] == kind and care[1] <= amount), default=None)
    if nearest is None or not judged[nearest]:
        asked = {
            "none": "repair 'none'",
            "head": f"repair 'head' with recompute_tokens {config.recompute_tokens}",
            "attention": f"repair 'attention' with attention_percent {config.attention_percent}",
        }[config.repair]
        passed = ", ".join(f"{other} {least}" for (other, least), good in judged.items() if good)
        missing.append(f"{asked} (passed: {passed}; head 0 is 'none')")
    elif kind == "attention" and config.recompute_tokens < default.recompute_tokens:
        missing.append(
            f"recompute_tokens {config.recompute_tokens} where 'attention' gives way to 'head' "
            f"(measured with {default.recompute_tokens})"
        )
    limit = verdict.options.get("max_generations")
    if limit is not None and config.max_generations > limit:
        missing.append(f"max_generations {config.max_generations} (at most {limit} passed)")
    if not config.rotate:
        missing.append("rotate false")
    return missing


def _care(repair: str, recompute_tokens: int, attention_percent: int) -> tuple[str, int]:
    """Kind and amount of what is computed again; of one kind, more amounts to more care."""
    if repair == "attention":
        return "attention", attention_percent
    return "head", recompute_tokens if repair == "head" else 0


def _care_of(options: dict[str, Any]) -> tuple[str, int]:
    default = RadixRopeConfig()
    return _care(
        options.get("repair", default.repair),
        options.get("recompute_tokens", default.recompute_tokens),
        options.get("attention_percent", default.attention_percent),
    )
