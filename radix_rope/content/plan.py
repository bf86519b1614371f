"""What a plan is: runs to copy from donors, rows to compute, and the options behind them.

Owns the plain data. May not know how a plan is found.
"""

from __future__ import annotations

from dataclasses import dataclass

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
