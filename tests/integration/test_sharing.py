"""Who waits for what another request computes, and for how long; what priorities see."""

from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import (
    AddReqResult,
    CacheAwarePolicy,
    PrefillAdder,
    SchedulePolicy,
)

from radix_rope.integration import prefilling, priorities
from radix_rope.integration.prefilling import MAX_HELD_PASSES
from radix_rope.integration.priorities import compute_prefix_matches
from radix_rope.integration.request import PathProvenance, state_of
from tests.integration.test_admission import DOCUMENT, Server, original, request

CONTINUE = AddReqResult.CONTINUE
SHARED = list(range(50_000, 50_400))


@pytest.fixture(autouse=True)
def without_server_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefillAdder, "_replay_len", lambda *a: 0)


def behind(head: int, shared: list[int] = SHARED, **changed: Any) -> Any:
    """A request with a head of its own before what is shared, and a question of its own."""
    return request(
        f"behind-{head}", [*range(head, head + 20), *shared, head + 1, head + 2], **changed
    )


def one_pass(server: Server, *waiting: Any, chunk: int = 5000) -> list[Any]:
    """Which of them a pass admits."""
    adder = server.adder(chunk=chunk)
    for req in waiting:
        if server.add(adder, req) is not CONTINUE:
            break
    server.prepare(adder).release()
    # What preparing the batch does to the requests in it.
    for req in adder.can_run_list:
        state_of(req).stop_waiting()
    return list(adder.can_run_list)


def computed(server: Server, req: Any, until: int | None = None) -> None:
    """The tree has the request's KV, up to a position."""
    tokens = list(req.full_untruncated_fill_ids[:until])
    server.hold(tokens)
    req.kv.cache_inserted_len = len(tokens)


def test_shared_content_is_computed_by_one_of_two() -> None:
    server = Server()
    first, second, unrelated = behind(100), behind(200), request("u", list(range(900, 1000)))
    assert one_pass(server, first, second, unrelated) == [first, unrelated]
    # With overlap, the next pass comes before the first one's KV is in the tree.
    assert one_pass(server, second) == []
    computed(server, first)
    computed(server, unrelated)
    adder = server.adder()
    server.add(adder, second)
    (entry,) = server.prepare(adder).entries
    assert entry.plan.reused_tokens >= len(SHARED) - 16 - 2
    assert adder.rem_chunk_tokens == 100 - (20 + 16 + 2)
    assert len(server.cache.prefilling) == 0


def test_nobody_waits_for_what_is_cached_or_short() -> None:
    server = Server()
    first, second = behind(100, DOCUMENT[:400]), behind(200, DOCUMENT[:400])
    assert one_pass(server, first, second) == [first, second]
    server = Server()
    first, second = behind(100, SHARED[:79]), behind(200, SHARED[:79])
    assert one_pass(server, first, second) == [first, second]
    server = Server()
    first, second = behind(100, SHARED[:80]), behind(200, SHARED[:80])
    assert one_pass(server, first, second) == [first]


def test_who_cannot_reuse_does_not_wait() -> None:
    for changed in ({"extra_key": "tenant"}, {"cache_salt": "s"}, {"multimodal_inputs": object()}):
        server = Server()
        first, second = behind(100), behind(200, **changed)
        assert one_pass(server, first, second) == [first, second], changed
    server = Server()
    first, second = behind(100), behind(200)
    second.sampling_params.custom_params = {"radix_rope": {"mode": "exact"}}
    assert one_pass(server, first, second) == [first, second]
    # And nobody waits for one whose KV will never be in the tree.
    server = Server()
    first = behind(100, skip_radix_cache_insert=True)
    assert one_pass(server, first, behind(200)) != [first]


def test_nobody_waits_for_what_could_not_be_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("injected")

    server = Server()
    first, second = behind(100), behind(200)
    monkeypatch.setattr(prefilling.PrefillingPrompts, "add", fail)
    assert one_pass(server, first, second) == [first, second]
    assert server.cache.fallbacks.counts == {"plan": 2}


def test_tokens_whose_log_probabilities_are_wanted_are_not_waited_for() -> None:
    server = Server()
    first, second = behind(100), behind(200, return_logprob=True, logprob_start_len=60)
    assert one_pass(server, first, second) == [first, second]


