"""One engine run: starts SGLang in this process, measures what the job says, shuts it down.

Owns how requests are sent and timed. May not know what the measurements are compared with.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from bench.demo.calibration import Calibration, is_faster, typical
from bench.demo.prompts import Asked, Scenario, Tokens
from bench.demo.records import Answer, EngineRun, Job, QuestionKey, Timing
from radix_rope.config import ENV_VAR
from radix_rope.quality.scoring import TOP_TOKENS

Progress = Callable[[str], None]

_GREEDY = {"temperature": 0.0}


def measure(job: Job, progress: Progress) -> EngineRun:
    """Run one job on an engine of its own; `progress` is called once for every step."""
    os.environ[ENV_VAR] = job.config
    import sglang

    engine = sglang.Engine(**job.engine_options)
    try:
        progress("engine started")
        return _Session(engine, job, progress).run()
    finally:
        engine.shutdown()


def count_steps(job: Job) -> int:
    """How often `measure` calls `progress`, unless it stops after calibration."""
    timed = job.repetitions or len(job.sheets)
    scenarios = len(next(iter(job.sheets.values()))[0])
    return 1 + bool(job.calibrations) + timed * scenarios


class _Session:
    def __init__(self, engine: Any, job: Job, progress: Progress) -> None:
        self.engine = engine
        self.job = job
        self.progress = progress
        self.run_record = EngineRun([], [], [])

    def run(self) -> EngineRun:
        if not self._calibrate():
            return self.run_record
        sheets = list(self.job.sheets)
        for repetition in range(self.job.repetitions or len(sheets)):
            sheet = sheets[repetition % len(sheets)]
            scenarios, questions = self.job.sheets[sheet]
            # Another question each time; the cache is as it was before the first.
            asked = questions[repetition // len(sheets) % len(questions)]
            for scenario in scenarios:
                self._fill(scenario)
                timing = self._time(scenario, sheet, asked)
                if self.job.repetitions:
                    self.run_record.timings.append(timing)
                if repetition < len(sheets):
                    self.run_record.answers.extend(self._answer(scenario, sheet, questions))
                self.progress(f"{scenario.key}, {sheet}: {timing.ttft_ms:.0f} ms")
        return self.run_record

    def _calibrate(self) -> bool:
        """Warm up and time cold prefills; False when another engine is faster."""
        if not self.job.repetitions and not self.job.calibrations:
            return True
        scenarios, questions = next(iter(self.job.sheets.values()))
        scenario = scenarios[0]
        prompt = scenario.context + questions[0].prompt
        # Once with everything that is compiled or allocated on first use: a prefill, and a
        # request that reuses most of it at another offset.
        self._fill(scenario)
        self._first_token(scenario.donors[0][:8] + prompt)
        for _ in range(self.job.calibrations):
            self._flush()
            cold_ms = self._first_token(prompt)[1]
            hit_ms = self._first_token(scenario.context + questions[-1].prompt)[1]
            self.run_record.calibrations.append(Calibration(cold_ms, hit_ms))
        if not self.job.calibrations:
            return True
        speed = typical(self.run_record.calibrations)
        self.progress(f"cold prefill {speed.cold_ms:.0f} ms, prefix hit {speed.hit_ms:.0f} ms")
        return self.job.rival is None or is_faster(speed, self.job.rival)

    def _flush(self) -> None:
        # The scheduler refuses while it still tidies up after the last request.
        for _ in range(50):
            if self.engine.flush_cache().success:
                return
            time.sleep(0.1)
        raise RuntimeError("the engine does not flush its cache: it still has requests after 5 s")

    def _fill(self, scenario: Scenario) -> None:
        self._flush()
        for donor in scenario.donors:
            self._first_token(donor)

    def _first_token(self, prompt: Tokens) -> tuple[dict[str, Any], float]:
        """meta_info of a request for one token, and its wall time in ms."""
        begin = time.perf_counter()
        result = self.engine.generate(
            input_ids=list(prompt), sampling_params={**_GREEDY, "max_new_tokens": 1}
        )
        return result["meta_info"], 1e3 * (time.perf_counter() - begin)

    def _time(self, scenario: Scenario, sheet: str, asked: Asked) -> Timing:
        meta, ttft_ms = self._first_token(scenario.context + asked.prompt)
        details = meta.get("cached_tokens_details") or {}
        shifted_tokens = details.get("shifted", 0)
        return Timing(
            scenario=scenario.key,
            sheet=sheet,
            prompt_tokens=meta["prompt_tokens"],
            exact_tokens=meta["cached_tokens"] - shifted_tokens,
            shifted_tokens=shifted_tokens,
            ttft_ms=ttft_ms,
        )

    def _answer(
        self, scenario: Scenario, sheet: str, questions: tuple[Asked, ...]
    ) -> Iterable[Answer]:
        """Answer and score all questions on the context that is in the cache now."""
        keys: list[QuestionKey] = [(scenario.key, sheet, i) for i in range(len(questions))]
        prompts = [list(scenario.context + asked.prompt) for asked in questions]
        answers = self.engine.generate(
            input_ids=prompts,
            sampling_params={**_GREEDY, "max_new_tokens": self.job.answer_tokens},
        )
        scored = self._score(prompts, questions, keys)
        for key, answer, (token_ids, logprobs) in zip(keys, answers, scored, strict=True):
            yield Answer(
                key, answer["text"], token_ids, logprobs, answer["meta_info"]["cached_tokens"]
            )

    def _score(
        self, prompts: list[list[int]], questions: tuple[Asked, ...], keys: list[QuestionKey]
    ) -> list[tuple[list[list[int]], list[list[float]]]]:
        """Token ids and log probabilities at every gold token, teacher-forced."""
        support = [self.job.support.get(key) for key in keys]
        wanted: dict[str, Any]
        if all(support):
            # One list of ids a request: the union over its gold tokens, read apart below.
            union = [sorted({t for at in ids or () for t in at}) for ids in support]
            wanted, field = {"token_ids_logprob": union}, "input_token_ids_logprobs"
        else:
            wanted, field = {"top_logprobs_num": [TOP_TOKENS] * len(keys)}, "input_top_logprobs"
        results = self.engine.generate(
            input_ids=[
                [*prompt, *asked.gold] for prompt, asked in zip(prompts, questions, strict=True)
            ],
            sampling_params={**_GREEDY, "max_new_tokens": 1},
            return_logprob=[True] * len(keys),
            # The first entry has no distribution: it is the prompt's last token.
            logprob_start_len=[len(prompt) - 1 for prompt in prompts],
            **wanted,
        )
        scored = []
        for result, asked, at_gold in zip(results, questions, support, strict=True):
            entries = result["meta_info"][field][1:]
            if len(entries) != len(asked.gold):
                raise RuntimeError(
                    f"asked for log probabilities of {len(asked.gold)} tokens and got "
                    f"{len(entries)}: this SGLang reports input log probabilities otherwise"
                )
            tables = [{token: logprob for logprob, token, _ in entry} for entry in entries]
            ids = at_gold or [list(table) for table in tables]
            scored.append((ids, [[t[i] for i in row] for t, row in zip(tables, ids, strict=True)]))
        return scored
