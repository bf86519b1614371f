"""The quality check's side of a running engine: filling, asking, scoring, putting the cache back.

Owns how requests are sent and what is read from their answers. May not know scenarios or settings.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radix_rope.quality.chat import Tokens
from radix_rope.quality.settings import Option

_TRIES = 50


@dataclass(frozen=True, slots=True)
class Position:
    """What one run says about the next token at one place of a forced text.

    Attributes:
        top: the likeliest token.
        forced_logprob: log probability of the token that stands there.
        logprobs: log probabilities by token: of the run's own likeliest, or of those asked for.
    """

    top: int
    forced_logprob: float
    logprobs: dict[int, float]


@dataclass(frozen=True, slots=True)
class Forced:
    """A prompt and the text that is forced behind it."""

    prompt: Tokens
    text: Tokens


class Session:
    """Asks one engine; results come in the order of the questions."""

    def __init__(self, engine: Any, top_tokens: int) -> None:
        """engine: an `sglang.Engine` with radix_rope; top_tokens: listed at every place."""
        self._engine = engine
        self._top_tokens = top_tokens

    def no_second_pass(self) -> str | None:
        """Why this engine cannot repair by attention, or None where it can."""
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder) / "answer"
            self._engine.collective_rpc("radix_rope_no_second_pass", answer=str(answer))
            return answer.read_text(encoding="utf-8") or None

    def read(self, prompt: Tokens, options: dict[str, Option], salt: str | None = None) -> int:
        """Put a prompt into the cache; how many of its tokens were computed."""
        return computed_tokens(self._generate([prompt], options, salt, 1)[0]["meta_info"])

    def continue_greedily(
        self,
        prompts: Sequence[Tokens],
        options: dict[str, Option],
        salt: str | None,
        new_tokens: int,
    ) -> list[Tokens]:
        """The likeliest continuations, `new_tokens` tokens each, end signs included."""
        results = self._generate(prompts, options, salt, new_tokens)
        return [tuple(result["output_ids"]) for result in results]

    def score(
        self,
        forced: Sequence[Forced],
        options: dict[str, Option],
        salt: str | None = None,
        support: Sequence[Sequence[Sequence[int]]] | None = None,
    ) -> list[list[Position]]:
        """Every forced text's positions.

        support: per text and place, the tokens wanted; None for the run's likeliest.

        Raises:
            RuntimeError: this SGLang reports log probabilities in another form.
        """
        wanted: dict[str, Any] = {"top_logprobs_num": [self._top_tokens] * len(forced)}
        if support is not None:
            # One list of tokens a request: the union over its places, read apart below.
            wanted = {
                "top_logprobs_num": [1] * len(forced),
                # SGLang takes an empty list for no wish at all, and then reports nothing.
                "token_ids_logprob": [
                    sorted({t for at in text for t in at}) or [0] for text in support
                ],
            }
        results = self._generate(
            [item.prompt + item.text for item in forced],
            options,
            salt,
            1,
            return_logprob=[True] * len(forced),
            # The first entry has no distribution: it is the prompt's last token.
            logprob_start_len=[len(item.prompt) - 1 for item in forced],
            **wanted,
        )
        return [
            _positions(result["meta_info"], item.text, None if support is None else support[i])
            for i, (result, item) in enumerate(zip(results, forced, strict=True))
        ]

    def keep_only(self, prompts: Sequence[Tokens]) -> None:
        """Drop everything from the cache but the paths of these prompts.

        Raises:
            RuntimeError: requests still hold what should go.
        """
        # An answer arrives a moment before its request has let go of its KV.
        for attempt in range(_TRIES):
            try:
                self._engine.collective_rpc(
                    "radix_rope_keep_only", paths=[list(prompt) for prompt in prompts]
                )
                return
            except AssertionError as error:
                if attempt == _TRIES - 1:
                    raise RuntimeError(
                        f"the cache could not be put back between two settings: {error}"
                    ) from error
                time.sleep(0.05)

    def flush(self) -> None:
        """Empty the cache.

        Raises:
            RuntimeError: the engine still has requests.
        """
        for _ in range(_TRIES):
            if self._engine.flush_cache().success:
                return
            time.sleep(0.1)
        raise RuntimeError("the engine does not flush its cache: it still has requests")

    def _generate(
        self,
        prompts: Sequence[Tokens],
        options: dict[str, Option],
        salt: str | None,
        new_tokens: int,
        **more: Any,
    ) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = self._engine.generate(
            input_ids=[list(prompt) for prompt in prompts],
            sampling_params={
                "temperature": 0.0,
                "max_new_tokens": new_tokens,
                "ignore_eos": True,
                "custom_params": {"radix_rope": options},
            },
            cache_salt=None if salt is None else [salt] * len(prompts),
            **more,
        )
        return results


def computed_tokens(meta: dict[str, Any]) -> int:
    """Prompt tokens of a request that went through the model, in both passes of a repair."""
    details = meta.get("cached_tokens_details") or {}
    once = int(meta["prompt_tokens"]) - int(meta["cached_tokens"])
    return once + int(details.get("recomputed", 0))


def _positions(
    meta: dict[str, Any], text: Tokens, support: Sequence[Sequence[int]] | None
) -> list[Position]:
    forced = meta["input_token_logprobs"][1:]
    tops = meta["input_top_logprobs"][1:]
    tables = tops if support is None else meta["input_token_ids_logprobs"][1:]
    if not len(forced) == len(tops) == len(tables) == len(text):
        raise RuntimeError(
            f"asked for log probabilities of {len(text)} tokens and got {len(tables)}: this SGLang "
            "reports input log probabilities otherwise"
        )
    positions = []
    for place, (own, top, table) in enumerate(zip(forced, tops, tables, strict=True)):
        logprobs = {int(token): float(logprob) for logprob, token, _ in table}
        if support is not None:
            logprobs = {token: logprobs[token] for token in support[place]}
        positions.append(Position(int(top[0][1]), float(own[0]), logprobs))
    return positions
