"""SGLang's router in front of two workers: who gets a request, and what is reused there.

Two layers of the demo model with random weights: who is asked and what is reused does not depend
on weights. Nothing here depends on time either, but for waiting until something has happened, nor
on luck: the router breaks ties at random, so where balance is asserted, requests are held under
way until all of them have been assigned.
"""

import re
import time
import urllib.error
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.servers import OUR_CACHE
from bench.workers import Answer, Worker, healthy_workers, router, worker
from radix_rope.routing import HEADER, RoutingMemory, choose_worker, routing_key

pytestmark = [pytest.mark.engine, pytest.mark.long]

HEAD, LENGTH, RECOMPUTED = 20, 300, 16
# A worker that does not answer leaves at once, and comes back when it does.
WATCHFUL = (
    *("--health-check-interval-secs", "1", "--health-failure-threshold", "2"),
    *("--health-success-threshold", "1", "--cb-failure-threshold", "2"),
    *("--cb-success-threshold", "1", "--cb-timeout-duration-secs", "1"),
)

Start = Callable[..., Worker]


@pytest.fixture(scope="module")
def workers(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    logs = tmp_path_factory.mktemp("workers")
    started: list[Worker] = []
    try:
        for name in ("worker-0", "worker-1"):
            log = logs / name
            started.append(
                worker(model_folder, name, OUR_CACHE, log, max_total_tokens=8000, layers=2)
            )
        for one in started:
            one.wait_until_ready()
        yield started
    finally:
        for one in started:
            one.stop()


@pytest.fixture
def empty(workers: list[Worker]) -> list[Worker]:
    for one in workers:
        one.flush()
    return workers


@pytest.fixture
def start(empty: list[Worker], tmp_path: Path) -> Callable[..., object]:
    @contextmanager
    def started(policy: str, *options: str) -> Iterator[Worker]:
        with router(empty, policy, tmp_path / "router", *options) as front:
            yield front

    return started


def moved(documents: list[list[int]], document: int, head: int) -> list[int]:
    """A document behind a head and before a tail that no other prompt has."""
    alone = documents[19]
    return alone[head * 10 : head * 10 + HEAD] + documents[document] + [head + 100]


@contextmanager
def unanswered(workers: Sequence[Worker]) -> Iterator[None]:
    """Hold back what workers answer: they compute, but their detokenizers stand still."""
    detokenizers = [
        process
        for one in workers
        for process in psutil.Process(one.pid).children(recursive=True)
        if "detokenizer" in " ".join(process.cmdline())
    ]
    assert len(detokenizers) == len(workers)
    for process in detokenizers:
        process.suspend()
    try:
        yield
    finally:
        for process in detokenizers:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def under_way_together(
    front: Worker, workers: Sequence[Worker], prompts: Sequence[list[int]], keys: Sequence[str] = ()
) -> list[Answer]:
    """Send each prompt when a worker has begun the one before; all answers come at the end."""
    headers = [{HEADER: key} for key in keys] or [{}] * len(prompts)
    with ThreadPoolExecutor(len(prompts)) as pool, unanswered(workers):
        answers = []
        for prompt, header in zip(prompts, headers, strict=True):
            before = sum(map(prefills, workers))
            answers.append(pool.submit(front.generate, prompt, headers=header))
            _wait(lambda before=before: sum(map(prefills, workers)) > before)  # type: ignore[misc]
    return [answer.result() for answer in answers]


@pytest.mark.parametrize("policy", ["round_robin", "random", "power_of_two"])
def test_policies_blind_to_content_find_a_block_only_where_they_happen_to_look(
    policy: str, start: Start, documents: list[list[int]]
) -> None:
    with start(policy) as front:
        answers = [front.generate(moved(documents, 0, head)) for head in range(6)]
    seen: set[str] = set()
    for answer in answers:
        # The second prompt on the same worker finds the document at another offset.
        assert answer.exact_tokens == 0
        assert answer.shifted_tokens == (LENGTH - RECOMPUTED if answer.worker in seen else 0)
        seen.add(answer.worker)
    if policy == "round_robin":
        served = [answer.worker for answer in answers]
        assert served[0] != served[1] and served == served[:2] * 3
    assert seen <= {"worker-0", "worker-1"}


def test_cache_aware_follows_prefixes_and_nothing_else(
    empty: list[Worker], start: Start, documents: list[list[int]]
) -> None:
    with start("cache_aware") as front:
        # Under way together, so the second goes to the worker that has nothing to do.
        first = under_way_together(front, empty, documents[:2])
        assert {answer.worker for answer in first} == {"worker-0", "worker-1"}
        for number in (0, 1):
            again = front.generate(documents[number] + documents[2 + number][:40])
            assert again.worker == first[number].worker
            assert (again.exact_tokens, again.shifted_tokens) == (LENGTH, 0)
        # Both documents behind heads of their own: at rest all of it goes to one worker.
        behind = [front.generate(moved(documents, number, 1 + number)) for number in (0, 1)]
        assert len({answer.worker for answer in behind}) == 1
        reused = {answer.shifted_tokens for answer in behind}
        assert reused == {0, LENGTH - RECOMPUTED}


def test_content_keys_bring_a_block_to_its_worker_wherever_it_stands(
    start: Start, documents: list[list[int]]
) -> None:
    memory = RoutingMemory()
    with start("manual") as front:
        for turn in range(3):
            for document in range(4):
                prompt = moved(documents, document, 3 * document + turn)
                answer = front.generate(prompt, headers={HEADER: memory.key(prompt)})
                assert answer.exact_tokens == 0
                assert answer.shifted_tokens == (LENGTH - RECOMPUTED if turn else 0)


def test_equal_keys_meet(start: Start, documents: list[list[int]]) -> None:
    owner: dict[str, str] = {}
    with start("manual", "--assignment-mode", "min_group") as front:
        for turn in range(2):
            for document in range(12):
                prompt = moved(documents, document, 2 * document + turn)
                key = routing_key(prompt)
                answer = front.generate(prompt, headers={HEADER: key})
                assert owner.setdefault(key, answer.worker) == answer.worker


def test_unequal_keys_under_way_spread(
    empty: list[Worker], start: Start, documents: list[list[int]]
) -> None:
    """`min_group` counts the keys under way: equal counts are broken at random, others never."""
    prompts = [moved(documents, document, document) for document in range(6)]
    keys = [routing_key(prompt) for prompt in prompts]
    assert len(set(keys)) == len(keys)
    with start("manual", "--assignment-mode", "min_group") as front:
        served = [one.worker for one in under_way_together(front, empty, prompts, keys)]
        for first in range(0, len(served), 2):
            assert set(served[first : first + 2]) == {"worker-0", "worker-1"}
        # What was assigned stays, whatever is under way now.
        for prompt, key, worker in zip(prompts, keys, served, strict=True):
            assert front.generate(prompt, headers={HEADER: key}).worker == worker


def test_without_a_router_a_client_chooses(empty: list[Worker], documents: list[list[int]]) -> None:
    memory, by_url = RoutingMemory(), {one.url: one for one in empty}
    for turn in range(2):
        for document in range(4):
            prompt = moved(documents, document, 2 * document + turn)
            chosen = by_url[choose_worker(memory.key(prompt), list(by_url))]
            assert chosen.generate(prompt).shifted_tokens == turn * (LENGTH - RECOMPUTED)


TEXT = "The canal was dug by hand in the year of the flood, and every spring it is cleaned. " * 6


def ask_generate(front: Worker, document: list[int], fields: dict[str, object]) -> int:
    """Ask `/generate`, where the request's own options are a sampling parameter."""
    sampling: dict[str, object] = {"max_new_tokens": 1}
    if "custom_params" in fields:
        sampling["custom_params"] = fields["custom_params"]
    others = {name: value for name, value in fields.items() if name != "custom_params"}
    body = {"input_ids": document, "sampling_params": sampling, **others}
    return int(front.post("/generate", body)["meta_info"]["cached_tokens"])


def ask_completions(front: Worker, document: list[int], fields: dict[str, object]) -> int:
    body = {"model": "x", "prompt": f"{document[0]} {TEXT}", "max_tokens": 1, **fields}
    return _cached(front.post("/v1/completions", body))


def ask_chat(front: Worker, document: list[int], fields: dict[str, object]) -> int:
    messages = [{"role": "user", "content": f"{document[0]} {TEXT}"}]
    body = {"model": "x", "messages": messages, "max_tokens": 1, **fields}
    return _cached(front.post("/v1/chat/completions", body))


def _cached(answer: dict[str, Any]) -> int:
    details = answer["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
    return int(details["cached_tokens"])


@pytest.mark.parametrize(
    ("ask", "kept"),
    [
        (ask_generate, {"extra_key"}),
        (ask_completions, {"custom_params", "cache_salt", "extra_key"}),
        (ask_chat, set()),
    ],
)
def test_what_the_router_passes_on(
    ask: Callable[..., int],
    kept: set[str],
    empty: list[Worker],
    start: Start,
    documents: list[list[int]],
) -> None:
    """Facts that docs/routing.md states about version 0.3.2."""
    # Both workers hold the prompt.
    held = [ask(one, documents[0], {}) for one in empty]
    assert max(held) < 50
    nobody_can = {"custom_params": {"radix_rope": {"mode": "no such mode"}}}
    with pytest.raises(urllib.error.HTTPError, match="400"):
        ask(empty[0], documents[0], nobody_can)
    with start("round_robin") as front:
        for name in ("extra_key", "cache_salt"):
            for number in range(2):
                found = ask(front, documents[0], {name: f"tenant {number}"})
                # With a name of its own a tenant finds nothing of what another one left.
                assert (found == 0) == (name in kept), (name, found)
        if "custom_params" in kept:
            with pytest.raises(urllib.error.HTTPError, match="400"):
                ask(front, documents[0], nobody_can)
        else:
            assert ask(front, documents[0], nobody_can) > 50


def prefills(one: Worker) -> int:
    """How many prefills it began, not counting health checks, which have one token."""
    return len(re.findall(r"Prefill batch.*#new-token: (?!1,)", one.log()))


def test_a_worker_that_dies_and_comes_back_loses_no_request(
    workers: list[Worker], start: Start, documents: list[list[int]]
) -> None:
    def ask(front: Worker, number: int) -> str:
        prompt = moved(documents, number % 10, number % 10)
        return front.generate(prompt, headers={HEADER: str(number)}).worker

    with start("round_robin", *WATCHFUL) as turns, start("manual", *WATCHFUL) as manual:
        assert {ask(turns, number) for number in range(2)} == {"worker-0", "worker-1"}
        # Workers of new keys are drawn at random; after enough draws there are two of this one.
        its_own = (number for number in range(200) if ask(manual, number) == "worker-1")
        keys = list(islice(its_own, 2))
        requests = [(front, number) for front in (turns, manual) for number in keys * 2]
        with ThreadPoolExecutor(len(requests)) as pool, unanswered(workers[1:]):
            before = prefills(workers[1])
            under_way = [pool.submit(ask, *request) for request in requests]
            _wait(lambda: prefills(workers[1]) > before)
            workers[1].kill()
            try:
                # Also what the dead worker had begun is asked again, of the other one.
                assert {future.result() for future in under_way} == {"worker-0"}
                assert {ask(*request) for request in requests} == {"worker-0"}
            finally:
                workers[1].start()
                workers[1].wait_until_ready()
        for front in (turns, manual):
            _wait(lambda front=front: len(healthy_workers(front)) == 2)  # type: ignore[misc]
        # The router tries it again with requests, new keys among them.
        for front in (turns, manual):
            served = {ask(front, number) for number in range(100, 120)}
            assert served == {"worker-0", "worker-1"}
        # Its cache was empty, and serves as before.
        first, second = (workers[1].generate(moved(documents, 15, head)) for head in (1, 2))
        assert first.shifted_tokens == 0
        assert second.shifted_tokens == LENGTH - RECOMPUTED


def _wait(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)
