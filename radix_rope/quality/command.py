"""`radix-rope check`: measures a model, says whether reuse may be on, and with which setting.

Owns the engine of the check and the files that are written.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from radix_rope.config import ENV_VAR, RadixRopeConfig, config_from_env
from radix_rope.quality import records
from radix_rope.quality.chart import draw
from radix_rope.quality.chat import ChatBlocks
from radix_rope.quality.machine import describe_machine
from radix_rope.quality.measure import COMPARED_TOKENS, GREEDY_TOKENS, Effort, Measurer
from radix_rope.quality.records import Measurement
from radix_rope.quality.report import as_text, verdict_text
from radix_rope.quality.scenarios import MAX_GENERATIONS_MEASURED, SCENARIOS, VARIANTS
from radix_rope.quality.session import Session
from radix_rope.quality.settings import NO_ATTENTION, SETTINGS
from radix_rope.quality.store import model_fingerprint, save_verdict
from radix_rope.quality.texts import FactSheet, fact_sheets
from radix_rope.quality.verdict import MAX_KL_NATS, Limits, Verdict, judge

PASSED, FAILED, WRONG = 0, 1, 2
"""Exit codes: a setting passes; none does; the check could not be made."""

_RPC = "radix_rope.integration.check_rpc:CheckRpc"
_IMPL_VARIABLE = "RADIX_ROPE_CACHE_IMPL"


class CheckError(ValueError):
    """The check cannot be made as asked; the message says what to do instead."""


def check_command(arguments: argparse.Namespace) -> int:
    """Measure what is missing, judge, print, write."""
    try:
        folder = Path(arguments.model_path).expanduser()
        fingerprint = model_fingerprint(folder)
        limits = _limits(arguments.max_kl, arguments.min_kept)
        measurement = _measured_before(arguments, fingerprint)
        missing = missing_contexts(arguments, measurement)
        if missing:
            measurement = _measure(arguments, folder, fingerprint, missing, measurement)
        assert measurement is not None
        verdict = judge(measurement, limits)
    except (CheckError, FileNotFoundError, ValueError) as error:
        print(f"radix-rope check: {error}", file=sys.stderr)
        return WRONG
    print(f"\n{as_text(measurement, limits)}\n\n{verdict_text(verdict)}")
    _write(arguments, measurement, limits, verdict)
    return PASSED if verdict.passed else FAILED


def subtitle(measurement: Measurement) -> str:
    """What was measured and where, one line."""
    said = {"model": measurement.model, "date": measurement.date, **measurement.environment}
    return ", ".join(f"{name}: {value}" for name, value in said.items())


def _limits(max_kl: list[str], min_kept: float) -> Limits:
    limits = Limits(min_kept_share=min_kept)
    for text in max_kl:
        scenario, named, value = text.rpartition("=")
        try:
            nats = float(value)
        except ValueError:
            raise CheckError(f"--max-kl {text!r}: give NATS or SCENARIO=NATS") from None
        if named and scenario not in SCENARIOS:
            raise CheckError(
                f"--max-kl {text!r}: there is no scenario {scenario!r}; there are "
                f"{', '.join(SCENARIOS)}"
            )
        for name in [scenario] if named else MAX_KL_NATS:
            limits.max_kl_nats[name] = nats
    return limits


def _measured_before(arguments: argparse.Namespace, fingerprint: str) -> Measurement | None:
    """With `--resume`, what the JSON already holds."""
    if not arguments.resume:
        return None
    if arguments.json is None:
        raise CheckError("--resume reads the file of --json: name it")
    if not arguments.json.is_file():
        return None
    try:
        before = records.read(arguments.json.read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckError(
            f"--resume: {arguments.json} is no result of this version ({error!r}); measure anew, "
            "without --resume"
        ) from error
    if before.fingerprint != fingerprint:
        raise CheckError(
            f"--resume: {arguments.json} is about another model, {before.model}; name another "
            "file, or leave --resume out"
        )
    return before


def _effort(arguments: argparse.Namespace) -> Effort:
    sheets = fact_sheets()
    most = min(len(sheet.questions) for sheet in sheets)
    questions = arguments.questions or (4 if arguments.quick else most)
    if not 1 <= questions <= most:
        raise CheckError(f"--questions {questions}: choose from 1 to {most}")
    if arguments.quick:
        return Effort(sheets[:1], questions, 1, 3, SETTINGS)
    return Effort(sheets, questions, max(VARIANTS.values()), MAX_GENERATIONS_MEASURED, SETTINGS)


def missing_contexts(
    arguments: argparse.Namespace, before: Measurement | None
) -> list[tuple[str, FactSheet, int]]:
    """Scenario, sheet and variant of every context that is still to be measured."""
    targets = [] if before is None else before.targets
    measured = {(target.scenario, target.sheet, target.variant) for target in targets}
    return [
        (scenario, sheet, variant)
        for scenario in arguments.scenario or SCENARIOS
        for sheet, variant in _effort(arguments).contexts(scenario)
        if (scenario, sheet.name, variant) not in measured
    ]


def _without_attention(effort: Effort) -> Effort:
    settings = tuple(setting for setting in effort.settings if not setting.is_attention)
    return dataclasses.replace(effort, settings=settings)


def _measure(
    arguments: argparse.Namespace,
    folder: Path,
    fingerprint: str,
    contexts: list[tuple[str, FactSheet, int]],
    before: Measurement | None,
) -> Measurement:
    effort = _effort(arguments)
    from transformers import AutoTokenizer

    blocks = ChatBlocks(AutoTokenizer.from_pretrained(folder))
    options = _engine_options(arguments, folder)
    targets = [] if before is None else list(before.targets)
    measurement = before
    print(f"Starting SGLang on {folder} ({options['dtype']}) ...", file=sys.stderr)
    with _engine(options) as engine:
        environment = {
            "dtype": _dtype_of(engine),
            "kv_cache_dtype": str(engine.server_args.kv_cache_dtype),
            "attention_backend": str(engine.server_args.attention_backend),
            **describe_machine(),
        }
        session = Session(engine, COMPARED_TOKENS)
        refusal = session.no_second_pass()
        if refusal is not None:
            # Asked all the same, the engine would refuse, as it does a client.
            environment[NO_ATTENTION] = f"the engine has {refusal}"
            print(f"Without the attention settings: {environment[NO_ATTENTION]}", file=sys.stderr)
            effort = _without_attention(effort)
        measurer = Measurer(session, blocks, effort, lambda line: print(line, file=sys.stderr))
        for scenario, sheet, variant in contexts:
            targets.extend(measurer.measure(scenario, sheet, variant))
            measurement = Measurement(
                model=folder.resolve().name,
                fingerprint=fingerprint,
                date=datetime.datetime.now(datetime.UTC).date().isoformat(),
                environment=environment,
                greedy_tokens=GREEDY_TOKENS,
                top_tokens=COMPARED_TOKENS,
                targets=list(targets),
            )
            if arguments.json is not None:
                # After every context, so that an interrupted check can be resumed.
                _write_json(arguments.json, measurement, None)
    assert measurement is not None
    return measurement


def _engine_options(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from torch import accelerator

    dtype = arguments.dtype or ("auto" if accelerator.is_available() else "float32")
    try:
        more = json.loads(arguments.engine_args)
    except json.JSONDecodeError as error:
        raise CheckError(f"--engine-args is not valid JSON ({error})") from error
    if not isinstance(more, dict):
        raise CheckError("--engine-args must be a JSON object of sglang.Engine arguments")
    return {
        "model_path": str(folder),
        "dtype": dtype,
        "radix_cache_backend": "radix_rope",
        # Attention repair makes a row of nearly every token it picks.
        "max_running_requests": 512,
        "max_total_tokens": 20_000,
        # Longer than any prompt here: a reference is one prefill, not several.
        "chunked_prefill_size": 4096,
        "disable_cuda_graph": True,
        "sleep_on_idle": True,
        "random_seed": 1,
        "log_level": "warning",
        **more,
    }


def _config(operators: RadixRopeConfig) -> RadixRopeConfig:
    """The operator's options, but for what the verdict is about: servers are held to that."""
    default = RadixRopeConfig()
    return dataclasses.replace(
        operators,
        mode="shifted",
        require_check=False,
        repair=default.repair,
        recompute_tokens=default.recompute_tokens,
        attention_percent=default.attention_percent,
        max_generations=default.max_generations,
    )


