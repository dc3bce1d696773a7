"""The comparison of two runs, bit by bit. Pure, but for reading what the runs have told. Start at `differences`."""

from __future__ import annotations

import json
from collections.abc import Collection

from unisono.drill.job_log import JobLog, Step
from unisono.text import list_first, name_ranks

__all__ = ["differences"]

_PARTS = {
    "model": "model",
    "optimizer": "state of the optimizer",
    "average": "averaged model",
    "objects": "scheduler, rates or stateful objects",
}


def differences(calm: JobLog, other: JobLog, *, may_miss: int = 0) -> list[str]:
    """Return how a run differs from a calm one, as sentences without a full stop; none if all bits are equal.

    Args:
        calm: The log of the calm run.
        other: The log of the other one.
        may_miss: So many steps of the other run may be missing in its log: rank 0 has died in so many steps, and may
            not have come to tell about them.
    """
    found = _steps(calm, other, may_miss) or _evaluations(calm, other, may_miss)
    return found + _ends(calm, other)


def _steps(calm: JobLog, other: JobLog, may_miss: int) -> list[str]:
    missing = sorted(calm.steps.keys() - other.steps.keys())
    added = sorted(other.steps.keys() - calm.steps.keys())
    for step in sorted(calm.steps.keys() & other.steps.keys()):
        for optimizer in sorted(calm.steps[step].keys() | other.steps[step].keys()):
            one, two = (run.steps[step].get(optimizer, set()) for run in (calm, other))
            if one != two and (two or not may_miss):
                return [_step(step, one, two)]
    if added or len(missing) > may_miss:
        words = [f"lacks {_name_steps(missing)}"] * bool(missing) + [f"adds {_name_steps(added)}"] * bool(added)
        return [f"the one run does {_count(calm)}, and the other {' and '.join(words)}"]
    return []


def _step(step: int, one: Collection[Step], two: Collection[Step]) -> str:
    if len(one) != 1 or len(two) != 1:
        return f"step {step} was done {len(one)} times in the one run with different results, {len(two)} in the other"
    (first,), (second,) = one, two
    left, right = dict(first), dict(second)
    name = next(name for name in {**left, **right} if left.get(name) != right.get(name))
    return f"step {step} is the first that differs: {name} {_shown(left.get(name))}, then {_shown(right.get(name))}"


def _shown(value: str | None) -> str:
    return "none" if value is None else str(json.loads(value))


def _evaluations(calm: JobLog, other: JobLog, may_miss: int) -> list[str]:
    one, two = calm.evaluations, other.evaluations
    if len(one) != len(two):
        return [] if may_miss else [f"the one run makes {len(one)} evaluations, the other {len(two)}"]
    for (epoch, name, left), (_, _, right) in zip(one, two, strict=True):
        if left != right:
            return [f"the evaluation {name!r} of epoch {epoch + 1} differs: {left}, then {right}"]
    return []


def _ends(calm: JobLog, other: JobLog) -> list[str]:
    expected, ends = next(iter(calm.ends().values()), {}), other.ends()
    apart: dict[str, list[int]] = {}
    for rank, parts in ends.items():
        for part in {**expected, **parts}:
            if parts.get(part) != expected.get(part):
                apart.setdefault(part, []).append(rank)
    found = []
    for part, ranks in apart.items():
        where = "" if len(ranks) == len(ends) else f" on {name_ranks(ranks)}"
        found.append(f"the {_PARTS[part]} at the end is another one{where}")
    return found


def _name_steps(steps: list[int]) -> str:
    return f"step{'s' * (len(steps) > 1)} {list_first(steps, 3)}"


def _count(log: JobLog) -> str:
    return f"{len(log.steps)} step{'s' * (len(log.steps) != 1)}"
