"""Routing keys from content: send a request to the worker that already holds its large blocks.

Owns the choice of a key for a prompt, and of a worker for a key. May know neither SGLang nor a
router, needs nothing but numpy and sortedcontainers (which the fingerprints' package imports), and
is meant for clients: it depends on nothing but its arguments, so processes and machines that share
no state choose alike.

`routing_key` is a min-hash: the smallest fingerprint among all windows of a prompt. A window's
fingerprint does not depend on where the window stands, so neither does the key, and two prompts
get the same key with a probability that is the share of windows they have in common (distinct
windows in both, divided by distinct windows in either; Broder, "On the resemblance and containment
of documents", 1997). Without shared memory nothing agrees more often on all pairs of prompts
(Bavarian et al., "The optimality of correlated sampling", 2016). `RoutingMemory` remembers
what it routed, so it does better wherever one process sees all requests.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from radix_rope.content.fingerprint import at_every_offset

HEADER = "x-smg-routing-key"
"""The request header from which `sglang-router --policy manual` reads a routing key."""

WINDOW_TOKENS = 32
"""Shared text shorter than this never brings two prompts of token ids together."""

WINDOW_CHARACTERS = 128
"""The same for prompts given as text."""

Prompt = str | Sequence[int] | npt.NDArray[np.int64]


def routing_key(prompt: Prompt, *, namespace: str = "") -> str:
    """The key of a prompt: 16 hexadecimal digits, in O(length).

    prompt: token ids, or text when the client has no tokeniser. The two kinds get unrelated keys:
        use one of them throughout.
    namespace: what else separates cached content on the workers (`extra_key`, `cache_salt`, the
        model's name). Prompts of different namespaces share nothing and get unrelated keys.

    >>> block = list(range(1000, 1400))
    >>> routing_key([7] * 5 + block) == routing_key(block) == routing_key(block + [9] * 5)
    True
    """
    return _key(int(_fingerprints(prompt, namespace).min()))


def choose_worker(key: str, workers: Sequence[str]) -> str:
    """The worker for a key, for clients that talk to workers without a router between.

    Rendezvous hashing: it depends on key and workers alone, not on the order of `workers`, and
    when a worker leaves, only the keys it had move.

    Raises:
        ValueError: there are no workers.
    """
    if not workers:
        raise ValueError(f"no worker to choose for key {key!r}: give at least one")
    return max(workers, key=lambda worker: (_digest(f"{key}\0{worker}"), worker))


class RoutingMemory:
    """Routing keys of one process that sees all requests and remembers what it routed.

    A prompt gets the key under which most of it was sent before, and a new key when less than
    `min_share` of it is known. `min_share` is what SGLang's router calls `--cache-threshold`, and
    keeps what all prompts have in common (a short system prompt) from gathering them all.

    capacity: how many fingerprints are kept, the least recently used leave first. One in
        `sampling` windows is kept, about 200 bytes each, so 100,000 remember about 800,000 tokens.
    """

    def __init__(
        self, *, capacity: int = 100_000, min_share: float = 0.3, sampling: int = 8
    ) -> None:
        if capacity < 1 or sampling < 1 or not 0.0 <= min_share <= 1.0:
            raise ValueError(
                f"RoutingMemory(capacity={capacity}, min_share={min_share}, sampling={sampling}): "
                "capacity and sampling are at least 1, min_share lies between 0 and 1"
            )
        self._capacity = capacity
        self._min_share = min_share
        self._sampling = np.uint64(sampling)
        self._keys: OrderedDict[int, str] = OrderedDict()

    def key(self, prompt: Prompt, *, namespace: str = "") -> str:
        """The key of a prompt, which is remembered; arguments as for `routing_key`."""
        found = np.unique(_fingerprints(prompt, namespace))
        # Chosen by value, so the same windows are chosen wherever they stand; never none.
        sample = [int(found[0]), *map(int, found[1:][found[1:] % self._sampling == 0])]
        votes = Counter(self._keys[one] for one in sample if one in self._keys)
        best = max(votes, key=lambda key: (votes[key], key), default=None)
        if best is None or votes[best] < self._min_share * len(sample):
            best = _key(sample[0])
        for one in sample:
            self._keys[one] = best
            self._keys.move_to_end(one)
        while len(self._keys) > self._capacity:
            self._keys.popitem(last=False)
        return best


def _fingerprints(prompt: Prompt, namespace: str) -> npt.NDArray[np.uint64]:
    """At least one fingerprint: of every window, or of the whole prompt when it is shorter."""
    if isinstance(prompt, str):
        window, kind = WINDOW_CHARACTERS, "text"
        tokens = np.frombuffer(prompt.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    else:
        window, kind = WINDOW_TOKENS, "tokens"
        tokens = np.asarray(prompt, dtype=np.int64)
    salt = _digest(f"{kind}\0{namespace}")
    if len(tokens) == 0:
        return np.array([salt], dtype=np.uint64)
    contiguous = np.ascontiguousarray(tokens, dtype=np.int64)
    return at_every_offset(contiguous, min(window, len(tokens)), salt)


def _digest(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def _key(fingerprint: int) -> str:
    return f"{fingerprint:016x}"
