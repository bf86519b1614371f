"""The three statements behind moving cached keys, measured on a model's own RoPE.

(a) The score of a rotated query and key depends only on their distance. (b) The same content
at another offset has another key, so content-identical is not cache-identical. (c) Rotating
by m and then by n - m equals rotating by n. Owns the measurements, their bounds and the
table; where the RoPE comes from is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from radix_rope.rotary.dtypes import move_bound, round_to
from radix_rope.rotary.proof import key_bound
from radix_rope.rotary.reference import rotate
from radix_rope.rotary.spec import RopeSpec

Apply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``apply(positions [n], rows [n, heads, head_dim])``: rows after the model's RoPE."""

# (query position, key position) for (a), moved together by each shift.
_SCORE_PAIRS = ((0, 0), (1, 0), (17, 3), (300, 5), (1000, 999))
_SHIFTS = (1, 17, 1000, 4096, 30000)
_HEADS = 4


@dataclass(frozen=True)
class Check:
    """One measured statement.

    Attributes:
        letter: ``"a"``, ``"b"`` or ``"c"``.
        claim: the statement in words.
        subject: name of the RoPE.
        dtype: dtype it was measured in.
        measured: the measured number.
        bound: what it is held against.
        at_least: True if `measured` must be at least `bound`, False if at most.
    """

    letter: str
    claim: str
    subject: str
    dtype: str
    measured: float
    bound: float
    at_least: bool = False

    @property
    def holds(self) -> bool:
        """Whether the statement holds. NaN never does."""
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound


@dataclass(frozen=True)
class Report:
    """All checks of one verification."""

    checks: tuple[Check, ...]

    @property
    def holds(self) -> bool:
        """Whether there are checks and all of them hold."""
        return bool(self.checks) and all(check.holds for check in self.checks)

    def table(self) -> str:
        """The checks as text, one line each."""
        lines = []
        subject = ""
        for check in self.checks:
            if check.subject != subject:
                subject = check.subject
                lines.append(subject)
            sign = ">=" if check.at_least else "<="
            lines.append(
                f"  ({check.letter}) {check.claim:<58} {check.dtype:<14} "
                f"{check.measured:9.2e} {sign} {check.bound:8.2e}  "
                f"{'ok' if check.holds else 'FAILED'}"
            )
        return "\n".join(lines)


def run_verification(
    specs: Sequence[RopeSpec],
    dtypes: Sequence[torch.dtype],
    context_len: int,
    apply: Sequence[Apply] | None = None,
    apply_dtype: torch.dtype = torch.float32,
) -> Report:
    """Measures the three statements.

    Args:
        specs: rotations to verify, each with RoPE (layers without have nothing to show).
        dtypes: cache dtypes for (c), beside float64.
        context_len: positions stay below this.
        apply: per spec the model's own RoPE on rows of ``spec.head_dim``; without it the
            float64 reference stands in.
        apply_dtype: dtype of the rows handed to `apply`.

    Returns:
        A report; `Report.holds` is the verdict.

    Raises:
        ValueError: a spec without RoPE.
    """
    checks: list[Check] = []
    for index, spec in enumerate(specs):
        if not spec.has_rope:
            raise ValueError(f"{spec.name} has no RoPE: there is nothing to verify")
        if apply is None:
            rope, dtype = _reference_apply(spec), torch.float64
        else:
            rope, dtype = apply[index], apply_dtype
        generator = torch.Generator().manual_seed(7)
        shape = (1, _HEADS, spec.head_dim)
        rows = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        query = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        checks.append(_distance_only(spec, rope, query, rows, dtype, context_len))
        checks.append(_other_key(spec, rope, rows, dtype, context_len))
        checks.extend(_composition(spec, rows.to(torch.float64), dtypes, context_len))
    return Report(tuple(checks))


def _reference_apply(spec: RopeSpec) -> Apply:
    return lambda positions, rows: rotate(rows, positions, spec)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _at(rope: Apply, rows: torch.Tensor, positions: list[int]) -> torch.Tensor:
    where = torch.tensor(positions, dtype=torch.int64)
    many = rows.expand(len(positions), *rows.shape[1:]).contiguous()
    return rope(where, many).to(torch.float64)


