"""What one request knows about the KV in its own row.

A row is an exact prefix, and from the first spliced run on approximate: the
run itself (copied) and everything computed while looking at it. The state
lives on the request because the tree learns of it only when the request is
inserted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from radix_rope.content.segment import Provenance
from radix_rope.integration.request_options import RequestOptions

if TYPE_CHECKING:
    from radix_rope.content.plan import Run
    from radix_rope.integration.planning import Planned
    from radix_rope.integration.prefilling import Prefilling

EXACT = Provenance()


@dataclass(frozen=True)
class ShiftedHits:
    """What a plan would reuse of a waiting request: (begin, end) of runs, for its priority only."""

    version: int = 0
    runs: tuple[tuple[int, int], ...] = ()


@dataclass
class RequestState:
    """Provenance of a request's row and its counts for reporting.

    Attributes:
        exact_until: positions before it hold exact KV; `None` when all do.
        approximate: what is computed after that position.
        copied: (begin, end, provenance) of every spliced run, in order.
        exact_tokens: prompt tokens taken from an exact prefix at first admission.
        shifted_tokens: prompt tokens taken from approximate KV: an approximate
            prefix and all spliced runs.
        recomputed_tokens: prompt tokens computed in second passes: tokens of runs, which
            stay counted as shifted and labelled as copied, and the last gap, once more.
        counted: whether the prefix of the first admission was counted.
        options: what the request asked for; `None` until it was read.
        planned: its last plan, while it waits.
        hits: what its priority counts on, while it waits.
        waits_for: the prompt being prefilled that it was held for last.
        waits_until: how much of that prompt was cached then.
        held_since: number of the pass in which it was first held.
        held_passes: how often it was.
    """

    exact_until: int | None = None
    approximate: Provenance = EXACT
    copied: list[tuple[int, int, Provenance]] = field(default_factory=list)
    exact_tokens: int = 0
    shifted_tokens: int = 0
    recomputed_tokens: int = 0
    counted: bool = False
    options: RequestOptions | None = None
    planned: "Planned | None" = None
    hits: ShiftedHits = ShiftedHits()
    waits_for: "Prefilling | None" = None
    waits_until: int = 0
    held_since: int | None = None
    held_passes: int = 0

    def begin_extend(self, path_tokens: int, prefix_tokens: int, path: "PathProvenance") -> None:
        """Start a prefill of `[prefix_tokens, ...)`.

        The first `path_tokens` are the tree's and take its word; what an
        earlier life of this request (before a retraction) knew of later
        positions is forgotten.
        """
        self.copied = [
            (max(begin, path_tokens), min(end, prefix_tokens), provenance)
            for begin, end, provenance in self.copied
            if end > path_tokens and begin < prefix_tokens
        ]
        self.stop_waiting()
        own = self.exact_until
        if own is not None and (own >= prefix_tokens or own < path_tokens):
            # A mark inside the tree's part is replaced by the tree's own below.
            own = path_tokens if own < path_tokens < prefix_tokens else None
        marks = [mark for mark in (own, path.exact_until) if mark is not None]
        self.exact_until = min(marks) if marks else None
        if self.exact_until is None:
            self.approximate = EXACT
        else:
            generations = max(path.generations, self.approximate.generations, 1)
            self.approximate = Provenance(exact=False, generations=generations)

    def stop_waiting(self) -> None:
        """Forget what was kept while the request waited: its plan and whom it waited for."""
        self.hits = ShiftedHits()
        self.waits_for = None
        self.held_since = None
        self.held_passes = 0

    def adopt(self, path: "PathProvenance") -> None:
        """Note that the tree's part of the row may now be another request's KV.

        A checkpoint points the row at nodes that were there before; what is
        computed from now on looks at them.
        """
        if path.exact_until is not None:
            own = self.exact_until
            self.exact_until = path.exact_until if own is None else min(own, path.exact_until)
            generations = max(path.generations, self.approximate.generations, 1)
            self.approximate = Provenance(exact=False, generations=generations)

    def splice(self, begin: int, end: int, provenance: Provenance) -> None:
        """Record that `[begin, end)` was copied from a donor."""
        self.copied.append((begin, end, provenance))
        self.exact_until = begin if self.exact_until is None else min(self.exact_until, begin)
        generations = max(self.approximate.generations, provenance.generations)
        self.approximate = Provenance(exact=False, generations=generations)

    def spans(self, begin: int, end: int) -> Iterator[tuple[int, int, Provenance]]:
        """Cut `[begin, end)` where the provenance changes."""
        position = begin
        exact_until = end if self.exact_until is None else self.exact_until
        if position < exact_until:
            stop = min(end, exact_until)
            yield position, stop, EXACT
            position = stop
        for run_begin, run_end, provenance in sorted(self.copied, key=lambda run: run[0]):
            if run_end <= position or run_begin >= end:
                continue
            if position < run_begin:
                yield position, run_begin, self.approximate
                position = run_begin
            stop = min(run_end, end)
            yield position, stop, provenance
            position = stop
        if position < end:
            yield position, end, self.approximate


@dataclass(frozen=True)
class PathProvenance:
    """Summary of a tree path: where it stops being exact, and how far from exact."""

    exact_until: int | None = None
    generations: int = 0

    def behind(self, runs: "Sequence[Run]") -> "PathProvenance":
        """The same of a row that continues the path, with `runs` copied into it."""
        if not runs:
            return self
        begin = min(run.begin for run in runs)
        donors = [piece.segment.provenance.generations for run in runs for piece in run.pieces]
        return PathProvenance(
            begin if self.exact_until is None else min(begin, self.exact_until),
            max(self.generations, 1 + max(donors)),
        )

    def may_be_donor(self, max_generations: int | None) -> bool:
        """Whether what stands from `exact_until` on is reused under that limit."""
        return max_generations is None or max(1, self.generations) <= max_generations


EXACT_PATH = PathProvenance()


def state_of(req: Any) -> RequestState:
    """The state kept on an SGLang request, made on first use."""
    state: RequestState | None = getattr(req, "radix_rope", None)
    if state is None:
        state = RequestState()
        req.radix_rope = state
    return state
