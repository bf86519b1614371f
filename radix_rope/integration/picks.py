"""From one score per run token to the rows that are computed again.

Owns fitting the best tokens to a number of rows: scattered tokens make many, and a forward holds
few. Knows plans and numbers only; where scores come from is `repair`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Interval = tuple[int, int]
Scores = npt.NDArray[np.float32]


def choose_rows(
    runs: Sequence[Interval], scores: Scores, percent: int, max_rows: int
) -> list[Interval]:
    """The run tokens to compute again, as at most `max_rows` intervals.

    Tokens are ranked one by one, and neighbours share a row. Where that makes too many rows,
    blocks of 2, 4, 8, ... tokens are ranked by their mean instead, until the rows suffice: the
    longer the blocks, the fewer the rows.

    Args:
        runs: request positions [begin, end), ascending, disjoint, none empty.
        scores: float32 [run tokens], in the order of `runs`; higher is chosen first, and of
            equals the first.
        percent: of 100 run tokens, how many are chosen, rounded up; from 1 to 100.
        max_rows: at least 1.

    Returns:
        Ascending, disjoint, not adjacent; together at most ceil(percent / 100 * run tokens)
        tokens, and exactly as many where single tokens make few enough rows.
    """
    total = sum(end - begin for begin, end in runs)
    wanted = -(-total * percent // 100)
    block_tokens = 1
    while True:
        blocks, means = _blocks(runs, scores, block_tokens)
        # This many blocks cannot need more rows than there are.
        last = wanted <= block_tokens * max_rows
        chosen: list[Interval] = []
        left = wanted
        for index in np.argsort(-means, kind="stable").tolist():
            begin, end = blocks[index]
            if end - begin <= left and not (last and len(chosen) == max_rows):
                chosen.append((begin, end))
                left -= end - begin
            if left == 0:
                break
        rows = _merged(chosen)
        if len(rows) <= max_rows:
            return rows
        block_tokens = min(2 * block_tokens, -(-wanted // max_rows))


def _blocks(
    runs: Sequence[Interval], scores: Scores, block_tokens: int
) -> tuple[list[Interval], npt.NDArray[np.float64]]:
    """Runs cut into blocks, the last of each shorter, and each block's mean score."""
    blocks = [
        (low, min(low + block_tokens, end))
        for begin, end in runs
        for low in range(begin, end, block_tokens)
    ]
    lengths = np.array([end - begin for begin, end in blocks])
    firsts = np.cumsum(lengths) - lengths
    return blocks, np.add.reduceat(scores.astype(np.float64), firsts) / lengths


def _merged(intervals: list[Interval]) -> list[Interval]:
    """Ascending, with neighbours joined."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged
