"""Everything that touches SGLang.

Uses `content` and `rotary`; neither of them knows this package. What depends
on an SGLang version lives behind `integration.seams`.
"""
