"""Every preset can be made, and its cache is large enough."""

import pytest

from bench.serving.measure import Measurement
from bench.serving.presets import PRESETS
from bench.serving.writer import Vocabulary
from radix_rope.config import RadixRopeConfig
from tests.bench.serving.made import Encode


@pytest.mark.parametrize("name", ["tiny", "short", "claims"])
def test_every_size_can_be_made(name: str, encode: Encode) -> None:
    preset = PRESETS[name]
    vocabulary = Vocabulary(range(100, 40_000), encode)
    steps: list[str] = []
    made = Measurement(preset, vocabulary, RadixRopeConfig(), 1, steps.append)
    longest = max(plan.size.prompt_tokens for plan in preset.cells)
    assert made.cache_tokens > 2 * longest
    assert all(plan.requests >= plan.stock_requests > 0 for plan in preset.cells)
    bursts = sum(len(plan.rates) * plan.bursts for plan in preset.loads)
    cells = sum(3 if plan.radix_cache_requests else 2 for plan in preset.cells)
    assert made.steps(3) == 3 + cells + 2 * bursts
    assert not steps
