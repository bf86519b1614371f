"""Runs the scenarios on a session and compares every answer with the exact run's.

Owns the order: donors, exact reference in a namespace of its own, then one setting after the
other on the same donors. May not know what is concluded from the records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from radix_rope.quality.chat import Asked, ChatBlocks, Tokens
from radix_rope.quality.records import Target
from radix_rope.quality.scenarios import VARIANTS, Case, CaseBuilder
from radix_rope.quality.scoring import kl_nats
from radix_rope.quality.session import Forced, Position, Session
from radix_rope.quality.settings import DEFAULT, EXACT, FLOOR, Setting
from radix_rope.quality.texts import FactSheet

GREEDY_TOKENS = 12
"""Length of the greedy continuations that are compared."""

COMPARED_TOKENS = 100
"""Tokens of the exact run's distribution that are compared one by one."""

_REFERENCE, _TWO_CHUNKS = "radix-rope-check-reference", "radix-rope-check-floor"
"""Namespaces of the exact runs; the donors and what is reused from them have none."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: all of it for a verdict, less for a try.

    Attributes:
        sheets: which fact sheets.
        questions: how many of each sheet.
        variants: at most so many of each scenario.
        generations: reuses in a row.
        settings: what is compared.
    """

    sheets: tuple[FactSheet, ...]
    questions: int
    variants: int
    generations: int
    settings: tuple[Setting, ...]

    def contexts(self, scenario: str) -> list[tuple[FactSheet, int]]:
        """Every sheet and variant of one scenario, in the order to measure them."""
        variants = min(self.variants, VARIANTS[scenario])
        return [(sheet, variant) for sheet in self.sheets for variant in range(variants)]


@dataclass(frozen=True, slots=True)
class Reference:
    """The exact run's answer to one question.

    Attributes:
        asked: the question.
        forced: the gold answer and the greedy continuation, or one of them if it begins with the
            other.
        positions: what the exact run says at every place of these.
        greedy: the continuation.
    """

    asked: Asked
    forced: tuple[Tokens, ...]
    positions: tuple[list[Position], ...]
    greedy: Tokens


