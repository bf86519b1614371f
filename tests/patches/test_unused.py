"""A server that does not use the patches is, bit for bit, the server without them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from radix_rope.patching import apply, installed_sglang


def answers(model: Path, tree: Path) -> list[dict[str, Any]]:
    """What the SGLang in `tree` answers without our plugin (only our CPU platform is loaded)."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RADIX_ROPE_CO")}
    paths = [str(tree), str(Path(__file__).parent.parent.parent)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.patches.answers", str(model)],
        env={
            **environment,
            "SGLANG_PLUGINS": "radix_rope_cpu",
            "PYTHONPATH": os.pathsep.join(paths),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    result: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


@pytest.mark.engine
def test_answers_do_not_change_by_one_bit(model_folder: Path) -> None:
    stock = answers(model_folder, installed_sglang()[1].parent)
    patched = answers(model_folder, apply()[0])
    assert len(stock) == 5
    assert any(answer["cached_tokens"] for answer in stock), "no request hit the cache"
    assert all(len(answer["output_token_logprobs"]) == 6 for answer in stock)
    assert patched == stock
