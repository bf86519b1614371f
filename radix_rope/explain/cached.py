"""What a server holds after some requests: their prompts, as nodes of one prefix tree.

Owns the walk that SGLang's `RadixCache` makes: match a prefix, split a node, insert the rest. Every
request counts as computed alone, so all KV here is exact.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radix_rope.content.segment import Segment, Tokens
from radix_rope.content.tree import ContentTree, as_tokens

NAMESPACE = None
"""All requests share one: no `extra_key`, no `cache_salt`."""


class CachedRequests:
    """Requests served one after the other, whose prompts are all still cached.

    Each segment's `owner` is the name of the request that computed it.
    """

    def __init__(self, stride: int, page_size: int = 1) -> None:
        """Begin with nothing; ValueError on sizes below 1."""
        self.tree = ContentTree(stride=stride, page_size=page_size)

    def add(self, name: str, tokens: npt.ArrayLike) -> None:
        """Serve a request, int64 (n,): it shares the nodes of its cached prefix and adds the rest.

        Tokens of a last page that is not full are not kept, as in SGLang.
        """
        array = as_tokens(tokens)
        whole = array[: self._whole_pages(len(array))]
        path = self.prefix(whole)
        leaf = path[-1] if path else None
        rest = whole[0 if leaf is None else leaf.end :]
        if len(rest):
            leaf = self.tree.insert(leaf, rest, namespace=NAMESPACE, owner=name)
        if leaf is not None:
            self.tree.touch(leaf)

    def prefix(self, tokens: npt.ArrayLike) -> list[Segment]:
        """The nodes that hold the longest cached prefix of `tokens`, from the top down.

        As SGLang's `match_prefix`, this cuts the last node where the prefix ends inside it and
        counts as a use of all of them.
        """
        array = as_tokens(tokens)
        path: list[Segment] = []
        at = 0
        while True:
            child = self._child(path[-1] if path else None, array[at:])
            if child is None:
                break
            shared = self._whole_pages(_equal_tokens(child.tokens, array[at:]))
            if shared < len(child.tokens):
                child = self.tree.split(child, shared, owner=child.owner)
            path.append(child)
            at += shared
        if path:
            self.tree.touch(path[-1])
        return path

    def _child(self, parent: Segment | None, tokens: Tokens) -> Segment | None:
        """The node below `parent` whose first page is that of `tokens`; there is at most one."""
        page = tokens[: self.tree.page_size]
        if len(page) < self.tree.page_size:
            return None
        for segment in self.tree.segments():
            if segment.parent is parent and np.array_equal(segment.tokens[: len(page)], page):
                return segment
        return None

    def _whole_pages(self, count: int) -> int:
        return count // self.tree.page_size * self.tree.page_size


def _equal_tokens(left: Tokens, right: Tokens) -> int:
    """Equal tokens at the front of both."""
    length = min(len(left), len(right))
    differs = np.flatnonzero(left[:length] != right[:length])
    return int(differs[0]) if len(differs) else length
