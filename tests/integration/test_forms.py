"""Hooked or patched: the tests of this folder run on the form that they say they run on."""

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from radix_rope.integration import seams
from tests.conftest import PATCHED


@pytest.mark.engine
def test_every_function_is_wrapped_in_the_expected_form(engines: Callable[..., Any]) -> None:
    expected = "step" if PATCHED else "hook"
    assert engines("shifted").probe("forms") == dict.fromkeys(seams.SERVING_PATH, expected)


@pytest.mark.engine
def test_a_server_without_radix_rope_is_not_wrapped(engines: Callable[..., Any]) -> None:
    assert engines("stock").probe("forms") == dict.fromkeys(seams.SERVING_PATH, "none")


def test_the_tree_under_test_is_in_front_in_new_processes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sglang; print(sglang.__file__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    import sglang

    assert done.stdout.strip() == sglang.__file__
    assert (seams.step_of(seams.FORWARD_RAW) is not None) == PATCHED


def test_a_step_is_found_below_a_hook_of_another_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    import functools

    def function() -> str:
        return "stock"

    def step() -> str:
        return "stock" if holder.step.around is None else holder.step.around(function)

    functools.update_wrapper(step, function)
    holder = SimpleNamespace(step=step)
    holder.step.around = None

    @functools.wraps(step)
    def foreign() -> str:
        return step()

    monkeypatch.setattr(seams, "resolve_name", lambda target: foreign)
    assert seams.step_of("any") is step
    seams.wrap({"any": (wrapper := lambda original: f"wrapped {original()}")})
    assert foreign() == "wrapped stock"
    seams.wrap({"any": wrapper})
    with pytest.raises(RuntimeError, match="another cache has taken any"):
        seams.wrap({"any": lambda original: original()})
