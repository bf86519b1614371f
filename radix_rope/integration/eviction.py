"""Which cached KV goes first: copies that can be made again, then as SGLang was told."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.evict_policy import EvictionStrategy

from radix_rope.content.tree import ContentTree


class CopiesFirst(EvictionStrategy):  # type: ignore[misc]
    """Orders by `chosen`, but puts copied KV whose originals are cached in front.

    Bringing such KV back costs one copy; everything else costs a prefill.

    Args:
        chosen: the strategy of `--radix-eviction-policy`.
        content: knows which originals live.
    """

    def __init__(self, chosen: EvictionStrategy, content: ContentTree) -> None:
        self.chosen = chosen
        self._content = content

    def get_priority(self, node: Any) -> tuple[bool, Any]:
        """Smaller goes first."""
        return (
            not self._content.can_be_copied_again(node.segment),
            self.chosen.get_priority(node),
        )
