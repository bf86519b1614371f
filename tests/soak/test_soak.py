"""A short soak, as `make soak` runs it for longer."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.engines import EngineUnderTest
from tests.soak.prompts import chats_of, known_answers, pool_of
from tests.soak.run import soak, start_engine

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.fixture
def tight(model_folder: Path) -> Iterator[EngineUnderTest]:
    engine = start_engine(model_folder)
    yield engine
    engine.stop()


def test_a_minute_of_mixed_load(
    tight: EngineUnderTest,
    engines: Callable[[str], EngineUnderTest],
    documents: list[list[int]],
) -> None:
    stock = engines("stock")
    known = known_answers(stock, pool_of(documents, 16, seed=3))
    assert len(known) >= 4
    chats = chats_of(stock, documents, 4, seed=3)
    assert sum(turn.known is not None for chat in chats for turn in chat) >= 4
    verdict = soak(tight, documents, known, chats, seconds=45, seed=3)
    assert verdict.failures == []