def test_chunks_are_waited_for_one_by_one() -> None:
    server = Server()
    # The shared part is the first half of a long prompt.
    first = request("long", [*range(100), *SHARED, *range(60_000, 60_500)])
    second = behind(200)
    assert one_pass(server, first, second, chunk=100) == [first]
    for end in (200, 300, 400):
        adder = server.adder(chunk=100)
        computed(server, first, end - 100)
        server.add_chunk(adder, first)
        assert first.extend_end == end
        assert server.add(adder, second) is CONTINUE and second not in adder.can_run_list
        server.prepare(adder).release()
    # All but the last 80 of the shared tokens are cached: less than what would be reused.
    computed(server, first, 425)
    assert one_pass(server, second) == [second]


def test_a_request_waits_only_for_those_that_were_there_before() -> None:
    server = Server()
    other = list(range(70_000, 70_300))
    first = behind(100)
    second = request("both", [1, 2, 3, *SHARED, *other, 4])
    third = behind(300, other)
    assert one_pass(server, first, second, third) == [first, third]
    fourth = behind(400, [*other, *range(80_000, 80_300)])
    # Held by the third as well, but not by what came later.
    computed(server, first)
    assert one_pass(server, second, behind(500, SHARED)) != [second]
    computed(server, third)
    late = behind(600, list(range(90_000, 90_300)))
    assert one_pass(server, late) == [late]
    assert one_pass(server, second, fourth) == [second, fourth]


def test_no_chain_of_newcomers_starves_anybody() -> None:
    server = Server()
    # Every newcomer shares another part with the one that waits.
    parts = [list(range(200_000 + 1000 * i, 200_000 + 1000 * i + 200)) for i in range(8)]
    waits = request("waits", [1, *sum(parts, []), 2])  # noqa: RUF017
    leader = behind(100, parts[0])
    assert one_pass(server, leader, waits) == [leader]
    newcomers = [behind(1000 + 100 * i, part) for i, part in enumerate(parts[1:])]
    admitted = one_pass(server, waits, newcomers[0])
    assert admitted == [newcomers[0]]
    computed(server, leader)
    # The newcomer still computes what they share, and is not waited for. The next one waits.
    assert one_pass(server, waits, newcomers[1]) == [waits]


def test_waiting_is_bounded_whatever_becomes_of_the_other() -> None:
    server = Server()
    first, second = behind(100), behind(200)
    assert one_pass(server, first, second) == [first]
    # Retracted, or lost: it makes no progress any more.
    passes = 1
    while not one_pass(server, second):
        passes += 1
    assert passes == 5
    # Aborted.
    first, second = behind(300, SHARED[:300]), behind(400, SHARED[:300])
    server = Server()
    assert one_pass(server, first, second) == [first]
    first.finished = lambda: True
    assert one_pass(server, second) == [second]
    # Progress that never ends.
    server = Server()
    first, second = (
        behind(100, list(range(300_000, 340_000))),
        behind(200, list(range(300_000, 340_000))),
    )
    assert one_pass(server, first, second, chunk=10) == [first]
    for held in range(1, MAX_HELD_PASSES + 1):
        first.kv.cache_inserted_len = held
        assert one_pass(server, second, chunk=10) == []
    assert one_pass(server, second, chunk=10) == [second]


def test_a_retracted_request_is_waited_for_no_more() -> None:
    server = Server()
    first, second = behind(100), behind(200)
    assert one_pass(server, first, second) == [first]
    # It is retracted. What it computed itself before is nothing to wait for.
    assert one_pass(server, first, behind(300)) == [first]
    # Again, and now it does not fit.
    adder = server.adder(chunk=5000)
    adder.memory_budget.total_offset += 10**6
    assert server.add(adder, first) is AddReqResult.NO_TOKEN
    adder.memory_budget.total_offset -= 10**6
    server.add(adder, second)
    assert adder.can_run_list == [second]


def test_who_does_not_fit_does_not_shut_out_one_that_is_held() -> None:
    # Upon NO_TOKEN, SGLang looks at nobody until a running request leaves.
    def results(*waiting: Any) -> list[Any]:
        adder = server.adder(chunk=5000)
        return [server.add(adder, req) for req in waiting]

    server = Server(free=2000)
    first, second = behind(100), behind(200)
    large, small = request("large", list(range(900_000, 904_000))), request("small", [1, 2, 3])
    assert results(first, second, large) == [CONTINUE, CONTINUE, AddReqResult.OTHER]
    assert results(second, large) == [CONTINUE, AddReqResult.OTHER]
    # Nobody is held.
    computed(server, first)
    assert results(small, large) == [CONTINUE, AddReqResult.NO_TOKEN]


def test_a_request_for_which_others_were_preempted_is_not_held() -> None:
    server = Server()
    first, second = behind(100), behind(200)
    adder = server.adder(chunk=5000)
    server.add(adder, first)
    adder.preempt_list.append(object())
    server.add(adder, second)
    assert adder.can_run_list == [first, second]