class Measurer:
    """Measures the scenarios of one model on one engine."""

    def __init__(
        self, session: Session, blocks: ChatBlocks, effort: Effort, progress: Progress
    ) -> None:
        """progress: told a line after every context and setting."""
        self._session = session
        self._blocks = blocks
        self._cases = CaseBuilder(blocks)
        self._effort = effort
        self._progress = progress

    def measure(self, scenario: str, sheet: FactSheet, variant: int) -> Iterator[Target]:
        """Every target of one context: all questions, under all settings."""
        questions = [
            self._blocks.ask(question) for question in sheet.questions[: self._effort.questions]
        ]
        if scenario == "repeated":
            return self._repeated(sheet, questions)
        return self._case(self._cases.case(scenario, sheet, variant), questions)

    def _case(self, case: Case, questions: Sequence[Asked]) -> Iterator[Target]:
        session = self._session
        session.flush()
        for donor in case.donors:
            session.read(donor, EXACT)
        references = self._reference(case.context, questions)
        for setting in self._effort.settings:
            donors = case.donors
            if setting.better_donor:
                if not case.better_donors:
                    continue
                for donor in case.better_donors:
                    session.read(donor, EXACT)
                donors += case.better_donors
            if setting.own_plan:
                outcomes = self._one_by_one(case.context, references, setting, donors)
            else:
                outcomes = self._together(case.context, references, setting)
            session.keep_only(donors)
            targets = [
                self._target(case.scenario, setting.key, case.sheet, case.variant, 1, i, r, outcome)
                for i, (r, outcome) in enumerate(zip(references, outcomes, strict=True))
            ]
            kl = fmean(fmean(target.kl_nats) for target in targets)
            self._progress(
                f"{case.scenario}, {case.sheet} {case.variant + 1}, {setting.title}: {kl:.2g} nats"
            )
            yield from targets

    def _repeated(self, sheet: FactSheet, questions: Sequence[Asked]) -> Iterator[Target]:
        """Turn after turn, each reused from those before; then with the last one alone cached."""
        session = self._session
        prompts = self._cases.turn_prompts(sheet, self._effort.generations)
        session.flush()
        references = []
        for prompt in prompts[1:]:
            references.append(self._reference(prompt, questions))
            session.flush()
        for cached in ("all_turns", "last_turn"):
            session.flush()
            session.read(prompts[0], EXACT)
            for generation, prompt in enumerate(prompts[1:], start=1):
                outcomes = self._together(prompt, references[generation - 1], DEFAULT)
                first = generation if cached == "last_turn" else 0
                session.keep_only(prompts[first : generation + 1])
                targets = [
                    self._target("repeated", cached, sheet.name, 0, generation, i, r, outcome)
                    for i, (r, outcome) in enumerate(
                        zip(references[generation - 1], outcomes, strict=True)
                    )
                ]
                kl = fmean(fmean(target.kl_nats) for target in targets)
                self._progress(
                    f"repeated, {sheet.name}, {cached}, generation {generation}: {kl:.2g} nats"
                )
                yield from targets

    def _reference(self, context: Tokens, questions: Sequence[Asked]) -> list[Reference]:
        """The exact run: the context in one prefill, then the questions behind it."""
        session = self._session
        session.read(context, EXACT, _REFERENCE)
        prompts = [context + asked.prompt for asked in questions]
        greedy = session.continue_greedily(prompts, EXACT, _REFERENCE, GREEDY_TOKENS)
        texts = [
            _without_prefixes(asked.gold, continuation)
            for asked, continuation in zip(questions, greedy, strict=True)
        ]
        scored = iter(
            session.score(
                [
                    Forced(prompt, text)
                    for prompt, forced in zip(prompts, texts, strict=True)
                    for text in forced
                ],
                EXACT,
                _REFERENCE,
            )
        )
        return [
            Reference(asked, forced, tuple(next(scored) for _ in forced), continuation)
            for asked, forced, continuation in zip(questions, texts, greedy, strict=True)
        ]

    def _together(
        self, context: Tokens, references: Sequence[Reference], setting: Setting
    ) -> list[_Outcome]:
        """All questions on one context, which is reused and repaired once."""
        session = self._session
        salt = None
        if setting is FLOOR:
            salt = _TWO_CHUNKS
            session.read(context[: len(context) // 2], setting.options, salt)
            session.read(context, setting.options, salt)
            computed = len(context)
        else:
            computed = session.read(context, setting.options)
        scored = self._score(context, references, setting, salt)
        return [
            _Outcome(
                len(context) + len(reference.asked.prompt),
                computed + len(reference.asked.prompt),
                positions,
            )
            for reference, positions in zip(references, scored, strict=True)
        ]

    def _one_by_one(
        self,
        context: Tokens,
        references: Sequence[Reference],
        setting: Setting,
        donors: Sequence[Tokens],
    ) -> list[_Outcome]:
        """Every question as if it were the first: none finds what was repaired for another."""
        outcomes = []
        for place, reference in enumerate(references):
            if place:
                self._session.keep_only(donors)
            prompt = context + reference.asked.prompt
            # First without the gold answer, so that this does not decide what is recomputed.
            computed = self._session.read(prompt, setting.options)
            (positions,) = self._score(context, [reference], setting, None)
            outcomes.append(_Outcome(len(prompt), computed, positions))
        return outcomes

    def _score(
        self,
        context: Tokens,
        references: Sequence[Reference],
        setting: Setting,
        salt: str | None,
    ) -> list[tuple[list[Position], ...]]:
        """The setting's positions for every reference, at the reference's tokens."""
        forced = [
            Forced(context + reference.asked.prompt, text)
            for reference in references
            for text in reference.forced
        ]
        # Distributions are compared along the gold answer; elsewhere the likeliest token is enough.
        support = [
            [
                list(at.logprobs) if place < _shared(text, reference.asked.gold) else []
                for place, at in enumerate(positions)
            ]
            for reference in references
            for text, positions in zip(reference.forced, reference.positions, strict=True)
        ]
        scored = iter(self._session.score(forced, setting.options, salt, support))
        return [tuple(next(scored) for _ in reference.forced) for reference in references]

    def _target(
        self,
        scenario: str,
        setting: str,
        sheet: str,
        variant: int,
        generation: int,
        question: int,
        reference: Reference,
        outcome: _Outcome,
    ) -> Target:
        gold = reference.asked.gold
        exact_at, ours_at = _along(reference, reference.positions, outcome.positions, gold)
        greedy_at = _along(reference, reference.positions, outcome.positions, reference.greedy)[1]
        return Target(
            scenario=scenario,
            setting=setting,
            sheet=sheet,
            variant=variant,
            generation=generation,
            question=question,
            prompt_tokens=outcome.prompt_tokens,
            computed_tokens=outcome.computed_tokens,
            kl_nats=[
                kl_nats(list(exact.logprobs.values()), [ours.logprobs[t] for t in exact.logprobs])
                for exact, ours in zip(exact_at, ours_at, strict=True)
            ],
            same_top=sum(e.top == o.top for e, o in zip(exact_at, ours_at, strict=True)),
            gold_logprob_change=sum(at.forced_logprob for at in ours_at)
            - sum(at.forced_logprob for at in exact_at),
            exact_gold=_is_top(exact_at, gold),
            gold=_is_top(ours_at, gold),
            agrees=_is_top(greedy_at, reference.greedy),
            compared_mass=fmean(sum(map(math.exp, at.logprobs.values())) for at in exact_at),
        )


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One question under one setting."""

    prompt_tokens: int
    computed_tokens: int
    positions: tuple[list[Position], ...]


def _without_prefixes(gold: Tokens, greedy: Tokens) -> tuple[Tokens, ...]:
    """The texts to force: both, or the longer if it begins with the other."""
    if greedy[: len(gold)] == gold:
        return (greedy,)
    if gold[: len(greedy)] == greedy:
        return (gold,)
    return (gold, greedy)


def _shared(text: Tokens, gold: Tokens) -> int:
    """Length of the gold answer where `text` begins with it, else 0."""
    return len(gold) if text[: len(gold)] == gold else 0


def _along(
    reference: Reference,
    exact: tuple[list[Position], ...],
    ours: tuple[list[Position], ...],
    text: Tokens,
) -> tuple[list[Position], list[Position]]:
    """Both runs' positions along `text`, which one of the forced texts begins with."""
    place = next(i for i, forced in enumerate(reference.forced) if forced[: len(text)] == text)
    return exact[place][: len(text)], ours[place][: len(text)]


def _is_top(positions: Sequence[Position], text: Tokens) -> bool:
    """Whether `text` is what the run would write by itself: its likeliest token everywhere."""
    return all(at.top == token for at, token in zip(positions, text, strict=True))
