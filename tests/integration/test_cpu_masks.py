"""The masks of the CPU attention backend: what they hide, and that they stay within their bytes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_rope.integration.cpu import attention
from radix_rope.integration.cpu.masks import CausalMasks


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 9),
    prefix=st.integers(0, 9),
    group=st.integers(1, 3),
    window=st.none() | st.integers(0, 12),
)
def test_a_mask_shows_what_a_query_may_see(
    tokens: int, prefix: int, group: int, window: int | None
) -> None:
    mask = CausalMasks(1 << 20).get(tokens, prefix, group, window, torch.float32)
    assert mask.shape == (group * tokens, prefix + tokens)
    for row in range(group * tokens):
        own = prefix + row % tokens
        for column in range(prefix + tokens):
            seen = column <= own and (window is None or column >= own - window)
            assert mask[row, column] == (0 if seen else float("-inf"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layer_gets_the_same_tensor(dtype: torch.dtype) -> None:
    masks = CausalMasks(1 << 20)
    first = masks.get(4, 100, 3, None, dtype)
    assert masks.get(4, 100, 3, None, dtype) is first
    assert first.dtype == dtype
    assert masks.get(4, 100, 3, 8, dtype) is not first


def test_masks_stay_within_their_bytes() -> None:
    masks = CausalMasks(4000)
    for tokens in range(1, 40):
        mask = masks.get(tokens, 10, 1, None, torch.float32)
        assert mask.shape == (tokens, 10 + tokens), "one that is too large is made all the same"
        assert masks.kept_bytes <= 4000
        assert (masks.get(tokens, 10, 1, None, torch.float32) is mask) == (mask.nbytes <= 4000)


def test_a_forward_begins_without_masks() -> None:
    kept = attention._MASKS
    kept.get(4, 100, 3, None, torch.float32)
    assert kept.kept_bytes
    backend: Any = object.__new__(attention.CpuAttentionBackend)
    backend.use_sliding_window_kv_pool = False
    backend.init_forward_metadata(None)
    assert not kept.kept_bytes
    first = kept.get(4, 100, 3, None, torch.float32)
    assert kept.get(4, 100, 3, None, torch.float32) is first
    kept.clear()
