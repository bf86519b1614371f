"""The chart has a panel for every measured scenario and none for others."""

import dataclasses
from pathlib import Path

from radix_rope.quality.chart import draw
from radix_rope.quality.verdict import Limits
from tests.quality.support import measurement


def size(path: Path) -> tuple[int, int]:
    """Width and height from a PNG's header."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n")
    return int.from_bytes(content[16:20]), int.from_bytes(content[20:24])


def test_fewer_scenarios_make_a_smaller_chart(tmp_path: Path) -> None:
    everything = measurement(targets=2)
    first = everything.targets[0].scenario
    alone = [one for one in everything.targets if one.scenario == first]
    draw(everything, Limits(), "all", tmp_path / "all.png")
    draw(dataclasses.replace(everything, targets=alone), Limits(), "one", tmp_path / "one.png")
    (width, height), (one_width, one_height) = (
        size(tmp_path / "all.png"),
        size(tmp_path / "one.png"),
    )
    assert one_width < width and one_height < height
