"""Chat formats read from templates, and what the scenarios share with their donors."""

import itertools
from typing import Any

import pytest

from radix_rope.quality.chat import CHATML, PLAIN, ChatBlocks, chat_format
from radix_rope.quality.scenarios import (
    MAX_GENERATIONS_MEASURED,
    SCENARIOS,
    TURNS_BEHIND_CUT,
    VARIANTS,
    CaseBuilder,
)
from radix_rope.quality.texts import conversation, fact_sheets
from tests.demo.words import WordTokenizer, shared_runs

jinja2 = pytest.importorskip("jinja2")

LLAMA3_LIKE = (
    "{{ bos_token }}{% for m in messages %}<H>{{ m['role'] }}</H>\n\n{{ m['content'] }}<E>"
    "{% endfor %}{% if add_generation_prompt %}<H>assistant</H>\n\n{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise('no system') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}[assistant]"
)
DROPS = "{{ messages[-1]['content'] }}"


class Tokenizer(WordTokenizer):
    """With what `chat_format` reads of a transformers tokenizer."""

    def __init__(self, template: str | None, bos: str | None = None, chatml: bool = False) -> None:
        super().__init__()
        self.chat_template, self.bos_token, self.chatml = template, bos, chatml

    def get_vocab(self) -> dict[str, int]:
        return {"<|im_start|>": 1, "<|im_end|>": 2} if self.chatml else {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return super().encode(text)

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        def refuse(message: str) -> None:
            raise ValueError(message)

        template = jinja2.Environment().from_string(self.chat_template or "")
        return str(
            template.render(
                messages=messages,
                bos_token=self.bos_token,
                add_generation_prompt=options["add_generation_prompt"],
                **{"raise": refuse},
            )
        )


def test_a_template_with_a_start_sign() -> None:
    form = chat_format(Tokenizer(LLAMA3_LIKE, bos="<BOS>"))
    assert form.start == "<BOS>"
    assert form.before_system == "<H>system</H>\n\n"
    assert form.after_system == form.to_user == "<E><H>user</H>\n\n"
    assert form.to_assistant == form.to_answer == "<E><H>assistant</H>\n\n"


def test_a_sign_that_opens_every_message_is_no_start() -> None:
    form = chat_format(Tokenizer(LLAMA3_LIKE.removeprefix("{{ bos_token }}"), bos="<H>"))
    assert form.start == "" and form.before_system.startswith("<H>")


def test_without_system_messages_the_user_says_the_instructions() -> None:
    form = chat_format(Tokenizer(NO_SYSTEM))
    assert (form.before_system, form.after_system) == ("[user]", "\n\n")
    assert (form.to_assistant, form.to_answer) == ("\n[assistant]", "\n[assistant]")


def test_without_a_template() -> None:
    assert chat_format(Tokenizer(None, chatml=True)) == CHATML
    assert chat_format(Tokenizer(None)) == PLAIN
    assert chat_format(Tokenizer(None, bos="<s>")).start == "<s>"


def test_a_template_that_drops_messages_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves out or repeats"):
        chat_format(Tokenizer(DROPS))


@pytest.fixture(scope="module")
def builder() -> CaseBuilder:
    return CaseBuilder(ChatBlocks(Tokenizer(LLAMA3_LIKE, bos="<BOS>")))


def text_of(builder: CaseBuilder, tokens: tuple[int, ...]) -> str:
    return str(builder._blocks._tokenizer.decode(tokens))


@pytest.mark.parametrize("sheet", fact_sheets(), ids=lambda sheet: sheet.name)
@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name != "repeated"])
def test_the_sheet_can_be_reused_in_every_case(
    builder: CaseBuilder, scenario: str, sheet: Any
) -> None:
    """It is in the context once, in a run shared with a donor, and at another place if moved."""
    contexts = set()
    for variant in range(VARIANTS[scenario]):
        case = builder.case(scenario, sheet, variant)
        contexts.add(case.context)
        facts = builder._blocks.text(sheet.text)
        places = [i for i in range(len(case.context)) if case.context[i : i + len(facts)] == facts]
        assert len(places) == 1
        for donors in (case.donors, case.better_donors):
            runs = [run for run in shared_runs(case.context, donors) if run.begin <= places[0]]
            if donors:
                assert runs[-1].end >= places[0] + len(facts)
                assert runs[-1].delta or (scenario, variant) == ("edit", 0)
        assert (len(case.better_donors) > 0) is (
            scenario in ("prefix_before", "reorder", "independent")
        )
        # A donor asks another question than those that are scored.
        said = "".join(text_of(builder, donor) for donor in case.donors)
        assert not any(asked.question in said for asked in sheet.questions)
    assert len(contexts) == VARIANTS[scenario]


@pytest.mark.parametrize("variant", range(VARIANTS["truncation"]))
def test_truncated_facts_stand_at_every_distance_from_the_cut(
    builder: CaseBuilder, variant: int
) -> None:
    """As many turns as it says are between the cut and the sheet, all of them in the donor."""
    sheet = fact_sheets()[0]
    case = builder.case("truncation", sheet, variant)
    before = text_of(builder, case.context).partition("Please remember this.")[0]
    between = [turn for turn in conversation() if turn[0] in before]
    assert len(between) == TURNS_BEHIND_CUT[variant]
    assert all(turn[0] in text_of(builder, case.donors[0]) for turn in between)
    assert sorted(TURNS_BEHIND_CUT) == list(range(6))


@pytest.mark.parametrize("scenario", ["prefix_before", "reorder", "independent"])
def test_a_better_donor_has_the_left_context_of_the_request(
    builder: CaseBuilder, scenario: str
) -> None:
    sheet = fact_sheets()[0]
    for variant in range(VARIANTS[scenario]):
        case = builder.case(scenario, sheet, variant)
        first = builder._blocks.text(sheet.text)[:8]
        (better,) = case.better_donors

        def before(tokens: tuple[int, ...], first: tuple[int, ...] = first) -> tuple[int, ...]:
            for at in range(len(tokens)):
                if tokens[at : at + 8] == first:
                    return tokens[max(0, at - 256) : at]
            return ()

        wanted = before(case.context)
        assert len(wanted) == 256 and before(better) == wanted
        assert any(before(donor) for donor in case.donors)
        assert all(before(donor) != wanted for donor in case.donors)


def test_every_turn_changes_the_head_and_keeps_the_rest(builder: CaseBuilder) -> None:
    prompts = builder.turn_prompts(fact_sheets()[0], MAX_GENERATIONS_MEASURED)
    assert len(prompts) == MAX_GENERATIONS_MEASURED + 1
    for before, after in itertools.pairwise(prompts):
        assert before[:60] != after[:60]
        runs = shared_runs(after, [before])
        assert sum(run.end - run.begin for run in runs) > len(before) - 40
