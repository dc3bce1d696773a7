"""The costs of a cut: the bytes that cross it, for choosing where stages begin. Pure functions of a program."""

from __future__ import annotations

import math
from itertools import accumulate

from unisono.parallel.pipeline.forward_program import ForwardProgram

__all__ = ["bytes_across"]


def bytes_across(program: ForwardProgram) -> list[int]:
    """Return for each call the bytes of all values that are made before it, and needed by it or later.

    They cross the cut if a stage begins with this call, once in the forward pass. Their gradients cross it backwards.
    """
    change = [0] * (len(program.calls) + 1)
    last_use: dict[int, int] = {}
    for call in program.calls:
        if not call.everywhere and call.on_stage_of is None:
            last_use.update(dict.fromkeys(call.reads, call.number))
    last_use.update(dict.fromkeys(program.results, len(program.calls) - 1))
    for number, last in last_use.items():
        value = program.values[number]
        if not value.everywhere and value.call is not None and last > value.call:
            size = math.prod(value.layout.shape) * value.layout.dtype.itemsize
            change[value.call + 1] += size
            change[last + 1] -= size
    return list(accumulate(change))[:-1]
