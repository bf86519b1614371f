"""The repair settings that the quality check compares.

Owns their names, what a request says to ask for one, and what a server's configuration says. May
not know how they are measured.
"""

from __future__ import annotations

from dataclasses import dataclass

Option = str | int


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to ask.

    Attributes:
        key: its name in records.
        title: its name in tables.
        options: what a request puts under `custom_params["radix_rope"]`.
        own_plan: every question is planned on its own, since the question decides what is
            recomputed; otherwise the questions of a context share what was repaired once.
        better_donor: the cache also holds the case's better donors.
        candidate: may be recommended. The noise floor and the better donor are no settings that
            a server could be given.
    """

    key: str
    title: str
    options: dict[str, Option]
    own_plan: bool = False
    better_donor: bool = False
    candidate: bool = True

    @property
    def is_attention(self) -> bool:
        """Whether it needs an engine with a second pass."""
        return self.options.get("repair") == "attention"


def _head(tokens: int) -> dict[str, Option]:
    return {"mode": "shifted", "repair": "head", "recompute_tokens": tokens}


def _attention(percent: int) -> dict[str, Option]:
    return {"mode": "shifted", "repair": "attention", "attention_percent": percent}


EXACT: dict[str, Option] = {"mode": "exact"}
"""What the reference, its noise floor and the donors are asked with."""

FLOOR = Setting("floor", "noise floor: exact, in two chunks", EXACT, candidate=False)
DEFAULT = Setting("head16", "head, 16 tokens (default)", _head(16))
SETTINGS = (
    FLOOR,
    Setting("none", "no repair", {"mode": "shifted", "repair": "none"}),
    DEFAULT,
    Setting("head64", "head, 64 tokens", _head(64)),
    Setting("attention5", "attention, 5%", _attention(5), own_plan=True),
    Setting("attention15", "attention, 15%", _attention(15), own_plan=True),
    Setting(
        "better_donor",
        "head, 16 tokens, better donor",
        _head(16),
        better_donor=True,
        candidate=False,
    ),
)
"""In the order of the report."""

NO_ATTENTION = "without_attention"
"""In a measurement's environment: why the attention settings were left out."""

BY_KEY = {setting.key: setting for setting in SETTINGS}
