"""From requests that came before to the parts of a prompt."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_rope.config import RadixRopeConfig
from radix_rope.content import make_plan
from radix_rope.explain.cached import CachedRequests
from radix_rope.explain.parts import Explanation, Kind, explain, plan_options
from tests.explain.strategies import prompts

DOCUMENT = list(range(1000, 1200))
SYSTEM = list(range(500, 520))
Requests = dict[str, list[int]]


def explained(
    requests: Requests, prompt: list[int], page_size: int = 1, **options: Any
) -> Explanation:
    config = RadixRopeConfig(**options)
    cached = CachedRequests(config.stride, page_size)
    for name, tokens in requests.items():
        cached.add(name, tokens)
    cached.tree.check_invariants()
    return explain(cached, prompt, config)


def told(explanation: Explanation) -> list[tuple[Any, ...]]:
    """Kind, begin, end and, where the tokens are cached, donors, their position, delta, context."""
    return [
        (str(p.kind), p.begin, p.end)
        + (
            (p.origin.donors, p.origin.donor_begin, p.origin.delta, p.origin.left_context_tokens)
            if p.origin
            else ()
        )
        for p in explanation.parts
    ]


def test_a_document_that_moved() -> None:
    found = explained({"A": [*SYSTEM, 1, *DOCUMENT]}, [*SYSTEM, 2, 3, 4, *DOCUMENT, 5])
    assert told(found) == [
        ("exact", 0, 20, ("A",), 0, 0, None),
        ("computed", 20, 23),
        ("recomputed", 23, 39, ("A",), 21, 2, 0),
        ("reused", 39, 223, ("A",), 37, 2, 0),
        ("computed", 223, 224),
    ]
    assert [found.tokens(kind) for kind in Kind] == [20, 184, 16, 4]
    assert (found.rows, found.prompt_tokens, found.second_pass_tokens) == (2, 224, 0)


def test_a_head_shrinks_with_the_context_before_it() -> None:
    requests = {"A": [*SYSTEM, *range(2000, 2010), *DOCUMENT], "B": [7, *DOCUMENT[100:]]}
    # B's last 100 tokens stand behind 100 equal ones in A, so A is the donor; 156 of the 256
    # tokens that repair context are missing, and so many of 16 are recomputed, rounded up.
    found = explained(requests, [3, *DOCUMENT, 4], max_generations=1)
    assert told(found)[1:3] == [
        ("recomputed", 1, 17, ("A",), 30, -29, 0),
        ("reused", 17, 201, ("A",), 46, -29, 0),
    ]
    long = list(range(3000, 3300))
    found = explained({"A": [*long, 1, *DOCUMENT], "B": [9, *long]}, [9, *long, 1, *DOCUMENT, 2])
    assert told(found)[:2] == [
        ("exact", 0, 301, ("B",), 0, 0, None),
        ("reused", 301, 502, ("A",), 300, 1, 300),
    ]


def test_requests_share_nodes_and_the_first_one_computed_them() -> None:
    requests = {"A": [*SYSTEM, *DOCUMENT[:100]], "B": [*SYSTEM, *DOCUMENT]}
    found = explained(requests, [9, *DOCUMENT, 8])
    assert [row[3] for row in told(found) if row[0] == "reused"] == [("A", "B")]
    found = explained(requests, [*SYSTEM, *DOCUMENT, 8])
    assert told(found) == [
        ("exact", 0, 220, ("A", "B"), 0, 0, None),
        ("computed", 220, 221),
    ]
    # A request that is a prefix of another computed nothing of its own.
    found = explained({"B": requests["B"], "A": requests["A"]}, [*requests["A"], 8])
    assert told(found)[0] == ("exact", 0, 120, ("B",), 0, 0, None)


def test_the_last_token_is_computed_though_cached() -> None:
    found = explained({"A": DOCUMENT}, DOCUMENT)
    assert told(found) == [("exact", 0, 199, ("A",), 0, 0, None), ("computed", 199, 200)]
    assert told(explained({"A": [7]}, [7])) == [("computed", 0, 1)]


def test_only_whole_pages_are_cached_and_matched() -> None:
    found = explained({"A": DOCUMENT[:150]}, [*DOCUMENT[:40], 1], page_size=16)
    assert told(found) == [("exact", 0, 32, ("A",), 0, 0, None), ("computed", 32, 41)]
    found = explained({"A": DOCUMENT[:150]}, [1, *DOCUMENT], page_size=16)
    assert found.parts[-2].end == 145  # 144 of 150 tokens fill their page
    assert told(explained({"A": DOCUMENT[:15]}, DOCUMENT[:15], 16)) == [("computed", 0, 15)]


@pytest.mark.parametrize("mode", ["exact", "off"])
def test_modes_that_reuse_nothing(mode: str) -> None:
    found = explained({"A": [*SYSTEM, 1, *DOCUMENT]}, [*SYSTEM, 2, *DOCUMENT], mode=mode)
    assert [row[0] for row in told(found)] == ["exact", "computed"]


def test_a_server_that_waits_to_be_asked_reuses_when_asked() -> None:
    found = explained({"A": [1, *DOCUMENT]}, [2, 3, *DOCUMENT, 4], mode="opt_in")
    assert found.tokens(Kind.REUSED) == 184


def test_recompute_all_reuses_nothing_but_splits() -> None:
    found = explained({"A": [1, *DOCUMENT]}, [2, 3, *DOCUMENT, 4], recompute_all=True)
    assert told(found) == [("computed", 0, 203)]
    assert found.rows == 3


def test_attention_says_how_many_but_not_which() -> None:
    requests = {"A": [1, *DOCUMENT]}
    asked = {"repair": "attention", "attention_percent": 15}
    found = explained(requests, [2, 3, *DOCUMENT, 4], **asked)
    assert told(found)[1] == ("reused", 2, 202, ("A",), 1, 1, 0)
    assert found.second_pass_tokens == 30
    # A long question makes a second pass as dear as what it repairs.
    found = explained(requests, [2, 3, *DOCUMENT, *range(5000, 5300)], **asked)
    assert (found.options.repair, found.second_pass_tokens) == ("head", 0)
    assert found.tokens(Kind.RECOMPUTED) == 16


def test_what_is_shared_but_too_short_is_said() -> None:
    found = explained({"A": [1, *DOCUMENT[:70]]}, [2, 3, *DOCUMENT[:70], 4])
    assert [row[0] for row in told(found)] == ["computed"]
    assert found.refused == {"too_short": 1}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(prompts, min_size=1, max_size=4),
    prompts,
    st.sampled_from([1, 4]),
    st.integers(1, 12),
    st.integers(0, 6),
    st.sampled_from(["none", "head", "attention"]),
)
def test_parts_partition_the_prompt_and_follow_the_plan(
    requests: list[list[int]], prompt: list[int], page_size: int, least: int, head: int, repair: str
) -> None:
    options: dict[str, Any] = {
        "stride": 4, "min_run_tokens": least, "recompute_tokens": head, "repair": repair,
    }  # fmt: skip
    names = {str(number): tokens for number, tokens in enumerate(requests)}
    found = explained(names, prompt, page_size, **options)
    at = 0
    for part in found.parts:
        assert part.begin == at < part.end
        assert (part.origin is None) == (part.kind is Kind.COMPUTED)
        if part.origin is not None:
            begin = part.origin.donor_begin
            assert part.origin.delta == part.begin - begin
            # The donor that computed the last of these tokens holds all of them.
            donor = names[part.origin.donors[-1]]
            assert donor[begin : begin + len(part)] == prompt[part.begin : part.end]
        at = part.end
    assert at == len(prompt)
    assert found.parts[-1].kind is Kind.COMPUTED
    assert sum(found.tokens(kind) for kind in Kind) == len(prompt)

    again = CachedRequests(4, page_size)
    for name, tokens in names.items():
        again.add(name, tokens)
    path = again.prefix(prompt[:-1])
    begin = path[-1].end if path else 0
    plan = make_plan(again.tree, prompt, begin, len(prompt), None, found.options)
    runs = plan.runs if plan else ()
    assert found.tokens(Kind.EXACT) == begin
    assert [(p.begin, p.end) for p in found.parts if p.kind is Kind.REUSED] == [
        (run.begin, run.end) for run in runs
    ]
    assert found.tokens(Kind.RECOMPUTED) == sum(run.head_tokens for run in runs)


def test_options_are_those_of_the_server() -> None:
    config = RadixRopeConfig(min_run_tokens=5, repair="none", max_generations=2, max_roundings=3)
    options = plan_options(config)
    assert (options.min_run_tokens, options.repair) == (5, "none")
    assert (options.max_generations, options.max_roundings) == (2, 3)
