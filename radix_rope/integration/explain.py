"""One log line per planned request: what is reused, from where, and what was given up and why.

Written with the option `explain`. Positions, counts and request ids only, never prompt content.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from radix_rope.content.plan import Run
from radix_rope.content.segment import Provenance
from radix_rope.integration.request import state_of

if TYPE_CHECKING:
    from radix_rope.integration.reuse import BatchReuse

logger = logging.getLogger(__name__)


def explain_batch(reuse: BatchReuse, batch: Any) -> None:
    """Log the plan of every request of an extend batch, after it was committed."""
    for index, req in enumerate(batch.reqs):
        logger.info("radix_rope plan: %s", explain_request(reuse, req, index))


def explain_request(reuse: BatchReuse, req: Any, index: int) -> str:
    """The line of one request.

    All ranges are positions `[begin,end)`; `<-` names the place on the donor's own path.
    """
    exact_until = state_of(req).exact_until
    entry = next((entry for entry in reuse.entries if entry.index == index), None)
    if entry is not None and entry.before is not None:
        exact_until = entry.before.exact_until
    exact = req.prefix_len if exact_until is None else min(req.prefix_len, exact_until)
    reused = 0 if entry is None else entry.plan.reused_tokens
    parts = [
        f"rid={req.rid} prompt_tokens={len(req.origin_input_ids)} "
        f"extend=[{req.prefix_len},{req.extend_end}) exact_prefix_tokens={exact} "
        f"approximate_prefix_tokens={req.prefix_len - exact} reused_tokens={reused}"
    ]
    if entry is None:
        parts.append("rows: whole")
    else:
        parts.append("runs: " + (" ".join(map(_run, entry.plan.runs)) or "none"))
        parts.append("rows: " + " ".join(f"[{r.begin},{r.end})" for r in entry.plan.rows))
    given_up = [f"{_run(run)} ({reason})" for at, run, reason in reuse.given_up if at == index]
    if given_up:
        parts.append("given up: " + " ".join(given_up))
    refused = reuse.refused.get(index)
    if refused:
        parts.append("donors refused: " + " ".join(f"{k}={n}" for k, n in sorted(refused.items())))
    if index not in reuse.planned:
        parts.append(
            "not planned: served exactly, for its own options or kind or those of the batch"
        )
    return "; ".join(parts)


def _run(run: Run) -> str:
    donors = " ".join(dict.fromkeys(_origin(piece.segment.provenance) for piece in run.pieces))
    return (
        f"[{run.begin},{run.end})<-[{run.donor_begin},{run.donor_begin + len(run)}) "
        f"delta={run.delta:+d} left_context_tokens={run.left_context_tokens} donor={donors}"
    )


def _origin(provenance: Provenance) -> str:
    if provenance.exact:
        return "exact"
    how = "copied" if provenance.copied else "computed"
    return f"{how}(generations={provenance.generations},roundings={provenance.roundings})"
