"""Which cached tokens equal these, at any offset?

Owns the shadow of the cached tokens (segments), the index over their content and the planner that
turns a request into runs to reuse and rows to compute. Knows token ids and nothing else: no KV, no
device memory, neither SGLang nor torch.
"""

from radix_rope.content.check import check_plan
from radix_rope.content.plan import DonorPiece, PlanOptions, ReusePlan, Row, Run
from radix_rope.content.planner import make_plan
from radix_rope.content.search import Candidate
from radix_rope.content.segment import Provenance, Segment
from radix_rope.content.stats import MatchStats
from radix_rope.content.tree import ContentTree

__all__ = [
    "Candidate",
    "ContentTree",
    "DonorPiece",
    "MatchStats",
    "PlanOptions",
    "Provenance",
    "ReusePlan",
    "Row",
    "Run",
    "Segment",
    "check_plan",
    "make_plan",
]
