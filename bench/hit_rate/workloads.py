"""Sessions, token by token and from a seed: append-only, and one for each way to lose the cache.

Owns what is sent. A session is a generator: it yields requests and is sent their answers. May not
know who answers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np

Ids = tuple[int, ...]
Fresh = Callable[[int], Ids]


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        prompt: token ids.
        backend: which cache it meets. Backends are namespaces (`extra_key`) of one server, which
            hold their content apart exactly as two servers or two models do.
        answer_tokens: length of the answer.
        last: nobody of this session comes back.
    """

    prompt: Ids
    backend: str
    answer_tokens: int
    last: bool


Session = Generator[Request, Ids, None]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes, in tokens where nothing else is said."""

    turns: int = 12
    increment: int = 96
    answer: int = 1
    system: int = 128
    tools: int = 3
    tool: int = 96
    clock: int = 8
    window: int = 5
    """Increments that a truncated history keeps."""
    users: int = 6
    line: int = 16
    document: int = 384


@dataclass(frozen=True, slots=True)
class Case:
    """A workload by name; `sessions` run one after another against an empty cache."""

    key: str
    title: str
    sessions: tuple[Session, ...]


def fresh_tokens(seed: int) -> Fresh:
    """A source of random token ids, so that nothing is equal by chance."""
    generator = np.random.default_rng(seed)
    # Far from the special tokens of any vocabulary this runs on.
    return lambda count: tuple(map(int, generator.integers(1000, 40_000, count)))


def append_only(seed: int, turns: int, increment: int, answer: int = 1) -> Session:
    """The session of the law: nothing but increments, see `law`."""
    shape = Shape(turns=turns, increment=increment, answer=answer)
    return _session(fresh_tokens(seed), shape, lambda turn: ())


def cases(seed: int, shape: Shape) -> list[Case]:
    """Every case, with new tokens for each."""
    makers: dict[str, tuple[str, Callable[[Fresh, Shape], Sequence[Session]]]] = {
        "append": ("append-only", _append),
        "tools": ("a tool added to the list, half-way", _tool_added),
        "system": ("another system prompt, half-way", _other_system),
        "clock": ("a clock at the top, every turn", _clock),
        "truncation": (f"history cut to the last {shape.window} turns", _truncated),
        "short": (f"{shape.users} sessions of 2 turns, nothing in common", _short),
        "document": (
            f"{shape.users} sessions of 2 turns, one document behind each user's own line",
            _one_document,
        ),
        "model": ("another model, half-way", _other_model),
        "scattered": ("turns scattered over 2 backends", _scattered),
    }
    return [
        Case(key, title, tuple(make(fresh_tokens(seed + number), shape)))
        for number, (key, (title, make)) in enumerate(makers.items())
    ]


def _append(fresh: Fresh, shape: Shape) -> Sequence[Session]:
    front = _joined(*_parts(fresh, shape))
    return [_session(fresh, shape, lambda turn: front)]


def _tool_added(fresh: Fresh, shape: Shape) -> Sequence[Session]:
    system, first, *rest = _parts(fresh, shape)
    before = _joined(system, first, *rest)
    after = _joined(system, first, fresh(shape.tool), *rest)
    return [_session(fresh, shape, lambda turn: after if _second_half(turn, shape) else before)]


def _other_system(fresh: Fresh, shape: Shape) -> Sequence[Session]:
    system, *tools = _parts(fresh, shape)
    before, after = _joined(system, *tools), _joined(fresh(shape.system), *tools)
    return [_session(fresh, shape, lambda turn: after if _second_half(turn, shape) else before)]


def _clock(fresh: Fresh, shape: Shape) -> Sequence[Session]:
    front = _joined(*_parts(fresh, shape))
    times = [fresh(shape.clock) for _ in range(shape.turns)]
    return [_session(fresh, shape, lambda turn: times[turn] + front)]


def _truncated(fresh: Fresh, shape: Shape) -> Sequence[Session]:
    front = _joined(*_parts(fresh, shape))
    return [_session(fresh, shape, lambda turn: front, window=shape.window)]


def _short(fresh: Fresh, shape: Shape) -> Sequence[Session]:
    two = replace(shape, turns=2, increment=shape.document)
    return [_session(fresh, two, lambda turn: ()) for _ in range(shape.users)]


def _one_document(fresh: Fresh, shape: Shape) -> Sequence[Session]:
    document = fresh(shape.document)

    def session(front: Ids) -> Session:
        return _session(fresh, replace(shape, turns=2), lambda turn: front)

    return [session(fresh(shape.line) + document) for _ in range(shape.users)]


def _other_model(fresh: Fresh, shape: Shape) -> Sequence[Session]:
    front = _joined(*_parts(fresh, shape))

    def model(turn: int) -> str:
        return f"model {int(_second_half(turn, shape))}"

    return [_session(fresh, shape, lambda turn: front, backend=model)]


def _scattered(fresh: Fresh, shape: Shape) -> Sequence[Session]:
    front = _joined(*_parts(fresh, shape))
    return [_session(fresh, shape, lambda turn: front, backend=lambda turn: f"backend {turn % 2}")]


def _second_half(turn: int, shape: Shape) -> bool:
    return turn >= shape.turns // 2


def _session(
    fresh: Fresh,
    shape: Shape,
    front: Callable[[int], Ids],
    *,
    window: int | None = None,
    backend: Callable[[int], str] = lambda turn: "",
) -> Session:
    """Turn t sends front(t), then its history; `window` increments of it when given."""
    exchanges: list[Ids] = []
    said: Ids = ()
    for turn in range(shape.turns):
        exchanges.append(said + fresh(shape.increment - len(said)))
        history = exchanges[-window:] if window else exchanges
        last = turn == shape.turns - 1
        prompt = front(turn) + _joined(*history)
        said = yield Request(prompt, backend(turn), shape.answer, last)


def _parts(fresh: Fresh, shape: Shape) -> tuple[Ids, ...]:
    return (fresh(shape.system), *(fresh(shape.tool) for _ in range(shape.tools)))


def _joined(*blocks: Sequence[int]) -> Ids:
    return tuple(token for block in blocks for token in block)
