"""The append-only law, and what a session costs. Pure arithmetic.

May not know how anything is measured.

The law. A session has T turns. Turn t sends everything said so far and adds the same number d of
tokens, so its prompt has t*d tokens. A prefix cache computed the first (t-1)*d of them before:

    hits = sum over t of (t-1)*d = d*T*(T-1)/2
    sent = sum over t of t*d     = d*T*(T+1)/2
    hit rate = (T-1) / (T+1)

so 81.8% after 10 turns, 90.5% after 20 and 95.1% after 40, whatever d is.

When it is exact. The prompt of turn t is the prompt of turn t-1, its answer of o tokens, and d-o
new ones; the first prompt has d. The KV of an answer's last token is never computed (sampling it
ends the request), so after turn t-1 the cache holds (t-1)*d + o-1 tokens of turn t's prompt. With
answers of one token, o = 1, that is (t-1)*d and the law holds to the token (with pages of one
token, no eviction, and d > 1, for the last token of a prompt is always computed). Longer answers
are hits that no prefill paid for, and add o-1 to every turn but the first:

    hit rate = (T-1)/(T+1) * (1 + 2*(o-1)/(d*T))
"""

from __future__ import annotations

from dataclasses import dataclass


def append_only_rate(turns: int, increment_tokens: int = 2, answer_tokens: int = 1) -> float:
    """Share of all prompt tokens of a session that a prefix cache need not compute, 0 to 1.

    increment_tokens: what every turn adds, answer and new input together.
    answer_tokens: part of the increment that the model wrote, at least 1.
    """
    if turns < 1 or not 1 <= answer_tokens < increment_tokens:
        raise ValueError(
            f"append_only_rate({turns}, {increment_tokens}, {answer_tokens}): at least one turn, "
            "and every increment longer than its answer of at least one token"
        )
    law = (turns - 1) / (turns + 1)
    return law * (1 + 2 * (answer_tokens - 1) / (increment_tokens * turns))


@dataclass(frozen=True, slots=True)
class Prices:
    """What one prompt token costs, by what happened to it, relative to an uncached one.

    The defaults are plain example numbers, nobody's price list: reading a cached token is much
    cheaper than computing it, storing one for later a little dearer.

    Attributes:
        read: from an exact prefix.
        shifted: from KV at another offset, which is copied and rotated.
        write: computed and kept, because the session goes on.
        uncached: computed in the last request of a session, when nobody comes back for it.
    """

    read: float = 0.1
    shifted: float = 0.1
    write: float = 1.25
    uncached: float = 1.0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Prompt tokens by what happened to them; the fields are those of `Prices`."""

    read: int = 0
    shifted: int = 0
    write: int = 0
    uncached: int = 0

    @property
    def sent(self) -> int:
        """All prompt tokens."""
        return self.read + self.shifted + self.computed

    @property
    def computed(self) -> int:
        """Prompt tokens that went through the model."""
        return self.write + self.uncached

    @property
    def hit_rate(self) -> float:
        """Share that was not computed, 0 to 1."""
        return (self.read + self.shifted) / self.sent

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(
            self.read + other.read,
            self.shifted + other.shifted,
            self.write + other.write,
            self.uncached + other.uncached,
        )

    def cost(self, prices: Prices) -> dict[str, float]:
        """The parts of the cost, each relative to sending the same prompts without any cache."""
        without_cache = self.sent * prices.uncached
        return {
            "read": (self.read * prices.read + self.shifted * prices.shifted) / without_cache,
            "write": self.write * prices.write / without_cache,
            "uncached": self.uncached * prices.uncached / without_cache,
        }
