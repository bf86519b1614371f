"""What a server says of itself: `/metrics`, the explained plans; and who left in the middle."""

import http.client
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from radix_rope.config import parse_config
from radix_rope.explain.cached import CachedRequests
from radix_rope.explain.parts import Kind, explain
from tests.integration.test_server import Server

pytestmark = pytest.mark.engine

OPTIONS = '{"explain": true, "max_generations": 1, "check_plans": true}'
CONFIG = parse_config(OPTIONS)

Documents = list[list[int]]


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("metrics") / "log"
    server = Server(
        model_folder, log,
        "--radix-cache-impl", "radix_rope", "--enable-metrics", "--chunked-prefill-size", "512",
        "--radix-rope-config", OPTIONS,
    )  # fmt: skip
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def generate(server: Server, prompt: list[int], rid: str, **sampling: Any) -> dict[str, Any]:
    # One token, whose KV is not cached: a sampled second one may be what a run goes on with.
    body = {"input_ids": prompt, "rid": rid, "sampling_params": {"max_new_tokens": 1, **sampling}}
    return dict(server.post("/generate", body)["meta_info"])


def flush(server: Server) -> None:
    """Empty the cache; SGLang refuses while a request runs."""
    deadline = time.monotonic() + 60
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", "/flush_cache")
        if connection.getresponse().status == 200:
            return
        assert time.monotonic() < deadline, "a request runs on"
        time.sleep(0.1)