def _pair_norm(rows: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """``[..., rotary_dim // 2]`` norms of the rotated pairs."""
    part = rows.to(torch.float64)[..., spec.rotary_offset :][..., : spec.rotary_dim]
    if spec.is_neox:
        first, second = part.chunk(2, dim=-1)
    else:
        first, second = part[..., 0::2], part[..., 1::2]
    return torch.hypot(first, second)


def _distance_only(
    spec: RopeSpec,
    rope: Apply,
    query: torch.Tensor,
    key: torch.Tensor,
    dtype: torch.dtype,
    context_len: int,
) -> Check:
    """Statement (a): worst error of a score after moving query and key together."""
    measured = bound = 0.0
    worst = -1.0
    for m, n in _SCORE_PAIRS:
        for shift in _SHIFTS:
            if max(m, n) + shift >= context_len:
                continue
            before = _at(rope, query, [m])[0], _at(rope, key, [n])[0]
            after = _at(rope, query, [m + shift])[0], _at(rope, key, [n + shift])[0]
            error = ((before[0] * before[1]).sum(-1) - (after[0] * after[1]).sum(-1)).abs()
            # Each factor may be off by its own bound; the other one scales that error.
            q_norm, k_norm = _pair_norm(before[0], spec), _pair_norm(before[1], spec)
            q_bound = key_bound(q_norm, spec, m, m + shift, dtype)
            k_bound = key_bound(k_norm, spec, n, n + shift, dtype)
            allowed = 2.0 * (q_bound * k_norm + k_bound * q_norm).sum(-1)
            ratio = error / allowed
            index = int(torch.nan_to_num(ratio, nan=float("inf")).argmax())
            if not float(ratio[index]) <= worst:
                worst = float(ratio[index])
                measured, bound = float(error[index]), float(allowed[index])
    claim = "score depends on the distance only: largest change"
    return Check("a", claim, spec.name, _name(dtype), measured, bound)


def _other_key(
    spec: RopeSpec, rope: Apply, key: torch.Tensor, dtype: torch.dtype, context_len: int
) -> Check:
    """Statement (b): smallest change of a key between offsets, in units of the key's norm."""
    positions = [p for p in (0, 1, 17, 100, 1000, 4096, context_len - 1) if p < context_len]
    rotated = _at(rope, key, positions)
    changes = [
        float((rotated[i] - rotated[j]).norm() / rotated[i].norm())
        for i in range(len(positions))
        for j in range(i)
        if positions[i] != positions[j]
    ]
    # Another key, not a rounding of the same one: a hundred times what rounding can do.
    bound = 100.0 * float(torch.finfo(dtype).eps)
    claim = "same content, other offset: smallest change of the key"
    return Check("b", claim, spec.name, _name(dtype), min(changes), min(bound, 0.05), True)


def _composition(
    spec: RopeSpec, key: torch.Tensor, dtypes: Sequence[torch.dtype], context_len: int
) -> list[Check]:
    """Statement (c), in float64 and with one rounding per step in each cache dtype."""
    far = context_len - 1
    steps = [(1, 2), (17, 300), (far // 2, far), (far, 1), (far, 0)]
    checks: list[Check] = []
    claim = "rotating by m, then by n - m, equals rotating by n"
    angle = far * max(abs(f) for f in spec.inv_freq)
    exact = max(
        float((rotate(rotate(key, m, spec), n - m, spec) - rotate(key, n, spec)).abs().amax())
        for m, n in steps
    )
    # Three float64 angles, each half a unit of its own size off, and as many roundings.
    bound = float(key.abs().amax()) * 2.0 * 2.0**-53 * (4.0 * angle + 16.0)
    checks.append(Check("c", claim, spec.name, "float64", exact, bound))
    for dtype in dtypes:
        stored = round_to(key, dtype).to(torch.float64)
        measured, allowed, worst = 0.0, 0.0, -1.0
        # Each of the three moves errs by at most its own bound; a rotation keeps norms, but
        # may spread a pair's error over both its elements.
        norm = torch.zeros_like(stored)
        pair = _pair_norm(stored, spec)
        part = norm[..., spec.rotary_offset :][..., : spec.rotary_dim]
        if spec.is_neox:
            half = spec.rotary_dim // 2
            part[..., :half], part[..., half:] = pair, pair
        else:
            part[..., 0::2], part[..., 1::2] = pair, pair
        limit = move_bound(norm, dtype) * (2.0 + 2.0**0.5) * (1.0 + 2.0**-3)
        for m, n in steps:
            once = round_to(rotate(stored, n, spec), dtype).to(torch.float64)
            half_way = round_to(rotate(stored, m, spec), dtype).to(torch.float64)
            twice = round_to(rotate(half_way, n - m, spec), dtype).to(torch.float64)
            ratio = (twice - once).abs() / limit
            index = int(ratio.argmax())
            if not float(ratio.flatten()[index]) <= worst:
                worst = float(ratio.flatten()[index])
                measured = float((twice - once).abs().flatten()[index])
                allowed = float(limit.flatten()[index])
        checks.append(Check("c", claim, spec.name, _name(dtype), measured, allowed))
    return checks