@contextmanager
def _engine(options: dict[str, Any]) -> Iterator[Any]:
    """An engine with radix_rope, the operator's options, and the check's way to its cache."""
    config = _config(config_from_env())
    before = {name: os.environ.get(name) for name in (ENV_VAR, _IMPL_VARIABLE)}
    os.environ[ENV_VAR] = json.dumps(dataclasses.asdict(config))
    os.environ[_IMPL_VARIABLE] = _RPC
    try:
        import sglang

        engine = sglang.Engine(**options)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    try:
        yield engine
    finally:
        engine.shutdown()


def _dtype_of(engine: Any) -> str:
    """As in "float32", also where SGLang chose it."""
    return str(engine.tokenizer_manager.model_config.dtype).removeprefix("torch.")


def _write(
    arguments: argparse.Namespace, measurement: Measurement, limits: Limits, verdict: Verdict
) -> None:
    options = json.dumps(verdict.options)
    print(f"\nOptions for the server: --radix-rope-config '{options}'")
    if arguments.write_config is not None:
        arguments.write_config.write_text(options + "\n", encoding="utf-8")
    if arguments.json is not None:
        _write_json(arguments.json, measurement, verdict)
    if arguments.plot is not None:
        draw(measurement, limits, subtitle(measurement), arguments.plot)
    if verdict.complete:
        path = save_verdict(measurement.fingerprint, dataclasses.asdict(verdict))
        print(f"The verdict is in {path}, where servers of this model look for it.")


def _write_json(path: Path, measurement: Measurement, verdict: Verdict | None) -> None:
    content = {
        "verdict": None if verdict is None else dataclasses.asdict(verdict),
        "measurement": records.to_json(measurement),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