def test_flush_forgets_who_is_computing() -> None:
    server = Server()
    first, second = behind(100), behind(200)
    assert one_pass(server, first, second) == [first]
    server.cache.reset()
    assert len(server.cache.prefilling) == 0
    assert one_pass(server, second) == [second]


def test_many_waiting_requests_cost_few_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    first = behind(100)
    others = [behind(1000 + 100 * i) for i in range(40)]
    tree = server.cache.prefilling._tree
    assert one_pass(server, first, *others[:10], chunk=10**6) == [first]
    looked_up = tree.stats.matches
    assert one_pass(server, *others[:10]) == [] and tree.stats.matches == looked_up
    # All of them are held, as many as there are.
    assert one_pass(server, *others, chunk=10**6) == [] and tree.stats.matches == looked_up + 30
    # When there is news of the first, they are looked up again; of those never looked up, as many
    # as are allowed, and the others are simply admitted, as are those who cannot wait for them.
    monkeypatch.setattr(prefilling, "LOOKUP_TOKENS", 50 * len(first.origin_input_ids))
    looked_up = tree.stats.matches
    first.kv.cache_inserted_len = 50
    newcomers = [behind(100_000 + 100 * i) for i in range(20)]
    assert one_pass(server, *others, *newcomers, chunk=10**6) == newcomers[10:]
    assert tree.stats.matches == looked_up + 50
    # Beyond what is allowed, who was held stays so.
    monkeypatch.setattr(prefilling, "LOOKUP_TOKENS", 1)
    computed(server, first, 60)
    assert one_pass(server, *others) == [] and tree.stats.matches == looked_up + 51


def test_what_would_be_refused_as_a_donor_is_not_waited_for() -> None:
    reuses = [7, *DOCUMENT[:300]]
    for limit, ends in ((0, [401, 402]), (1, [401])):
        server = Server(max_generations=limit)
        # The shared tokens are computed looking at moved ones.
        first = request("first", [*reuses, *SHARED[:100]])
        second = request("second", [*range(300, 302), *SHARED[:400]])
        assert [req.extend_end for req in one_pass(server, first, second)] == ends, limit
    # Before them, they are exact.
    server = Server(max_generations=0)
    first, second = request("first", [*SHARED[:100], *reuses]), behind(200)
    assert one_pass(server, first, second) == [first]
    # A prefix may have that many generations already.
    for generations, held in ((1, True), (2, False)):
        server = Server(max_generations=1)
        path = PathProvenance(exact_until=40, generations=generations)
        server.cache.path_provenance = lambda node, path=path: path  # type: ignore[method-assign]
        first, second = behind(100), behind(200)
        assert (one_pass(server, first, second) == [first]) == held


class Queue:
    """SGLang's policy over a server's cache."""

    def __init__(self, server: Server, policy: str) -> None:
        self.server = server
        self.policy = SchedulePolicy(policy, server.cache, False, False, False)

    def order(self, *waiting: Any) -> list[str]:
        """Ids in the order in which the policy would have them."""
        queue = list(waiting)
        matches = original("_compute_prefix_matches", SchedulePolicy)
        late = compute_prefix_matches(matches, self.policy, queue, self.policy.policy)
        if self.policy.policy is CacheAwarePolicy.LPM:
            SchedulePolicy._sort_by_longest_prefix(queue, late)
        elif self.policy.policy is CacheAwarePolicy.HRRN:
            SchedulePolicy._sort_by_hrrn(queue, late, 1000)
        else:
            SchedulePolicy._sort_by_shortest_prefill(queue, late)
        return [req.rid for req in queue]


@pytest.mark.parametrize("policy", ["lpm", "hrrn", "shortest-prefill-first"])
def test_policies_see_shifted_hits(policy: str) -> None:
    server = Server()
    prefix = request("prefix", [*DOCUMENT[:100], *range(500)])
    moved = request("moved", [1, 2, 3, *DOCUMENT[:400], *range(190)])
    unrelated = request("unrelated", list(range(30_000, 30_600)))
    for req in (prefix, moved, unrelated):
        req.arrival_processed_tokens = 0
        req.time_stats.wait_queue_entry_time = 0.0
    assert Queue(server, policy).order(unrelated, prefix, moved) == ["moved", "prefix", "unrelated"]
    assert moved.num_matched_prefix_tokens == 384
    assert prefix.num_matched_prefix_tokens == 100
    # Once more: nothing is counted twice.
    Queue(server, policy).order(unrelated, prefix, moved)
    assert moved.num_matched_prefix_tokens == 384


