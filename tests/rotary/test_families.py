"""Every RoPE family against SGLang's own classes, built as SGLang's models build them.

The truth is the model's own key at the new position: the module is applied at n to the same
content, in float32, while the pool holds its key at m, rounded to the cache dtype.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from radix_rope.rotary.dtypes import cache_dtype
from radix_rope.rotary.proof import check_keys, key_bound, proof_positions
from radix_rope.rotary.spec import RopeSpec, UnsupportedRope
from tests.rotary import support

factory = pytest.importorskip("sglang.srt.layers.rotary_embedding.factory")

from radix_rope.integration.rope_modules import apply_rotary, read_rope  # noqa: E402

CONTEXT = 8192
ORIGINAL = 2048
PAIRS = [
    (0, 0),
    (5, 6),
    (6, 5),
    (3, 20),
    (20, 3),
    (10, 4106),
    (4106, 10),
    (0, CONTEXT - 1),
    (CONTEXT - 1, 0),
]
HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)

YARN = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
FAMILIES: dict[str, tuple[dict[str, Any] | None, bool, float]] = {
    # name: rope_scaling, NeoX, share of the head that is rotated
    "default": (None, True, 1.0),
    "default-gptj": (None, False, 1.0),
    "partial-half (Phi)": (None, True, 0.5),
    "partial-half-gptj (GLM)": (None, False, 0.5),
    "partial-quarter (GPT-NeoX, StableLM)": (None, True, 0.25),
    "linear": ({"rope_type": "linear", "factor": 8.0}, True, 1.0),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
        True,
        1.0,
    ),
    "yarn": ({"rope_type": "yarn", **YARN}, True, 1.0),
    "yarn-untruncated": ({"rope_type": "yarn", "truncate": False, **YARN}, True, 1.0),
    "yarn-mscale": (
        {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.5, "attn_factor": 1.3, **YARN},
        True,
        1.0,
    ),
    "deepseek-yarn": (
        {"rope_type": "deepseek_yarn", "mscale": 1.0, "mscale_all_dim": 0.3, **YARN},
        False,
        1.0,
    ),
    "ntk-alpha": ({"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}, True, 1.0),
    "proportional (Gemma 4)": ({"rope_type": "proportional"}, True, 0.25),
    "mrope-text": ({"rope_type": "default", "mrope_section": "thirds"}, True, 1.0),
    "mrope-interleaved-text": (
        {"rope_type": "default", "mrope_section": "thirds", "mrope_interleaved": True},
        True,
        1.0,
    ),
    "mrope-yarn-text": ({"rope_type": "yarn", "mrope_section": "thirds", **YARN}, True, 1.0),
}
# SGLang multiplies cos and sin by these: a key carries the factor once, before and after.
MAGNIFIED = {"yarn", "yarn-untruncated", "yarn-mscale", "deepseek-yarn", "mrope-yarn-text"}


def make_module(family: str, head_dim: int) -> torch.nn.Module:
    scaling, neox, share = FAMILIES[family]
    if scaling is not None and "mrope_section" in scaling:
        half = head_dim // 2
        scaling = {**scaling, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    module: torch.nn.Module = factory.get_rope(
        head_dim,
        head_dim,
        CONTEXT,
        500000,
        neox,
        scaling,
        dtype=torch.float32,
        partial_rotary_factor=share,
    )
    return module


def pair_norm(rows: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    part = rows.double()[..., : spec.rotary_dim]
    if spec.is_neox:
        first, second = part.chunk(2, dim=-1)
        return torch.hypot(first, second)
    return torch.hypot(part[..., 0::2], part[..., 1::2])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_moved_keys_equal_the_modules_own(family: str, head_dim: int) -> None:
    module = make_module(family, head_dim)
    spec = read_rope(module, family, head_dim, context_len=CONTEXT)
    content = support.random_rows((len(PAIRS), 2, head_dim), torch.float32, head_dim, scale=1.0)
    origins, targets = (torch.tensor(side) for side in zip(*PAIRS, strict=True))
    at_origin = apply_rotary(module, origins, content)
    at_target = apply_rotary(module, targets, content).double()
    norm = pair_norm(at_origin, spec)
    for dtype in support.DTYPES:
        pool = support.make_pool([spec], dtype, slots=64, v_dim=0)
        src, dst = support.slot_pattern("scattered", len(PAIRS), 64, 4)
        pool.view.k[0].view(support.BITS[dtype.itemsize])[src] = support.bits(at_origin.to(dtype))
        support.build(pool.view, "cpu").move(src, dst, targets - origins)
        error = (support.rows(pool.view.k[0], dst).double() - at_target).abs()
        info = cache_dtype(dtype)
        for row, (m, n) in enumerate(PAIRS):
            # Rounding to the cache before and after the move (the first may turn into the
            # other element of the pair), on top of what the model's own float32 RoPE errs.
            rounding = 2.0**0.5 * info.unit_roundoff * (2.0 + info.unit_roundoff)
            bound = key_bound(norm[row], spec, m, n, torch.float32)
            bound = bound + norm[row] * rounding + 2.0 * info.smallest_step
            both = bound.repeat(1, 2) if spec.is_neox else bound.repeat_interleave(2, dim=-1)
            got = error[row, :, : spec.rotary_dim]
            assert (got <= both).all(), f"{dtype} {m} -> {n}: {float((got / both).max()):.2f}"
            rest = content[row, :, spec.rotary_dim :].to(dtype).double()
            kept = support.rows(pool.view.k[0], dst)[row, :, spec.rotary_dim :].double()
            assert torch.equal(kept, rest)


@pytest.mark.parametrize("family", sorted(MAGNIFIED))
def test_the_magnitude_factor_is_applied_once(family: str) -> None:
    """The trap of YaRN: a correction through the module's own table would magnify again."""
    module = make_module(family, 64)
    spec = read_rope(module, family, 64)
    content = support.random_rows((1, 2, 64), torch.float32, 1)
    key = apply_rotary(module, torch.tensor([7]), content)
    magnitude = float(key.norm() / content.norm())
    assert abs(magnitude - 1.0) > 0.03
    pool = support.make_pool([spec], torch.float32, slots=8, v_dim=0)
    pool.view.k[0][1] = key[0]
    support.build(pool.view, "cpu").move(torch.tensor([1]), torch.tensor([2]), torch.tensor([500]))
    assert float(pool.view.k[0][2].norm() / key.norm()) == pytest.approx(1.0, abs=1e-6)
    twice = apply_rotary(module, torch.tensor([500]), key)
    assert float(twice.norm() / key.norm()) == pytest.approx(magnitude, abs=1e-5)


