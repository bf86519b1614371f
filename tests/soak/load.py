"""The mixed load: clients of every kind on one engine, each checking what it gets.

Owns who asks what and when, and the tally. Deviations are collected, not raised, so that the load
goes on; a request that takes too long is one too.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.integration.engines import EngineUnderTest, exact, shifted
from tests.soak.prompts import ANSWER_TOKENS, Known, Tokens, Turn, mixed, unique

_EXACT = {"custom_params": {"radix_rope": {"mode": "exact"}}}
# Only to end a run that hangs: on a machine that starves, requests have taken minutes.
_PATIENCE_SECONDS = 900.0


@dataclass
class Tally:
    """What was asked and what came back."""

    requests: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    retractions: int = 0
    exact_answers: int = 0
    exact_answers_compared: int = 0
    deviations: list[str] = field(default_factory=list)

    def deviation(self, kind: str, text: str) -> None:
        """Note what should not have happened."""
        self.deviations.append(f"{kind}: {text}")


class Load:
    """All clients of one soak.

    Args:
        engine: with radix_rope.
        documents: what the prompts share.
        known: prompts whose exact answer is known.
        chats: conversations, and the exact answers known of them.
        seed: decides everything but the timing.
    """

    def __init__(
        self,
        engine: EngineUnderTest,
        documents: list[Tokens],
        known: list[Known],
        chats: list[list[Turn]],
        seed: int,
    ) -> None:
        self.engine = engine
        self.documents = documents
        self.known = known
        self.chats = chats
        self.tally = Tally()
        self._seed = seed
        self._sent = 0

    def run(self, seconds: float, turn: int, clients: int = 10) -> None:
        """Keep `clients` clients busy for a time, then let all of them finish.

        turn: counts the calls; each has another load.
        """
        end = time.monotonic() + seconds

        async def all_clients() -> None:
            await asyncio.gather(*(self._client((turn, i), end) for i in range(clients)))

        self.engine.engine.loop.run_until_complete(all_clients())

    def check_known(self) -> None:
        """Ask for every known answer once more, one by one; of chats, for the last of each."""

        async def every() -> None:
            for known in self.known:
                await self._known(known)
            for chat in self.chats:
                certain = [turn.known for turn in chat if turn.known is not None]
                for known in certain[-1:]:
                    await self._known(known, "chat")

        self.engine.engine.loop.run_until_complete(every())

    async def _client(self, number: tuple[int, int], end: float) -> None:
        rng = np.random.default_rng((self._seed, *number))
        chat: list[Turn] = []
        while time.monotonic() < end:
            draw = rng.random()
            if draw < 0.30:
                await self._known(self.known[int(rng.integers(len(self.known)))])
            elif draw < 0.55:
                await self._ask("shifted", mixed(self.documents, rng), int(rng.integers(1, 40)))
            elif draw < 0.70:
                chat = await self._chat(chat, rng)
            elif draw < 0.80:
                await self._ask("unique", unique(rng), int(rng.integers(1, 24)))
            elif draw < 0.92:
                await self._abort(rng)
            else:
                await asyncio.gather(
                    *(
                        self._ask("burst", mixed(self.documents, rng), 120 if i % 2 else 2)
                        for i in range(6)
                    )
                )
            if rng.random() < 0.1:
                await asyncio.sleep(float(rng.random()))

    async def _known(self, known: Known, kind: str = "exact") -> None:
        answer = await self._ask(kind, list(known.prompt), ANSWER_TOKENS, _EXACT)
        if answer is not None:
            self.tally.exact_answers_compared += 1
            if tuple(answer["output_ids"]) != known.answer:
                self.tally.deviation(kind, f"another answer, {answer['meta_info']}")

    async def _chat(self, chat: list[Turn], rng: np.random.Generator) -> list[Turn]:
        """One more turn of a conversation, exactly where its answer is known; returns the rest."""
        if not chat:
            chat = self.chats[int(rng.integers(len(self.chats)))]
        turn, *rest = chat
        if turn.known is not None and rng.random() < 0.7:
            await self._known(turn.known, "chat")
        else:
            await self._ask("chat", list(turn.prompt), 12)
        return rest

    async def _ask(
        self, kind: str, prompt: Tokens, new_tokens: int, sampling: dict[str, Any] | None = None
    ) -> Any:
        """Send a request, wait, and check what every answer must hold; None when it failed."""
        rid = self._name(kind)
        manager = self.engine.engine.tokenizer_manager
        try:
            generator = manager.generate_request(self._request(rid, prompt, new_tokens, sampling))
            answer = await asyncio.wait_for(anext(generator), _PATIENCE_SECONDS)
        except Exception as error:
            self.tally.deviation(kind, f"{type(error).__name__}: {error}")
            return None
        meta = answer["meta_info"]
        found = {"exact": exact(answer), "shifted": shifted(answer)}
        self.tally.tokens.update(found)
        self.tally.tokens["prompt"] += len(prompt)
        self.tally.retractions += int(meta["num_retractions"])
        if len(answer["output_ids"]) != new_tokens:
            self.tally.deviation(kind, f"{new_tokens} tokens were asked for, {meta}")
        if not sum(found.values()) == meta["cached_tokens"] < len(prompt):
            self.tally.deviation(kind, f"counts do not add up, {meta}")
        if sampling is _EXACT:
            self.tally.exact_answers += 1
            if found["shifted"]:
                self.tally.deviation(kind, f"approximate KV in an exact request, {meta}")
        return answer

    async def _abort(self, rng: np.random.Generator) -> None:
        """Leave before the first token, or in the middle of the answer."""
        rid = self._name("abort")
        manager = self.engine.engine.tokenizer_manager
        request = self._request(rid, mixed(self.documents, rng), 200, stream=True)
        delay = float(rng.random()) * 2
        asyncio.get_running_loop().call_later(delay, manager.abort_request, rid)

        async def listen() -> None:
            async for _ in manager.generate_request(request):
                pass

        try:
            await asyncio.wait_for(listen(), _PATIENCE_SECONDS)
        except Exception as error:
            self.tally.deviation("abort", f"{type(error).__name__}: {error}")

    def _name(self, kind: str) -> str:
        self._sent += 1
        self.tally.requests[kind] += 1
        return f"soak-{kind}-{self._sent}"

    def _request(
        self,
        rid: str,
        prompt: Tokens,
        new_tokens: int,
        sampling: dict[str, Any] | None = None,
        stream: bool = False,
    ) -> Any:
        from sglang.srt.managers.io_struct import GenerateReqInput

        greedy = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        return GenerateReqInput(
            input_ids=prompt, sampling_params={**greedy, **(sampling or {})}, rid=rid, stream=stream
        )
