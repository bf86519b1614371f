"""`python -m tests.soak --minutes 15`: exit code 1 when anything deviated; prints JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.pages import markdown_table, write_generated
from radix_rope.models.fetch import fetch_model
from tests.integration.engines import STOCK, EngineUnderTest
from tests.soak.prompts import chats_of, known_answers, pool_of
from tests.soak.run import soak, start_engine
from tests.texts import english_documents


def main() -> int:
    """Run one soak."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0, help="of load (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the load (%(default)s)")
    parser.add_argument("--prompts", type=int, default=60, help="with known answers (%(default)s)")
    parser.add_argument("--chats", type=int, default=12, help="held beforehand (%(default)s)")
    parser.add_argument("--output", type=Path, help="also write the summary here")
    parser.add_argument("--write-docs", type=Path, help="put the summary into this file")
    options = parser.parse_args()
    model = fetch_model("smollm2-135m-instruct", None, "float32")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    documents = english_documents(
        lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)
    )
    stock = EngineUnderTest(model, STOCK, {})
    try:
        known = known_answers(stock, pool_of(documents, options.prompts, options.seed))
        chats = chats_of(stock, documents, options.chats, options.seed)
    finally:
        stock.stop()
    print(
        f"soak: {len(known)} of {options.prompts} prompts have an answer beyond a tie, and "
        f"{sum(turn.known is not None for chat in chats for turn in chat)} turns of chats",
        flush=True,
    )
    engine = start_engine(model)
    try:
        verdict = soak(engine, documents, known, chats, options.minutes * 60, options.seed)
    finally:
        engine.stop()
    text = json.dumps(verdict.summary, indent=1)
    print(text)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n")
    if options.write_docs is not None:
        write_docs(options.write_docs, verdict.summary)
    for failure in verdict.failures[:20]:
        print(f"soak: {failure}", file=sys.stderr)
    return int(bool(verdict.failures))


def write_docs(path: Path, summary: dict[str, Any]) -> None:
    """Put the summary into its part of the page."""
    rows = [
        (key.replace("_", " "), _cell(value))
        for key, value in summary.items()
        if key != "memory_mib_curve"
    ]
    table = markdown_table([("what", "found"), *rows], left=(0, 1))
    curve = f"Resident memory of the scheduler by time, MiB: {summary['memory_mib_curve']}."
    write_generated(path, "tests.soak", f"{table}\n\n{curve}")


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {count:,}" for key, count in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    sys.exit(main())
