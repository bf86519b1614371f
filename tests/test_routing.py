"""Routing keys: shift invariance, how often prompts agree, and who gets a key."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_rope.routing import WINDOW_TOKENS, RoutingMemory, choose_worker, routing_key

WORKERS = ["http://10.0.0.1:30000", "http://10.0.0.2:30000", "http://10.0.0.3:30000"]
LONG = 400


def fresh(generator: np.random.Generator, count: int) -> list[int]:
    return [int(token) for token in generator.integers(100, 40_000, count)]


tokens = st.lists(st.integers(0, 2**31 - 1), max_size=200)


@given(tokens, st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_a_key_is_a_fingerprint_of_a_window_wherever_it_stands(head: list[int], seed: int) -> None:
    block = fresh(np.random.default_rng(seed), LONG)
    moved = head + block
    # The key of a prompt is that of one of its windows alone, whatever stands around it.
    windows = {
        routing_key(moved[i : i + WINDOW_TOKENS]) for i in range(len(moved) - WINDOW_TOKENS + 1)
    }
    assert routing_key(moved) in windows
    assert routing_key(moved) == min(windows)


@given(st.integers(0, 2**32 - 1), st.integers(0, WINDOW_TOKENS - 1), st.booleans())
@settings(max_examples=50, deadline=None)
def test_order_of_large_blocks_hardly_matters(seed: int, head: int, text: bool) -> None:
    generator = np.random.default_rng(seed)
    parts = [fresh(generator, LONG) for _ in range(2)]
    turned = [fresh(generator, head) + parts[1] + parts[0], parts[0] + parts[1]]
    prompts = ["".join(map(chr, p)) for p in turned] if text else turned
    keys = {routing_key(prompt) for prompt in prompts}
    assert len(keys) <= 2
    inner = {routing_key(prompt) for prompt in (parts[0], parts[1])}
    # A key that lies inside a block is the key of both orders.
    if not text and keys <= inner:
        assert len(keys) == 1


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_prompts_agree_as_often_as_they_share_windows(share: float) -> None:
    generator = np.random.default_rng(7)
    length, pairs, same = 1000, 400, 0
    shared = int(length * share)
    for _ in range(pairs):
        block = fresh(generator, shared)
        one, other = (
            fresh(generator, (head := int(generator.integers(0, length - shared))))
            + block
            + fresh(generator, length - shared - head)
            for _ in range(2)
        )
        same += routing_key(one) == routing_key(other)
    common, windows = shared - WINDOW_TOKENS + 1, length - WINDOW_TOKENS + 1
    expected = common / (2 * windows - common)
    spread = (expected * (1 - expected) / pairs) ** 0.5
    assert abs(same / pairs - expected) < 4 * spread


def test_namespaces_and_kinds_share_no_keys() -> None:
    prompt = list(range(1000, 1400))
    keys = {
        routing_key(prompt),
        routing_key(prompt, namespace="tenant"),
        routing_key("".join(map(chr, prompt))),
        routing_key(np.array(prompt), namespace="other"),
    }
    assert len(keys) == 4
    assert routing_key(np.array(prompt)) == routing_key(prompt)


def test_short_and_empty_prompts_have_keys() -> None:
    assert routing_key([]) != routing_key([1])
    assert routing_key([1, 2, 3]) == routing_key([1, 2, 3]) != routing_key([1, 2, 4])
    assert len(routing_key("")) == 16
    assert routing_key("\ud800 lone surrogate") == routing_key("\ud800 lone surrogate")


def test_keys_and_workers_are_the_same_in_another_process() -> None:
    program = (
        "from radix_rope.routing import *; k = routing_key(list(range(500)), namespace='x');"
        f"print(k, choose_worker(k, {WORKERS!r}))"
    )
    root = Path(__file__).parent.parent
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=root,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    key = routing_key(list(range(500)), namespace="x")
    assert printed == {f"{key} {choose_worker(key, WORKERS)}\n"}


def test_clients_need_numpy_and_sortedcontainers_only() -> None:
    root = Path(__file__).parent.parent
    program = (
        "import sys; before = set(sys.modules); import radix_rope.routing;"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before}"
        " - set(sys.stdlib_module_names))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program],
        cwd=root,
        env={"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert set(printed.split()) == {"radix_rope", "numpy", "sortedcontainers"}


def test_when_a_worker_leaves_only_its_keys_move() -> None:
    keys = [routing_key([number] * 40) for number in range(600)]
    before = {key: choose_worker(key, WORKERS) for key in keys}
    assert before == {key: choose_worker(key, WORKERS[::-1]) for key in keys}
    counts = Counter(before.values())
    assert min(counts.values()) > 120  # 200 each on average
    for key in keys:
        after = choose_worker(key, WORKERS[:2])
        assert after == before[key] or before[key] == WORKERS[2]
    with pytest.raises(ValueError, match="at least one"):
        choose_worker("k", [])


def test_memory_keeps_a_block_together_where_the_min_hash_does_not() -> None:
    generator = np.random.default_rng(3)
    block = fresh(generator, 600)
    prompts = [fresh(generator, 300) + block + fresh(generator, 300) for _ in range(40)]
    memory = RoutingMemory()
    assert len({memory.key(prompt) for prompt in prompts}) == 1
    # Half of every prompt is its own, and often holds the smallest fingerprint.
    assert len({routing_key(prompt) for prompt in prompts}) > 10


def test_memory_does_not_gather_by_a_small_part() -> None:
    generator = np.random.default_rng(4)
    system = fresh(generator, 100)
    memory = RoutingMemory()
    sessions = [system + fresh(generator, 900) for _ in range(20)]
    keys = [memory.key(prompt) for prompt in sessions]
    assert len(set(keys)) > 15
    assert [memory.key(system + prompt[300:]) for prompt in sessions] == keys
    assert memory.key(sessions[0], namespace="tenant") not in keys


def test_memory_forgets_the_least_recently_used() -> None:
    generator = np.random.default_rng(5)
    memory = RoutingMemory(capacity=100, sampling=1)
    block = fresh(generator, 100)
    first = memory.key(fresh(generator, 31) + block)
    assert memory.key(block) == first
    memory.key(fresh(generator, 400))
    assert len(memory._keys) == 100
    assert memory.key(block) == routing_key(block)
    with pytest.raises(ValueError, match="at least 1"):
        RoutingMemory(capacity=0)
