"""A prompt cut into parts by what would become of each: exact, reused, recomputed or computed.

Owns the step from a plan to parts and their sums. May not know texts, colours or files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from enum import StrEnum

import numpy.typing as npt

from radix_rope.config import RadixRopeConfig
from radix_rope.content.plan import PlanOptions, ReusePlan, Run
from radix_rope.content.planner import make_plan
from radix_rope.content.repair import plan_repair
from radix_rope.content.segment import Segment
from radix_rope.content.tree import as_tokens
from radix_rope.explain.cached import NAMESPACE, CachedRequests

REUSING_MODES = ("shifted", "opt_in")


class Kind(StrEnum):
    """What becomes of a part."""

    EXACT = "exact"
    REUSED = "reused"
    RECOMPUTED = "recomputed"
    COMPUTED = "computed"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the same tokens are cached.

    Attributes:
        donors: names of the requests that computed them, in the order of the tokens.
        donor_begin: position of the part's first token in those requests.
        delta: how far keys move: prompt position minus donor position.
        left_context_tokens: of a run, how many tokens before its head equal those before the
            donor's, up to 512; None for an exact prefix, before which nothing stands.
    """

    donors: tuple[str, ...]
    donor_begin: int
    delta: int = 0
    left_context_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """Prompt positions [begin, end); `origin` is None for what is computed."""

    begin: int
    end: int
    kind: Kind
    origin: Origin | None = None

    def __len__(self) -> int:
        """Tokens in it."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Explanation:
    """What would become of a prompt.

    Attributes:
        parts: ascending; they partition the prompt.
        options: by which it was planned; `repair` is the one that was chosen.
        rows: how many rows the forward would have for this prompt.
        refused: runs that are shared and not reused, by reason.
    """

    parts: tuple[Part, ...]
    options: PlanOptions
    rows: int
    refused: dict[str, int]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.parts[-1].end

    def tokens(self, kind: Kind) -> int:
        """Tokens of all parts of a kind."""
        return sum(len(part) for part in self.parts if part.kind is kind)

    @property
    def second_pass_tokens(self) -> int:
        """Reused tokens that repair `attention` computes again, at most; which is not known.

        They depend on the forward: those that the prompt's last gap looks at most.
        """
        if self.options.repair != "attention":
            return 0
        return -(-self.tokens(Kind.REUSED) * self.options.attention_percent // 100)


def explain(cached: CachedRequests, prompt: npt.ArrayLike, config: RadixRopeConfig) -> Explanation:
    """Plan a prompt (int64, (n,), n at least 1) as a server would that holds `cached`.

    As in SGLang the last token is never looked up: it is computed, for the logits. The whole prompt
    is one extend range, as if it were no longer than the server's chunks.
    """
    tokens = as_tokens(prompt)
    path = cached.prefix(tokens[:-1])
    begin, end = (path[-1].end if path else 0), len(tokens)
    options = plan_options(config)
    refused_before = cached.tree.stats.refused.copy()
    plan: ReusePlan | None = None
    if config.mode in REUSING_MODES:
        plan = plan_repair(
            lambda options: make_plan(cached.tree, tokens, begin, end, NAMESPACE, options),
            options,
            second_pass=True,
        )
        if plan is None and options.repair == "attention":
            options = replace(options, repair="head")  # what was tried last
    return Explanation(
        parts=tuple(_parts(path, plan.runs if plan else (), end)),
        options=plan.options if plan else options,
        rows=len(plan.rows) if plan else 1,
        refused=dict(sorted((cached.tree.stats.refused - refused_before).items())),
    )


def plan_options(config: RadixRopeConfig) -> PlanOptions:
    """The planner's options out of a server's."""
    return PlanOptions(**{f.name: getattr(config, f.name) for f in fields(PlanOptions)})


def _parts(path: list[Segment], runs: Iterable[Run], end: int) -> list[Part]:
    parts: list[Part] = []
    at = 0

    def put(until: int, kind: Kind, origin: Origin | None = None) -> None:
        nonlocal at
        if at < until:
            parts.append(Part(at, until, kind, origin))
        at = until

    if path:
        put(path[-1].end, Kind.EXACT, Origin(_donors(path), 0))
    for run in runs:
        head_begin = run.begin - run.head_tokens
        put(head_begin, Kind.COMPUTED)
        put(run.begin, Kind.RECOMPUTED, _origin(run, head_begin))
        put(run.end, Kind.REUSED, _origin(run, run.begin))
    put(end, Kind.COMPUTED)
    return parts


def _origin(run: Run, begin: int) -> Origin:
    return Origin(
        donors=_donors(piece.segment for piece in run.pieces),
        donor_begin=begin - run.delta,
        delta=run.delta,
        left_context_tokens=run.left_context_tokens,
    )


def _donors(segments: Iterable[Segment]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(segment.owner) for segment in segments))
