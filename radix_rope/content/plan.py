"""What a plan is: runs to copy from donors, rows to compute, and the options behind them.

Owns the plain data. May not know how a plan is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from radix_rope.content.segment import Segment

REPAIRING_CONTEXT_TOKENS = 256
"""A run after this many tokens that its donor stood after too needs no repair."""

REPAIRS = ("none", "head", "attention")
"""`none` copies whole runs, `head` computes their first tokens, `attention` those that the
request's last gap looks at most, in a second pass."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What a plan may reuse. Raises ValueError on values that make no sense."""

    min_run_tokens: int = 64
    """A run that would reuse fewer tokens is computed instead; at least 1."""
    recompute_tokens: int = 16
    """Tokens at the head of a run that are computed where nothing before it matches; at least 0."""
    recompute_all: bool = False
    """Compute the runs too, each as a row of its own: splits the forward but reuses nothing."""
    max_generations: int | None = None
    """Approximate donors with more generations are not used; 0: exact donors only; None: all."""
    max_roundings: int | None = None
    """Donors whose K was rounded this often are not moved again; 1: originals only; None: all."""
    repair: str = "head"
    """Which run tokens are computed all the same: one of `REPAIRS`."""
    attention_percent: int = 15
    """Of 100 run tokens, how many `attention` repair computes; from 1 to 100."""

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        if self.min_run_tokens < 1:
            raise ValueError(f"min_run_tokens is {self.min_run_tokens}, it must be at least 1")
        if self.recompute_tokens < 0:
            raise ValueError(f"recompute_tokens is {self.recompute_tokens}, it must be at least 0")
        if self.repair not in REPAIRS:
            raise ValueError(f"repair is {self.repair!r}, it must be one of {', '.join(REPAIRS)}")
        if not 1 <= self.attention_percent <= 100:
            raise ValueError(
                f"attention_percent is {self.attention_percent}, it must be from 1 to 100"
            )
        if self.max_roundings is not None and self.max_roundings < 1:
            raise ValueError(
                f"max_roundings is {self.max_roundings}, it must be at least 1, or None for no "
                "limit"
            )
        if self.max_generations is not None and self.max_generations < 0:
            raise ValueError(
                f"max_generations is {self.max_generations}, it must be at least 0, or None for "
                "no limit"
            )

    def head_tokens(self, left_context_tokens: int, donor_begin: int) -> int:
        """How many tokens of a run are computed at its head.

        Args:
            left_context_tokens: tokens right before the run that equal those its donor was
                computed after. The more, the shorter the head; none from 256 on.
            donor_begin: the donor's position of the run's first token. The token at 0 carries
                the attention sink and is never copied, whatever the repair.
        """
        head = 0
        if self.repair == "head":
            missing = max(0, REPAIRING_CONTEXT_TOKENS - left_context_tokens)
            head = -(-self.recompute_tokens * missing // REPAIRING_CONTEXT_TOKENS)
        return max(head, 1) if donor_begin == 0 else head


@dataclass(frozen=True, slots=True)
class DonorPiece:
    """`length` tokens from `offset` on within one segment.

    Valid until that segment is split or removed: resolve it to slots at once, or lock the node.
    """

    segment: Segment
    offset: int
    length: int

    @property
    def donor_begin(self) -> int:
        """Absolute position on the donor's path of the first token."""
        return self.segment.start + self.offset


@dataclass(frozen=True, slots=True)
class Run:
    """Request positions [begin, end) whose KV is taken from the donor, the head already left out.

    `donor_begin` is the donor's absolute position of `begin`. `head_tokens` are computed right
    before it. `left_context_tokens` counts the tokens before the head that equal those before
    the donor's, up to 512; 0 where a copy is the donor, for its KV was computed elsewhere.
    """

    begin: int
    end: int
    donor_begin: int
    pieces: tuple[DonorPiece, ...]
    left_context_tokens: int
    head_tokens: int = 0

    @property
    def delta(self) -> int:
        """How far the keys move: request position minus donor position."""
        return self.begin - self.donor_begin

    def __len__(self) -> int:
        """Tokens in it."""
        return self.end - self.begin

    def until(self, end: int) -> Run:
        """The run without its tokens from request position `end` on, which lies inside it."""
        pieces: list[DonorPiece] = []
        at = self.begin
        for piece in self.pieces:
            if at >= end:
                break
            pieces.append(replace(piece, length=min(piece.length, end - at)))
            at += piece.length
        return replace(self, end=end, pieces=tuple(pieces))

    def found_again(self) -> Run:
        """The same run, with its pieces as the tree holds them now.

        Splits leave every token where it was but name it by another segment. Only for a run whose
        tokens are all still in the tree.
        """
        donor_end = self.donor_begin + len(self)
        pieces: list[DonorPiece] = []
        # A split segment keeps its lower part, so everything is at or above the deepest one.
        segment: Segment | None = self.pieces[-1].segment
        while segment is not None and segment.end > self.donor_begin:
            low = max(segment.start, self.donor_begin)
            high = min(segment.end, donor_end)
            if low < high:
                pieces.append(DonorPiece(segment, low - segment.start, high - low))
            segment = segment.parent
        return replace(self, pieces=tuple(reversed(pieces)))


@dataclass(frozen=True, slots=True)
class Row:
    """Request positions [begin, end) to compute: one row of the forward batch."""

    begin: int
    end: int

    def __len__(self) -> int:
        """Tokens in it."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """Runs and rows, each ascending, that partition the extend range [begin, end)."""

    begin: int
    end: int
    runs: tuple[Run, ...]
    rows: tuple[Row, ...]
    options: PlanOptions = PlanOptions()
    must_compute: tuple[tuple[int, int], ...] = ()

    @property
    def reused_tokens(self) -> int:
        """Tokens whose KV is copied."""
        return sum(len(run) for run in self.runs)

    @property
    def computed_tokens(self) -> int:
        """Tokens that go through the model."""
        return sum(len(row) for row in self.rows)

    def with_runs(self, runs: Sequence[Run]) -> ReusePlan:
        """The plan with some of its runs only; the others are computed."""
        return replace(self, runs=tuple(runs), rows=_gaps(self.begin, self.end, runs))

    def until(self, end: int) -> ReusePlan | None:
        """The plan of [begin, end) alone, for a request that is computed in chunks.

        A run that the end cuts gives up its last token, which a forward always computes, and is
        computed whole where less than `min_run_tokens` would be left. None when no run is left.
        """
        runs = []
        for run in self.runs:
            stop = min(run.end, end - 1)
            if stop - run.begin >= self.options.min_run_tokens:
                runs.append(run if stop == run.end else run.until(stop))
        if not runs:
            return None
        must_compute = tuple((low, min(high, end)) for low, high in self.must_compute if low < end)
        return ReusePlan(
            self.begin, end, tuple(runs), _gaps(self.begin, end, runs), self.options, must_compute
        )

    def end_within(self, budget_tokens: int, page_size: int = 1) -> int:
        """Where to cut the plan so that at most `budget_tokens` of its tokens are computed.

        The last multiple of `page_size` up to which that many are, or `end` when the budget lasts
        so far; `begin` when it lasts for no page. Never before the place where a request without
        runs would be cut.
        """
        left, end = budget_tokens, self.begin
        for row in self.rows:
            if left <= 0:
                break
            end = row.begin + min(len(row), left)
            left -= len(row)
        if end == self.end:
            return end
        end = end // page_size * page_size
        # A cut in the middle of a run costs its last token, or all of a run that gets too short.
        while end > self.begin and self._computed_until(end) > budget_tokens:
            end = (end - 1) // page_size * page_size
        return max(end, self.begin)

    def _computed_until(self, end: int) -> int:
        """Tokens that `until(end)` computes."""
        cut = self.until(end)
        return end - self.begin if cut is None else cut.computed_tokens


def _gaps(begin: int, end: int, runs: Sequence[Run]) -> tuple[Row, ...]:
    """What ascending runs leave of [begin, end)."""
    rows, at = [], begin
    for run in runs:
        if at < run.begin:
            rows.append(Row(at, run.begin))
        at = run.end
    if at < end:
        rows.append(Row(at, end))
    return tuple(rows)
