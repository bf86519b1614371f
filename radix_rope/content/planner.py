"""The planner: from the runs a request shares with the tree to what is copied and what is computed.

Owns the order in which donors are preferred and how overlapping runs are resolved. May not look at
anything but candidates, provenance and the logical clock: a plan is a pure function of tree and
request, so that every rank of a tensor parallel group makes the same one.

Order of decisions, at the position where a run would begin (docs/matching.md): exact before
approximate; computed before copied; longest shared left context, up to 512 tokens; a donor run
that does not begin at position 0; fewer generations; longest remaining run; most recently used;
first inserted, then lowest position. A run keeps its donor until that ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy.typing as npt

from radix_rope.content.plan import DonorPiece, PlanOptions, ReusePlan, Row, Run
from radix_rope.content.search import LEFT_CONTEXT_TOKENS, Candidate
from radix_rope.content.segment import Provenance, Segment
from radix_rope.content.tree import ContentTree, as_tokens

Interval = tuple[int, int]
_RankKey = tuple[bool, bool, int, bool, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Consecutive pieces of one candidate that may be donors, at request positions [begin, end)."""

    candidate: Candidate
    order: int
    begin: int
    end: int
    pieces: tuple[DonorPiece, ...]
    piece_begins: tuple[int, ...]

    def segment_at(self, position: int) -> Segment:
        return self.pieces[bisect_right(self.piece_begins, position) - 1].segment

    def context_tokens(self, position: int) -> int:
        """Tokens before `position` that equal those its KV was computed after, up to 512."""
        if self.segment_at(position).provenance.copied:
            # Moved KV was computed in its original's context, so what stands before the
            # copy says nothing.
            return 0
        return min(LEFT_CONTEXT_TOKENS, position - self.candidate.begin)

    def head_tokens(self, position: int, options: PlanOptions) -> int:
        """Tokens computed at the head of a run that begins at `position`."""
        return options.head_tokens(self.context_tokens(position), position - self.candidate.delta)

    def rank(self, position: int) -> _RankKey:
        """Smaller is better, for a run that begins at `position`."""
        segment = self.segment_at(position)
        provenance = segment.provenance
        context = min(LEFT_CONTEXT_TOKENS, position - self.candidate.begin)
        return (
            not provenance.exact,
            # Its left context says nothing, and moving it again would round it again.
            provenance.copied,
            -context,
            self.candidate.donor_begin == 0,
            provenance.generations,
            position - self.end,
            -segment.last_used,
            segment.strip.strip_id,
            position - self.candidate.delta,
        )

    def cut(self, begin: int, end: int) -> tuple[DonorPiece, ...]:
        """The pieces of request positions [begin, end)."""
        cut = []
        for at, piece in zip(self.piece_begins, self.pieces, strict=True):
            low, high = max(begin, at), min(end, at + piece.length)
            if low < high:
                cut.append(DonorPiece(piece.segment, piece.offset + low - at, high - low))
        return tuple(cut)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Request positions [begin, end) given to one stretch; the head is not taken off yet."""

    begin: int
    end: int
    stretch: _Stretch


def make_plan(
    tree: ContentTree,
    tokens: npt.ArrayLike,
    begin: int,
    end: int,
    namespace: Hashable,
    options: PlanOptions = PlanOptions(),  # noqa: B008 - frozen
    must_compute: Sequence[Interval] = (),
) -> ReusePlan | None:
    """Plan the extend range [begin, end) of a request; None when no run survives.

    tokens: integers of shape (n,), the whole request from position 0 on. [0, begin) is an exact
    prefix hit or already computed; the last token, `end - 1`, and the request positions in
    `must_compute` are always computed. Rows and runs partition [begin, end).
    """
    array = as_tokens(tokens)
    for low, high in must_compute:
        if not 0 <= low <= high:
            raise ValueError(f"must_compute holds [{low}, {high}), which is not a range")
    candidates = tree.candidates(array, namespace, begin, end)
    refused = tree.stats.refused
    stretches = _stretches(candidates, begin, options, refused)
    refused["too_short"] += sum(
        s.end - s.begin - s.head_tokens(s.begin, options) < options.min_run_tokens
        for s in stretches
    )
    if not stretches:
        return None
    free = _subtract((begin, end - 1), must_compute)
    # A run keeps its donor until that ends, so a class of donors that is to win
    # everywhere gets a pass of its own: exact, then computed, then copies.
    kept: list[_Kept] = []
    for wanted in (_is_exact, _is_computed, _is_any):
        kept = _sweep(free, _parts(stretches, wanted), kept, options)
    kept = _merged(kept)
    if not kept:
        return None
    runs = tuple(_run(k, options) for k in kept)
    rows = _rows(begin, end, [(run.begin, run.end) for run in runs])
    if options.recompute_all:
        rows = tuple(sorted([*rows, *(Row(r.begin, r.end) for r in runs)], key=lambda r: r.begin))
        runs = ()
    return ReusePlan(begin, end, runs, rows, options, tuple(must_compute))


def _refusal(provenance: Provenance, options: PlanOptions) -> str | None:
    """Why a segment may not be a donor; None when it may."""
    if options.max_roundings is not None and provenance.roundings >= options.max_roundings:
        return "roundings"
    if provenance.exact or options.max_generations is None:
        return None
    return None if max(1, provenance.generations) <= options.max_generations else "generations"


def _stretches(
    candidates: list[Candidate], begin: int, options: PlanOptions, refused: Counter[str]
) -> list[_Stretch]:
    """Cut candidates to the range and where a piece may not be a donor, counted in `refused`."""
    stretches: list[_Stretch] = []
    for order, candidate in enumerate(candidates):
        at = candidate.begin
        pieces: list[DonorPiece] = []
        begins: list[int] = []
        for piece in candidate.pieces:
            skip = max(0, begin - at)
            refusal = _refusal(piece.segment.provenance, options)
            if refusal is None and skip < piece.length:
                pieces.append(DonorPiece(piece.segment, piece.offset + skip, piece.length - skip))
                begins.append(at + skip)
            elif refusal is not None and skip < piece.length:
                refused[refusal] += 1
            if refusal is not None and pieces:
                stretches.append(_stretch(candidate, order, pieces, begins))
                pieces, begins = [], []
            at += piece.length
        if pieces:
            stretches.append(_stretch(candidate, order, pieces, begins))
    return stretches


def _stretch(
    candidate: Candidate, order: int, pieces: list[DonorPiece], begins: list[int]
) -> _Stretch:
    end = begins[-1] + pieces[-1].length
    return _Stretch(candidate, order, begins[0], end, tuple(pieces), tuple(begins))


def _is_exact(provenance: Provenance) -> bool:
    return provenance.exact


def _is_computed(provenance: Provenance) -> bool:
    return not provenance.copied


def _is_any(provenance: Provenance) -> bool:
    return True


def _parts(
    stretches: list[_Stretch], wanted: Callable[[Provenance], bool]
) -> list[tuple[int, int, _Stretch]]:
    """The longest wanted parts of every stretch, as (begin, end, stretch)."""
    parts: list[tuple[int, int, _Stretch]] = []
    for stretch in stretches:
        low: int | None = None
        for at, piece in zip(stretch.piece_begins, stretch.pieces, strict=True):
            if wanted(piece.segment.provenance):
                low = at if low is None else low
            elif low is not None:
                parts.append((low, at, stretch))
                low = None
        if low is not None:
            parts.append((low, stretch.end, stretch))
    return parts


def _sweep(
    free: list[Interval],
    parts: list[tuple[int, int, _Stretch]],
    kept: list[_Kept],
    options: PlanOptions,
) -> list[_Kept]:
    """Give the free positions that nothing is kept at to the best parts, left to right.

    A part is taken where it reuses enough after its head is computed, or where it lengthens a run
    of the same stretch that is kept next to it (the head is then paid once; a part before that
    run only where the run then begins no later: with less context its head may be longer).
    """
    parts = sorted(parts, key=lambda p: (p[0], p[2].order))
    result = list(kept)
    starts = {k.begin: k.stretch for k in kept}
    ends = {k.end: k.stretch for k in kept}
    active: list[tuple[int, int, _Stretch]] = []
    upcoming = 0
    for low, high in _gaps(free, kept):
        x = low
        while x < high:
            while upcoming < len(parts) and parts[upcoming][0] <= x:
                active.append(parts[upcoming])
                upcoming += 1
            active = [part for part in active if part[1] > x]
            best: tuple[_RankKey, int, _Stretch] | None = None
            for _, stop, stretch in active:
                stop = min(stop, high)
                begin = x + stretch.head_tokens(x, options)
                joins = ends.get(x) is stretch or (
                    stop == high
                    and starts.get(high) is stretch
                    and begin <= high + stretch.head_tokens(high, options)
                )
                if joins or stop - begin >= options.min_run_tokens:
                    key = stretch.rank(x)
                    if best is None or key < best[0]:
                        best = key, stop, stretch
            if best is not None:
                _, stop, stretch = best
                result.append(_Kept(x, stop, stretch))
                ends[stop] = stretch
                x = stop
            elif upcoming < len(parts):
                x = parts[upcoming][0]
            else:
                break
    result.sort(key=lambda k: k.begin)
    return result


def _gaps(free: list[Interval], kept: list[_Kept]) -> list[Interval]:
    """The free intervals without what is kept; both ascending and disjoint."""
    gaps = []
    for interval in free:
        gaps += _subtract(interval, [(k.begin, k.end) for k in kept])
    return gaps


def _subtract(interval: Interval, taken: Sequence[Interval]) -> list[Interval]:
    """`interval` without the `taken` intervals, which may come in any order and overlap."""
    at, end = interval
    left = []
    for low, high in sorted(taken):
        if low >= end:
            break
        if at < low < high:
            left.append((at, low))
        if low < high:
            at = max(at, high)
    if at < end:
        left.append((at, end))
    return left


def _merged(kept: list[_Kept]) -> list[_Kept]:
    """Join neighbours that continue one another on the same stretch."""
    merged: list[_Kept] = []
    for item in kept:
        if merged and merged[-1].end == item.begin and merged[-1].stretch is item.stretch:
            merged[-1] = _Kept(merged[-1].begin, item.end, item.stretch)
        else:
            merged.append(item)
    return merged


def _run(kept: _Kept, options: PlanOptions) -> Run:
    head = kept.stretch.head_tokens(kept.begin, options)
    begin = kept.begin + head
    return Run(
        begin=begin,
        end=kept.end,
        donor_begin=begin - kept.stretch.candidate.delta,
        pieces=kept.stretch.cut(begin, kept.end),
        left_context_tokens=kept.stretch.context_tokens(kept.begin),
        head_tokens=head,
    )


def _rows(begin: int, end: int, runs: list[Interval]) -> tuple[Row, ...]:
    return tuple(Row(low, high) for low, high in _subtract((begin, end), runs))