def test_the_proof_passes_on_every_family_and_fails_on_any_other() -> None:
    """Each family's keys are proven with its own spec and with no other family's."""
    positions = proof_positions(CONTEXT)
    # For text, mRoPE is what it extends.
    names = [name for name in FAMILIES if "mrope" not in name]
    specs, keys = {}, {}
    content = support.random_rows((1, 2, 64), torch.float32, 5).repeat(len(positions), 1, 1)
    for name in names:
        module = make_module(name, 64)
        specs[name] = read_rope(module, name, 64)
        keys[name] = apply_rotary(module, torch.tensor(positions), content)
    # A magnitude factor is invisible to a rotation.
    assert specs["yarn"].inv_freq == specs["yarn-mscale"].inv_freq
    for name in names:
        for other in names:
            holds = check_keys(keys[name], positions, specs[other], torch.float32).holds
            same = (specs[name].inv_freq, specs[name].is_neox, specs[name].rotary_dim) == (
                specs[other].inv_freq,
                specs[other].is_neox,
                specs[other].rotary_dim,
            )
            assert holds == same, f"keys of {name}, spec of {other}"


def test_longrope_moves_within_the_original_length_only() -> None:
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1.0 + i / 32 for i in range(32)],
        "long_factor": [2.0 + i for i in range(32)],
        "original_max_position_embeddings": ORIGINAL,
    }
    module = factory.get_rope(64, 64, CONTEXT, 10000, True, scaling, dtype=torch.float32)
    with pytest.raises(UnsupportedRope, match=f"LongRoPE switches.*--context-length {ORIGINAL}"):
        read_rope(module, "x", 64, context_len=CONTEXT)
    with pytest.raises(UnsupportedRope, match="served: unknown"):
        read_rope(module, "x", 64)
    spec = read_rope(module, "x", 64, context_len=ORIGINAL)
    positions = proof_positions(ORIGINAL)
    content = support.random_rows((1, 2, 64), torch.float32, 5).repeat(len(positions), 1, 1)
    keys = apply_rotary(module, torch.tensor(positions), content)
    assert check_keys(keys, positions, spec, torch.float32).holds
    # One position beyond, and every key of the batch comes from the long factors.
    beyond = [*positions[:-1], ORIGINAL + 1]
    mixed = apply_rotary(module, torch.tensor(beyond), content)
    assert not check_keys(torch.cat((keys[:1], mixed[1:])), beyond, spec, torch.float32).holds


@pytest.mark.parametrize(
    ("scaling", "name", "reason"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "DynamicNTKScaling", "base to the length"),
    ],
)
def test_refused_families_are_named(scaling: dict[str, Any], name: str, reason: str) -> None:
    module = factory.get_rope(64, 64, CONTEXT, 10000, True, scaling, dtype=torch.float32)
    with pytest.raises(UnsupportedRope, match=f"{name}.*{reason}.*stock radix cache"):
        read_rope(module, "layer", 64)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("DualChunkRotaryEmbedding", "modulo the chunk"),
        ("FourierRotaryEmbedding", "no rotation"),
        ("Llama4VisionRotaryEmbedding", "two-dimensional"),
    ],
)
def test_classes_that_need_a_gpu_to_be_built_are_refused_by_name(name: str, reason: str) -> None:
    from sglang.srt.layers.rotary_embedding import rope_variant

    # Their constructors want a GPU; only the class is looked at.
    module = getattr(rope_variant, name).__new__(getattr(rope_variant, name))
    torch.nn.Module.__init__(module)
    with pytest.raises(UnsupportedRope, match=f"{name}.*{reason}"):
        read_rope(module, "layer", 64)


def test_a_subclass_or_a_stranger_is_refused_by_name() -> None:
    base = type(make_module("default", 64))

    class Tweaked(base):  # type: ignore[misc, valid-type]
        pass

    class ShinyRotary(torch.nn.Module):
        pass

    tweaked = Tweaked(64, 64, 16, 10000, True, torch.float32)
    for module, name in ((tweaked, "Tweaked"), (ShinyRotary(), "ShinyRotary")):
        with pytest.raises(UnsupportedRope, match=f"{name}.*not among those"):
            read_rope(module, "layer", 64)
