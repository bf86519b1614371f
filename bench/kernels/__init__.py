"""Bandwidth of moving keys and values, beside a plain copy of the same bytes."""
