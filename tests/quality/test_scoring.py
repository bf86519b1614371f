"""The two scores: the fact in the answer, and the divergence of the next-token distributions."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_rope.quality.scoring import answer_kl_nats, is_correct, kl_nats


def normalised(weights: list[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]


distributions = st.lists(st.floats(1e-6, 1.0), min_size=6, max_size=6).map(normalised)


def logs(probabilities: list[float]) -> list[float]:
    return [math.log(p) for p in probabilities]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (" Ingrid Solheim.", True),
        ("INGRID SOLHEIM, who", True),
        (" Ingrid", False),
        ("", False),
    ],
)
def test_a_fact_is_found_in_any_case(answer: str, expected: bool) -> None:
    assert is_correct(answer, "Ingrid Solheim") is expected


@given(distributions, distributions)
def test_lumping_the_tail_gives_a_lower_bound(p: list[float], q: list[float]) -> None:
    whole = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert -1e-12 <= kl_nats(logs(p[:3]), logs(q[:3])) <= whole + 1e-9


@given(distributions)
def test_equal_distributions_do_not_diverge(p: list[float]) -> None:
    assert kl_nats(logs(p[:3]), logs(p[:3])) == pytest.approx(0.0, abs=1e-12)


def test_a_known_divergence() -> None:
    # Two outcomes, the second one in the lump: 0.5 ln(0.5/0.25) + 0.5 ln(0.5/0.75).
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert kl_nats([math.log(0.5)], [math.log(0.25)]) == pytest.approx(expected)


def test_rounding_above_one_is_no_error() -> None:
    assert kl_nats([1e-7], [0.0]) == pytest.approx(0.0, abs=1e-6)


def test_an_answer_is_the_mean_of_its_tokens() -> None:
    half, quarter = [math.log(0.5)], [math.log(0.25)]
    assert answer_kl_nats([half, half], [half, quarter]) == pytest.approx(
        kl_nats(half, quarter) / 2
    )


@pytest.mark.parametrize(("p", "q"), [([-1.0], [-1.0, -2.0]), ([], [])])
def test_unequal_or_empty_input_is_refused(p: list[float], q: list[float]) -> None:
    with pytest.raises(ValueError, match="log probabilities"):
        kl_nats(p, q)
