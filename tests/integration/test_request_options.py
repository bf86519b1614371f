"""What a request may ask of radix_rope, and what it is told when it may not."""

from typing import Any

import pytest

from radix_rope.config import RadixRopeConfig
from radix_rope.content.plan import PlanOptions
from radix_rope.integration.request_options import (
    RequestOptionError,
    RequestOptions,
    parse_request_options,
)


@pytest.mark.parametrize("params", [None, {}, {"thinking_budget": 3}, "text"])
@pytest.mark.parametrize(
    ("mode", "shifted"), [("shifted", True), ("opt_in", False), ("exact", False), ("off", False)]
)
def test_the_servers_mode_is_the_default(params: Any, mode: str, shifted: bool) -> None:
    assert parse_request_options(params, RadixRopeConfig(mode=mode)) == RequestOptions(shifted)


@pytest.mark.parametrize("mode", ["shifted", "opt_in"])
@pytest.mark.parametrize("asked", ["shifted", "exact"])
def test_a_request_chooses_its_mode(mode: str, asked: str) -> None:
    options = parse_request_options({"radix_rope": {"mode": asked}}, RadixRopeConfig(mode=mode))
    assert options.shifted == (asked == "shifted")


@pytest.mark.parametrize("mode", ["exact", "off"])
def test_the_operator_can_forbid_shifted(mode: str) -> None:
    config = RadixRopeConfig(mode=mode)
    with pytest.raises(RequestOptionError, match=f'mode "{mode}", which forbids it'):
        parse_request_options({"radix_rope": {"mode": "shifted"}}, config)
    assert not parse_request_options({"radix_rope": {"mode": "exact"}}, config).shifted


def test_own_plan_options_replace_the_servers() -> None:
    options = parse_request_options(
        {"radix_rope": {"recompute_tokens": 0, "min_run_tokens": 9}}, RadixRopeConfig()
    )
    server = PlanOptions(max_generations=3)
    plan = options.plan_options(server)
    assert (plan.recompute_tokens, plan.min_run_tokens, plan.max_generations) == (0, 9, 3)
    assert RequestOptions(True).plan_options(server) is server


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ([], ["must be an object", "list", "min_run_tokens: integer"]),
        ("exact", ["must be an object", "str"]),
        (None, ["must be an object"]),
        ({"mod": "exact"}, ["no option 'mod'", "mode: one of shifted, exact"]),
        ({7: 1}, ["no option '7'"]),
        ({"rotate": False}, ["no option 'rotate'"]),
        ({"mode": "off"}, ['cannot be "off"', "shifted, exact"]),
        ({"mode": ["exact"]}, ['cannot be ["exact"]']),
        ({"recompute_tokens": -1}, ["'recompute_tokens'", "from 0 to"]),
        ({"recompute_tokens": True}, ["'recompute_tokens'", "integer"]),
        ({"min_run_tokens": "64"}, ["'min_run_tokens'", "integer from 1"]),
        ({"repair": "cacheblend"}, ["'repair'", "none, head, attention"]),
        ({"attention_percent": 101}, ["'attention_percent'", "from 1 to 100"]),
    ],
)
def test_refused_with_what_is_allowed(asked: Any, said: list[str]) -> None:
    with pytest.raises(RequestOptionError) as error:
        parse_request_options({"radix_rope": asked}, RadixRopeConfig())
    for part in said:
        assert part in str(error.value)
