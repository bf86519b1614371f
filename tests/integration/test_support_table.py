"""docs/support.md says what is true: its tests exist, its refusals are what is raised."""

import ast
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radix_rope.integration import support
from tests.integration.test_startup import parser, plain_config, plain_model  # noqa: F401

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "support.md"

# What asks for a model of the page, as arguments of `refuse_unsupported`.
MODELS: dict[str, dict[str, Any]] = {
    "hybrid sliding-window model": {"is_hybrid_swa": True},
    "Mamba or other recurrent state": {"is_hybrid_ssm": True},
    "encoder-decoder model": {"model": plain_model(is_encoder_decoder=True)},
    "multimodal model": {"model": plain_model(is_multimodal=True)},
    "n-gram embeddings": {"ngram_embedding": True},
}


def table(heading: str) -> list[list[str]]:
    """Cells of the table below a heading, without its head."""
    section = PAGE.read_text().split(f"## {heading}", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("| ") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.split(" | ")] for row in rows[2:]]


def refusal(**changed: Any) -> str:
    """What is raised for a configuration or model that differs from a plain one."""
    models = {"is_hybrid_swa", "is_hybrid_ssm", "ngram_embedding", "model"}
    asked = {"is_hybrid_swa": False, "is_hybrid_ssm": False, "model": plain_model()}
    asked |= {key: value for key, value in changed.items() if key in models}
    config = {key: value for key, value in changed.items() if key not in models}
    with pytest.raises(support.UnsupportedFeature) as error:
        support.refuse_unsupported(plain_config(**config), **asked)
    return str(error.value)


@pytest.fixture
def options(parser: Any) -> Callable[[str], dict[str, Any]]:  # noqa: F811
    """What SGLang's own command line makes of options, without its defaults."""
    plain = vars(parser.parse_args(["--model-path", "m"]))

    def read(text: str) -> dict[str, Any]:
        given = vars(parser.parse_args(["--model-path", "m", *shlex.split(text)]))
        return {key: value for key, value in given.items() if value != plain[key]}

    return read


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE.read_text())
    assert len(named) > 30
    for file, name in named:
        tree = ast.parse((ROOT / "tests" / "integration" / file).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{file} has no {name}"
    for heading in ("Supported", "Exact"):
        rows = table(heading)
        assert len(rows) > 5
        for row in rows:
            assert len(row) == 3 and "::test_" in row[2], row


def test_every_refusal_says_what_the_page_says(
    options: Callable[[str], dict[str, Any]],
) -> None:
    rows = table("Refused at start-up")
    assert len(rows) > 30
    covered: set[str] = set()
    for asked, name, reason in rows:
        changed = MODELS[asked] if asked in MODELS else options(asked.strip("`"))
        assert changed, asked
        covered |= changed.keys()
        message = refusal(**changed)
        assert message.startswith(f"radix_rope: {name.strip('`')} is not supported: "), asked
        assert reason in message, asked
    # And nothing is refused that the page does not name.
    assert {asked for asked, _, _ in rows} >= MODELS.keys()
    checked = set(re.findall(r"\bcfg\.(\w+)", Path(support.__file__).read_text()))
    # Another spelling of --attn-dp-size, and of --attention-backend.
    assert checked - covered == {"enable_dp_attention", "prefill_attention_backend"}


def test_checked_options_are_sglangs(options: Callable[[str], dict[str, Any]]) -> None:
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path="m")
    assert [name for name in vars(plain_config()) if not hasattr(args, name)] == []
