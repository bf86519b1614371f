"""The proof and the verification: they accept the truth and nothing near it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from radix_rope.rotary.proof import ProofFailed, check_keys, proof_positions, prove
from radix_rope.rotary.reference import rotate
from radix_rope.rotary.spec import RopeSpec, UnsupportedRope
from radix_rope.rotary.verify import run_verification
from tests.rotary import support

CONTEXT = 8192
SPEC = support.spec_of(64, 64, base=1e5)


def model_of(spec: RopeSpec, magnitude: float = 1.0, dtype: torch.dtype = torch.float32):  # type: ignore[no-untyped-def]
    """A model's RoPE: float32 angles, cos and sin and products in `dtype`."""

    def apply(positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        angle = positions.float()[:, None] * torch.tensor(spec.inv_freq, dtype=torch.float32)
        cos = (angle.cos() * magnitude).to(dtype)[:, None]
        sin = (angle.sin() * magnitude).to(dtype)[:, None]
        half = spec.rotary_dim // 2
        first, second = keys[..., :half], keys[..., half : 2 * half]
        rest = keys[..., 2 * half :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    return apply


def changed(**changes: object) -> RopeSpec:
    return dataclasses.replace(SPEC, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [1.0, 1.37])
def test_proves_the_right_spec(dtype: torch.dtype, magnitude: float) -> None:
    proof = prove(model_of(SPEC, magnitude, dtype), SPEC, dtype, CONTEXT)
    assert proof.holds and proof.pairs == len(proof_positions(CONTEXT)) ** 2


FREQUENCIES = SPEC.inv_freq
WRONG = {
    "sign": changed(inv_freq=tuple(-f for f in FREQUENCIES)),
    "layout": changed(is_neox=False),
    "base": support.spec_of(64, 64, base=1.01e5),
    "scaled": changed(inv_freq=tuple(f / 8 for f in FREQUENCIES)),
    "one frequency": changed(inv_freq=(*FREQUENCIES[:-1], FREQUENCIES[-1] * 2)),
    "half of the head": support.spec_of(64, 32, base=1e5),
    "no rope": RopeSpec(64, 0, name="no rope"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", WRONG)
def test_refuses_a_wrong_spec(wrong: str, dtype: torch.dtype) -> None:
    spec = dataclasses.replace(WRONG[wrong], name="layer 7")
    with pytest.raises(ProofFailed, match=r"layer 7: a key moved from position .* bound is .*"):
        prove(model_of(SPEC, 1.0, dtype), spec, dtype, CONTEXT)


def test_a_not_a_number_is_no_proof() -> None:
    positions = [0, 5]
    keys = torch.full((2, 1, 64), float("nan"))
    assert not check_keys(keys, positions, SPEC, torch.float32).holds


def test_positions_reach_the_end_of_the_context_and_not_beyond() -> None:
    for context in (2, 100, 8192, 131072):
        positions = proof_positions(context)
        assert positions == sorted(set(positions))
        assert positions[0] == 0 and positions[-1] == max(context - 1, 1)


def test_verification_holds_for_every_layout_and_dtype() -> None:
    specs = [SPEC, support.spec_of(80, 32, offset=16, neox=False)]
    report = run_verification(specs, support.DTYPES, CONTEXT)
    assert report.holds
    assert [c.letter for c in report.checks] == ["a", "b", *"c" * 6] * 2
    assert "FAILED" not in report.table() and report.table().count("ok") == 16


def test_verification_sees_a_rope_that_is_not_relative() -> None:
    """Statement (a) fails when angles do not add up."""

    def crooked(positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return rotate(keys, (positions.double() * 1.0005).long(), SPEC).float()

    report = run_verification([SPEC], [torch.float32], CONTEXT, [crooked])
    assert not report.holds
    assert [c.letter for c in report.checks if not c.holds] == ["a"]
    assert "FAILED" in report.table()


def test_verification_sees_keys_without_positions() -> None:
    """Statement (b) fails when the same content has the same key everywhere."""
    report = run_verification([SPEC], [torch.float32], CONTEXT, [lambda positions, keys: keys])
    assert [c.letter for c in report.checks if not c.holds] == ["b"]


def test_nothing_to_verify_is_an_error() -> None:
    with pytest.raises(ValueError, match="no RoPE"):
        run_verification([RopeSpec(8, 0, name="x")], [torch.float32], CONTEXT)


class TestSpec:
    def test_says_what_contradicts(self) -> None:
        for changes, text in (
            ({"head_dim": 0}, "head_dim must be positive"),
            ({"rotary_dim": 63}, "must be even"),
            ({"rotary_dim": 66}, "between 0 and head_dim"),
            ({"rotary_offset": 1}, "leaves the row of 64"),
            ({"inv_freq": (1.0,)}, "needs 32 frequencies, got 1"),
            ({"inv_freq": (float("nan"),) * 32}, "not finite"),
        ):
            with pytest.raises(ValueError, match=text):
                changed(**changes)

    def test_refusal_names_the_thing_the_reason_and_the_way_out(self) -> None:
        text = str(UnsupportedRope("OddRope", "it is odd", "use another"))
        assert text == "OddRope: keys cannot be moved to another position: it is odd; use another."
