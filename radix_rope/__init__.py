"""Position-independent prefix cache for SGLang.

A request reuses KV for every token run that is already cached, at whatever
offset it stands: `content` finds the runs, `rotary` moves their keys to the
new positions, `integration` makes SGLang compute only the gaps between them.
"""

__version__ = "0.1.0"
