"""Measures matching beside stock SGLang, prints it, and writes JSON and documentation.

    python -m bench.match                               # all sizes, some minutes
    python -m bench.match --quick                       # small sizes, seconds
    python -m bench.match --json out/match.json --write-docs docs/matching.md

Fills a stock `RadixCache` and a `RadixRopeCache` with the same tokens, then asks both the same
requests in turns: stock `match_prefix`, and ours with the plan for what the prefix left. Every
timed call finds the processor's caches cold. CPU times are of the calling thread.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.match import report
from bench.match.adversarial import adversarial, measure_adversarial
from bench.match.caches import Caches
from bench.match.measure import measure_inserts, measure_matches, measure_memory
from radix_rope.quality.machine import describe_machine

KINDS = (("shifted", 0.0), ("shifted", 0.5), ("shifted", 0.95), ("prefix", 0.5), ("prefix", 0.95))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m bench.match", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="small sizes, few repetitions")
    parser.add_argument("--repeat", type=int, help="repetitions per cell (21, quick: 3)")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    parser.add_argument(
        "--write-docs", type=Path, metavar="PAGE", help="also write the tables into this page"
    )
    options = parser.parse_args(arguments)
    repeat = options.repeat or (3 if options.quick else 21)
    setting = {**describe_machine(), "numpy": np.__version__, "repetitions": repeat}
    numbers = measure(options.quick, repeat)
    text = report.as_markdown(setting, numbers)
    print(text)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        everything = json.dumps({"setting": setting, **numbers}, indent=1)
        options.json.write_text(everything + "\n", encoding="utf-8")
    if options.write_docs:
        report.write_docs(options.write_docs, text)


def measure(quick: bool, repeat: int) -> dict[str, Any]:
    """All numbers of one run."""
    cache_sizes = [100_000, 300_000] if quick else [100_000, 1_000_000, 4_000_000]
    requests = [1024, 8192] if quick else [1024, 8192, 32_768, 131_072]
    all_caches = []
    for cached_tokens in cache_sizes:
        caches = Caches(seed=1)
        caches.fill(cached_tokens)
        all_caches.append(caches)
    matches = [
        row
        for size in requests
        for layout, share in KINDS
        for row in measure_matches(all_caches, size, share, layout, repeat)
    ]
    inserts = [measure_inserts(caches, repeat) for caches in all_caches]
    random = np.random.default_rng(2)
    hard = [
        measure_adversarial(*case, max(2, repeat // 3))
        for case in adversarial(random, 10 if quick else 1)
    ]
    return {
        "matches": matches,
        "inserts": inserts,
        "worst_index_bytes_per_token": max(c.worst_bytes_per_token for c in all_caches),
        "memory": measure_memory(cache_sizes[1]),
        "adversarial": hard,
    }


if __name__ == "__main__":
    main()