def test_a_request_in_mode_exact_has_no_shifted_hits() -> None:
    server = Server()
    moved = request("moved", [1, 2, 3, *DOCUMENT[:400]])
    moved.sampling_params.custom_params = {"radix_rope": {"mode": "exact"}}
    Queue(server, "lpm").order(moved)
    assert moved.num_matched_prefix_tokens == 0


def test_lookups_per_pass_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priorities, "LOOKUP_TOKENS", 500)
    server = Server()
    reqs = [request(str(i), [i, 7, *DOCUMENT[:300], *range(40 * i)]) for i in range(6)]
    stats = server.cache.content.stats  # type: ignore[union-attr]
    queue = Queue(server, "lpm")
    for looked_up in (2, 4, 6, 6):
        queue.order(*reqs)
        assert stats.matches == looked_up
    hits = [req.num_matched_prefix_tokens for req in reqs]
    assert all(hit >= 280 for hit in hits)
    # After a change the oldest numbers stand until their turn comes.
    server.hold(list(range(5000, 5100)))
    queue.order(*reqs)
    assert stats.matches == 8
    assert [req.num_matched_prefix_tokens for req in reqs] == hits


def test_policies_that_do_not_read_hits_cost_no_lookups() -> None:
    server = Server()
    moved = request("moved", [1, 2, 3, *DOCUMENT[:400]])
    policy = SchedulePolicy("dfs-weight", server.cache, False, False, False)
    matches = original("_compute_prefix_matches", SchedulePolicy)
    compute_prefix_matches(matches, policy, [moved], policy.policy)
    assert server.cache.content.stats.matches == 0  # type: ignore[union-attr]


def test_a_failing_lookup_costs_nobody_else_its_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan_of(cache: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        if req is fails:
            raise ValueError("injected")
        return plan(cache, req, *args, **kwargs)

    plan = priorities.plan_of
    monkeypatch.setattr(priorities, "plan_of", plan_of)
    server = Server()
    fails, moved = (request(name, [ord(name), *DOCUMENT[:400]]) for name in "ab")
    for _ in range(3):
        Queue(server, "lpm").order(fails, moved)
    assert moved.num_matched_prefix_tokens == 383
    # Only tried again when cached content changes.
    assert server.cache.fallbacks.counts == {"plan": 1}
    server.hold(list(range(5000, 5100)))
    Queue(server, "lpm").order(fails, moved)
    assert server.cache.fallbacks.counts == {"plan": 2}


def next_chunk(server: Server, leader: Any, *waiting: Any) -> tuple[int, list[Any]]:
    """A pass of SGLang with `shortest-prefill-first`: where the chunk ends, who joins."""
    queue = Queue(server, "shortest-prefill-first")
    waiting_queue = list(waiting)
    matches = original("_compute_prefix_matches", SchedulePolicy)
    late = compute_prefix_matches(matches, queue.policy, waiting_queue, queue.policy.policy)
    SchedulePolicy._sort_by_shortest_prefill(waiting_queue, late)
    adder = server.adder(chunk=500)
    leader.prefix_len = leader.extend_end
    adder.chunked_req_limit = queue.policy.shortest_prefill_chunk_limit(
        leader, waiting_queue, 500, server.cache.page_size
    )
    assert adder.chunked_req_limit is not None
    server.add_chunk(adder, leader)
    for req in waiting_queue:
        if adder.budget_state() is AddReqResult.OTHER or server.add(adder, req, True) is not (
            CONTINUE
        ):
            break
    server.prepare(adder).release()
    return leader.extend_end, adder.can_run_list[1:]


def test_a_prompt_is_not_slowed_down_for_those_that_wait_for_it() -> None:
    server = Server()
    leader = request("long", [*range(700), *SHARED, *range(60_000, 61_000)])
    waits, short = behind(5000), request("short", list(range(70_000, 70_030)))
    for req in (waits, short):
        req.time_stats.wait_queue_entry_time = 0.0
    assert one_pass(server, leader, waits, chunk=500) == [leader]
    computed(server, leader, 500)
    # Tokens are kept free for the short one alone.
    assert next_chunk(server, leader, waits, short) == (970, [short])
    computed(server, leader, 970)
    state_of(short).stop_waiting()
    # What the second one needs is there, but for less than would be reused.
    computed(server, leader, 1090)
    leader.extend_end = 1090
    end, joined = next_chunk(server, leader, waits)
    assert joined == [waits] and end < 1590
