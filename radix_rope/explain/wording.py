"""The words for a part, the sums and the notes: the same on a terminal and in HTML.

Owns wording only; what a server logs with the option `explain` uses the same terms.
"""

from __future__ import annotations

from radix_rope.config import RadixRopeConfig
from radix_rope.explain.parts import REUSING_MODES, Explanation, Kind, Part

MEANINGS = {
    Kind.EXACT: "prefix hit: the same tokens at the same positions",
    Kind.REUSED: "copied from a donor, its keys rotated by delta: an approximation",
    Kind.RECOMPUTED: "head of a run: shared too, and computed again to repair context",
    Kind.COMPUTED: "in no donor, or too short to reuse; the last token always",
}
"""The legend, in the order of the sums."""

COLUMNS = (
    "part", "what", "begin", "end", "tokens", "donor", "donor position", "delta", "left context",
)  # fmt: skip
"""Of the table of parts."""

NUMBERS = frozenset(COLUMNS) - {"what", "donor"}
"""Those of `COLUMNS` that hold numbers."""


def cells(number: int, part: Part) -> tuple[str, ...]:
    """A part's row under `COLUMNS`; empty where there is nothing to say."""
    row = (str(number), str(part.kind), str(part.begin), str(part.end), str(len(part)))
    if part.origin is None:
        return (*row, "", "", "", "")
    origin = part.origin
    context = "" if origin.left_context_tokens is None else str(origin.left_context_tokens)
    delta = f"{origin.delta:+d}"
    return (*row, ", ".join(origin.donors), str(origin.donor_begin), delta, context)


def line(part: Part) -> str:
    """A part in one line; `<-` names the place on the donor's own path."""
    said = f"{part.kind} [{part.begin},{part.end})"
    if part.origin is None:
        return said
    origin, donor_end = part.origin, part.origin.donor_begin + len(part)
    said += f"<-[{origin.donor_begin},{donor_end}) delta={origin.delta:+d}"
    if origin.left_context_tokens is not None:
        said += f" left_context_tokens={origin.left_context_tokens}"
    return f"{said} donor={', '.join(origin.donors)}"


def sums(explanation: Explanation) -> list[tuple[Kind, int, str]]:
    """Kind, tokens and share of the prompt, for each kind."""
    total = explanation.prompt_tokens
    return [
        (kind, explanation.tokens(kind), f"{100 * explanation.tokens(kind) / total:.1f}%")
        for kind in MEANINGS
    ]


def notes(explanation: Explanation, config: RadixRopeConfig) -> list[str]:
    """What must be known to read it, most important first."""
    said = []
    options = explanation.options
    if config.mode not in REUSING_MODES:
        said.append(
            f'mode "{config.mode}": a prompt shares exact prefixes only; nothing is reused at '
            "another place."
        )
    if config.mode == "opt_in":
        said.append('mode "opt_in": shown is a request that asks for mode "shifted".')
    if config.recompute_all and config.mode in REUSING_MODES:
        said.append("recompute_all: runs are computed as rows of their own, and none is reused.")
    if explanation.second_pass_tokens:
        said.append(
            f'repair "attention": of the reused tokens, {explanation.second_pass_tokens} '
            f"({options.attention_percent}%) are computed again in a second pass: those that the "
            "prompt's last gap looks at most, which only the forward knows."
        )
    elif config.repair == "attention" and config.mode in REUSING_MODES:
        said.append(
            'repair "attention" was asked for, but is of no use here (nothing is reused, the last '
            'gap is long, or more is computed than reused): planned with "head".'
        )
    if explanation.refused:
        reasons = " ".join(f"{reason}={count}" for reason, count in explanation.refused.items())
        said.append(
            f"Donors refused: {reasons} (too_short: below min_run_tokens, {options.min_run_tokens},"
            " without their head)."
        )
    said.append(
        "Donors count as requests served in the order given, each computed alone (exact) and still "
        "cached; the prompt as one that fits into one chunk. It takes "
        f"{explanation.rows} {'row' if explanation.rows == 1 else 'rows'} of the forward."
    )
    return said