def metrics(server: Server) -> dict[str, float]:
    """Values of `sglang:radix_rope_*` by name and own label, after checking SGLang's labels."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/metrics/")
    text = connection.getresponse().read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name, labels = sample.name, dict(sample.labels)
            if not name.startswith("sglang:radix_rope_"):
                continue
            assert labels.pop("model_name") and labels.pop("engine_type") == "unified"
            assert {labels.pop(key) for key in ("tp_rank", "pp_rank", "moe_ep_rank")} == {"0"}
            labels.pop("pid", None)
            key = name.removeprefix("sglang:radix_rope_") + "".join(sorted(labels.values()))
            found[key] = sample.value
    return found


def test_metrics_agree_with_what_the_clients_were_told(
    server: Server, documents: Documents
) -> None:
    before = metrics(server)
    prompts = [
        documents[0] + documents[1],
        documents[2][:37] + documents[0] + documents[1] + documents[3][:11],
        documents[2][:37] + documents[0] + documents[4][:50],
        documents[5][:20] + documents[0][:66] + documents[5][40:60],
    ]
    answers = [generate(server, prompt, f"m{i}") for i, prompt in enumerate(prompts)]
    after = metrics(server)

    def grown(name: str) -> float:
        return after[name] - before[name]

    details = [answer["cached_tokens_details"] or {} for answer in answers]
    shifted = sum(detail.get("shifted", 0) for detail in details)
    exact = sum(detail.get("device", 0) for detail in details)
    prompt_tokens = sum(answer["prompt_tokens"] for answer in answers)
    assert shifted > 800 and exact > 30
    assert grown("prompt_tokens_totalshifted") == shifted
    assert grown("prompt_tokens_totalexact") == exact
    assert grown("prompt_tokens_totalcomputed") == prompt_tokens - exact - shifted
    # The second request's run, whole: of its 648 tokens fewer than the chunk of 512 are computed.
    # The third's prefix is no run.
    assert grown("run_tokens_count") == 1
    copied = grown("run_tokens_sum")
    assert 500 < copied < shifted
    # 30 layers, 3 heads of 64 elements, K and V, float32.
    assert grown("copied_bytes_total") == copied * 30 * 3 * 64 * 2 * 4
    assert grown("copy_seconds_count") == 1 and grown("copy_seconds_sum") > 0
    # Every chunk is planned; the last one of a long prompt may be too short to be matched.
    assert grown("plan_seconds_count") >= grown("matches_total") >= 4
    assert 0 < grown("match_seconds_total") < grown("plan_seconds_sum")
    # 66 tokens are found, but 16 of them would be computed, and 64 are asked for.
    assert grown("refused_donors_totaltoo_short") >= 1
    assert after["index_tokens"] > 600 and after["index_entries"] >= 600 // 32 - 2
    assert after["index_bytes"] > 0
    for stage in ("plan", "copy", "forward"):
        assert after[f"fallbacks_total{stage}"] == 0


def test_second_passes_are_counted_on_top(server: Server, documents: Documents) -> None:
    generate(server, documents[10], "donor of a second pass")
    before = metrics(server)
    prompt = documents[11][:40] + documents[10] + documents[11][40:60]
    repair = {"custom_params": {"radix_rope": {"repair": "attention", "attention_percent": 20}}}
    answer = generate(server, prompt, "second pass", **repair)
    after = metrics(server)
    details = answer["cached_tokens_details"]
    # The first token of a text is never moved.
    assert details["shifted"] == 300 - 1
    # At most a fifth of the run, and the last gap.
    assert 20 < details["recomputed"] <= 20 + 60
    assert (
        after["recomputed_tokens_total"] - before["recomputed_tokens_total"]
        == (details["recomputed"])
    )
    computed = after["prompt_tokens_totalcomputed"] - before["prompt_tokens_totalcomputed"]
    assert computed == len(prompt) - details["shifted"]


def test_a_plan_is_explained_without_its_content(server: Server, documents: Documents) -> None:
    generate(server, documents[6], "donor")
    answer = generate(server, documents[7][:40] + documents[6] + documents[7][40:60], "moved")
    assert answer["cached_tokens_details"]["shifted"] == 300 - 16
    generate(server, documents[7][:80], "again")
    exact_only = {"custom_params": {"radix_rope": {"mode": "exact"}}}
    generate(server, documents[8][:50] + documents[6], "plain", **exact_only)
    lines = {
        match["rid"]: match.string
        for line in server.log_path.read_text().splitlines()
        if (match := re.search(r"radix_rope plan: rid=(?P<rid>\S+) ", line))
    }
    assert (
        "rid=moved prompt_tokens=360 extend=[0,360) exact_prefix_tokens=0 "
        "approximate_prefix_tokens=0 reused_tokens=284; runs: [56,340)<-[16,300) delta=+40 "
        "left_context_tokens=0 donor=exact; rows: [0,56) [340,360)"
    ) in lines["moved"]
    assert "rid=again prompt_tokens=80 extend=[40,80) exact_prefix_tokens=40 " in lines["again"]
    assert "reused_tokens=0; rows: whole" in lines["again"]
    assert "not planned" in lines["plain"]
    tokens = ", ".join(map(str, documents[6][:3]))
    assert not any(tokens in line for line in lines.values())


def test_a_client_that_hangs_up_in_the_middle(server: Server, documents: Documents) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {
        "input_ids": documents[9][:30] + documents[0] + documents[9][30:60],
        "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True},
        "stream": True,
    }
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    first = connection.getresponse().readline()
    assert json.loads(first.removeprefix(b"data: "))["meta_info"]["cached_tokens"] > 200
    connection.close()
    # SGLang notices, aborts the request, and the scheduler is idle: only then it flushes.
    # The server's own check at idle would end it if a slot or a lock were lost.
    flush(server)
    assert generate(server, documents[9][:90], "alive")["cached_tokens"] == 0


def planned_in_log(server: Server, rid: str) -> tuple[int, list[list[int]], int]:
    """Of a request in one chunk: exact prefix, runs (five numbers and left context), rows."""
    (line,) = (
        line
        for line in server.log_path.read_text().splitlines()
        if f"radix_rope plan: rid={rid} " in line
    )
    prefix = re.search(r"exact_prefix_tokens=(\d+)", line)
    assert prefix
    runs = re.findall(
        r"\[(\d+),(\d+)\)<-\[(\d+),(\d+)\) delta=([+-]\d+) left_context_tokens=(\d+)", line
    )
    rows = line.rpartition("rows: ")[2].split(";")[0].count("[")
    return int(prefix[1]), [list(map(int, run)) for run in runs], max(1, rows)


def test_the_command_explains_what_the_server_does(server: Server, documents: Documents) -> None:
    one, two, three, four = documents[12:16]
    donors = {
        "A": one + two[:120],
        "B": three[:30] + two[120:] + three[30:],
        "C": four[:70] + three[:150],
    }
    unique = documents[16]
    prompts = {
        "moved": unique[:23] + one + unique[23:60],
        "behind-a-prefix": one[:140] + unique[60:75] + two[:120] + three[30:200] + unique[75:90],
        "several": four[:70] + unique[90:99] + two[120:] + one[40:] + unique[99:110],
        "in-place": unique[110 : 110 + 70] + three[:150] + unique[180:190],
        "too-short": one[200:270] + unique[190:230],
        "nothing": unique[230:],
    }
    for what, prompt in prompts.items():
        flush(server)
        rid = f"explained-{what}"
        cached = CachedRequests(CONFIG.stride)
        for name, tokens in donors.items():
            # As the command takes them: each computed alone, though they share content.
            alone = {"custom_params": {"radix_rope": {"mode": "exact"}}}
            generate(server, tokens, f"{rid}-{name}", **alone)
            cached.add(name, tokens)
        generate(server, prompt, rid)
        said = explain(cached, prompt, CONFIG)
        runs = [
            [p.begin, p.end, o.donor_begin, o.donor_begin + len(p), o.delta, o.left_context_tokens]
            for p in said.parts
            if p.kind is Kind.REUSED and (o := p.origin) is not None
        ]
        assert (said.tokens(Kind.EXACT), runs, said.rows) == planned_in_log(server, rid), what
        expected_runs = {"moved": 1, "behind-a-prefix": 2, "several": 2, "in-place": 1}
        assert len(runs) == expected_runs.get(what, 0), what
