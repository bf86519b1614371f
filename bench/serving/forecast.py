"""What radix_rope will reuse of a request, without an engine: its content tree and its planner.

Owns a shadow of the prefix cache that holds whole prompts. May not know KV, servers or time. A
server may differ by the few output tokens it also caches.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from bench.serving.writer import Tokens
from radix_rope.config import RadixRopeConfig
from radix_rope.content import ContentTree, PlanOptions, Provenance, ReusePlan, Segment, make_plan

_Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Expected:
    """How a prompt's tokens are come by. `moved_tokens` are those shifted to another offset."""

    prompt_tokens: int
    prefix_tokens: int
    spliced_tokens: int
    moved_tokens: int

    @property
    def computed_tokens(self) -> int:
        """Tokens that go through the model."""
        return self.prompt_tokens - self.prefix_tokens - self.spliced_tokens


class Forecast:
    """A cache that is never full, for one server's options."""

    def __init__(self, config: RadixRopeConfig) -> None:
        """Start empty."""
        planned = {field.name for field in fields(PlanOptions)}
        self._options = PlanOptions(
            **{name: value for name, value in vars(config).items() if name in planned}
        )
        self._tree = ContentTree(stride=config.stride)
        self._paths: list[tuple[_Array, Segment]] = []

    def send(self, prompt: Tokens) -> Expected:
        """Serve one prompt and keep it in the cache."""
        tokens = np.asarray(prompt, dtype=np.int64)
        prefix_tokens, parent = self._match(tokens)
        # The last token is computed even when everything is in the cache.
        begin = min(prefix_tokens, len(tokens) - 1)
        plan = make_plan(self._tree, tokens, begin, len(tokens), None, self._options)
        if prefix_tokens < len(tokens):
            self._insert(tokens, prefix_tokens, parent, plan)
        return Expected(
            prompt_tokens=len(tokens),
            prefix_tokens=begin,
            spliced_tokens=0 if plan is None else plan.reused_tokens,
            moved_tokens=0 if plan is None else sum(len(r) for r in plan.runs if r.delta),
        )

    def _match(self, tokens: _Array) -> tuple[int, Segment | None]:
        """Longest cached prefix, and the segment that ends with it."""
        longest, leaf = 0, None
        for path, end in self._paths:
            common = min(len(path), len(tokens))
            differing = np.flatnonzero(path[:common] != tokens[:common])
            length = int(differing[0]) if len(differing) else common
            if length > longest:
                longest, leaf = length, end
        segment = leaf
        while segment is not None and segment.start >= longest:
            segment = segment.parent
        if segment is not None and segment.end > longest:
            segment = self._tree.split(segment, longest - segment.start)
        return longest, segment

    def _insert(
        self,
        tokens: _Array,
        at: int,
        parent: Segment | None,
        plan: ReusePlan | None,
    ) -> None:
        behind, segment = 0, parent
        while segment is not None:
            behind = max(behind, segment.provenance.generations)
            segment = segment.parent
        for end, delta, donors in _spans(plan, len(tokens)):
            provenance = Provenance(exact=not behind, generations=behind)
            if donors:
                provenance = Provenance(
                    exact=False,
                    copied=True,
                    generations=1 + max(donor.generations for donor in donors),
                    roundings=max(donor.roundings for donor in donors) + (delta != 0),
                )
                behind = max(behind, provenance.generations)
            parent = self._tree.insert(
                parent, tokens[at:end], namespace=None, provenance=provenance
            )
            at = end
        assert parent is not None
        self._paths.append((tokens, parent))


def _spans(plan: ReusePlan | None, end: int) -> list[tuple[int, int, list[Provenance]]]:
    """What is computed or copied in turn: end, how far it moved, donors (none: computed)."""
    if plan is None:
        return [(end, 0, [])]
    spans: list[tuple[int, int, list[Provenance]]] = [(row.end, 0, []) for row in plan.rows]
    for run in plan.runs:
        spans.append((run.end, run.delta, [piece.segment.provenance for piece in run.pieces]))
    return sorted(spans, key=lambda span: span[0])
