"""What a run was measured on, under the name that benchmarks know it by."""

from radix_rope.quality.machine import describe_machine

__all__ = ["describe_machine"]
