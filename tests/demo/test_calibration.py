"""The faster backend: cold prefill first, prefix hit in a tie."""

import pytest

from bench.demo.calibration import Calibration, is_faster, typical


@pytest.mark.parametrize(
    ("one", "other", "faster"),
    [
        (Calibration(1000, 900), Calibration(2000, 100), True),
        (Calibration(2000, 100), Calibration(1000, 900), False),
        (Calibration(1020, 100), Calibration(1000, 300), True),
        (Calibration(980, 300), Calibration(1000, 100), False),
    ],
)
def test_cold_prefill_decides_and_a_tie_goes_to_the_hit(
    one: Calibration, other: Calibration, faster: bool
) -> None:
    assert is_faster(one, other) is faster


def test_typical_takes_medians_apart() -> None:
    samples = [Calibration(1, 30), Calibration(9, 10), Calibration(5, 20)]
    assert typical(samples) == Calibration(5, 20)
