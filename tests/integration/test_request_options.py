"""What a request may ask of radix_rope, and what it is told when it may not."""

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.cache_init_params import CacheInitParams

from radix_rope.config import RadixRopeConfig
from radix_rope.content.plan import PlanOptions
from radix_rope.integration import hooks
from radix_rope.integration.cache import RadixRopeCache
from radix_rope.integration.check_rpc import no_second_pass
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


REASON = "--tp-size 2: attention is summed over heads"


def scheduler(no_second_pass: str | None, reuses: bool = True) -> Any:
    """What `hooks.add_request` sees of a scheduler; `queue` takes what comes through."""
    allocator = SimpleNamespace(device="cpu")
    params = CacheInitParams(
        disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=allocator, page_size=1
    )
    cache = RadixRopeCache(params, RadixRopeConfig(mode="opt_in"))
    cache.no_second_pass = no_second_pass
    cache.corrector = object() if reuses else None  # type: ignore[assignment]
    return SimpleNamespace(tree_cache=cache, queue=[])


def add(to: Any, **options: Any) -> list[str]:
    """Send a request through the hook; what it was refused with."""
    refused: list[str] = []
    req = SimpleNamespace(
        to_finish=None,
        sampling_params=SimpleNamespace(custom_params={"radix_rope": options}),
        set_finish_with_abort=refused.append,
    )
    hooks.add_request(lambda scheduler, req: scheduler.queue.append(req), to, req)
    # SGLang answers refused requests from the queue too.
    assert to.queue.pop() is req
    return refused


def test_attention_is_refused_where_there_is_no_second_pass() -> None:
    (said,) = add(scheduler(REASON), mode="shifted", repair="attention")
    assert '"attention" was asked for' in said and REASON in said and '"head"' in said
    assert add(scheduler(None), mode="shifted", repair="attention") == []


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "shifted"},
        {"mode": "shifted", "repair": "head"},
        {"mode": "shifted", "attention_percent": 5},
        # Nothing is reused, so nothing is repaired.
        {"mode": "exact", "repair": "attention"},
        {"repair": "attention"},
    ],
)
def test_only_attention_needs_a_second_pass(options: dict[str, Any]) -> None:
    assert add(scheduler(REASON), **options) == []


def test_a_server_that_reuses_nothing_has_nothing_to_repair() -> None:
    assert add(scheduler(REASON, reuses=False), mode="shifted", repair="attention") == []


@pytest.mark.parametrize("reason", [None, REASON])
def test_the_quality_check_is_told_why_there_is_no_second_pass(
    reason: str | None, tmp_path: Any
) -> None:
    answer = tmp_path / "answer"
    no_second_pass(scheduler(reason), str(answer))
    assert answer.read_text() == (reason or "")
    with pytest.raises(RuntimeError, match="not radix_rope's"):
        no_second_pass(SimpleNamespace(tree_cache=object()), str(answer))
