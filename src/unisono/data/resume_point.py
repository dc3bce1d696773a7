"""Resume points of a sampler or loader: the epoch, the position in it, and the settings that decide the order.

All samples before the position are done on all ranks, so any number of ranks can resume from it. Which positions a rank
reads is decided elsewhere: `plan.shares` divides them, and `plan.permutation` maps them to samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from unisono.arguments import whole

__all__ = ["ResumePoint", "read_resume_point", "resume_point_state"]


class ResumePoint(NamedTuple):
    """A place in a run: an epoch and the position in it from which to continue."""

    epoch: int
    """Epoch, from 0."""
    position: int
    """Position in the epoch, over all ranks; the samples before it are done."""


def resume_point_state(point: ResumePoint, *, seed: int, num_samples: int | None, shuffle: bool) -> dict[str, Any]:
    """Return a resume point and the settings that decide the order of samples, as plain integers and booleans."""
    return {**point._asdict(), "seed": seed, "num_samples": num_samples, "shuffle": shuffle}


def read_resume_point(
    state: Mapping[str, Any], *, seed: int, num_samples: int | None, shuffle: bool, owner: str
) -> ResumePoint:
    """Return the resume point in a state that `resume_point_state` returned for the same order of samples.

    `owner` names the object that resumes in messages, such as "sampler"; the other arguments are its settings.

    Raises:
        ValueError: The state is damaged, or belongs to a different order.
        TypeError: The epoch or position is not a whole number.
    """
    missing = [key for key in ("epoch", "position", "seed", "num_samples", "shuffle") if key not in state]
    if missing:
        raise ValueError(
            f"the state has no {', '.join(missing)}; it has {', '.join(map(str, state)) or 'nothing'}. Pass "
            f"what state_dict() of a unisono {owner} returned"
        )
    if state["num_samples"] != num_samples:
        raise ValueError(
            f"the state is of a dataset of {state['num_samples']} samples, and this one has {num_samples}: "
            "the order is another, so samples would be repeated and left out. Resume with the same data, or start "
            "the epoch anew."
        )
    for key, here in (("shuffle", shuffle), ("seed", seed)):
        # Without shuffling the seed is not used.
        if state[key] != here and (key == "shuffle" or shuffle):
            raise ValueError(
                f"the state was saved with {key}={state[key]}, and this {owner} has {key}={here}: the order "
                f"is another, so samples would be repeated and left out. Make the {owner} with {key}={state[key]}."
            )
    point = ResumePoint(whole("epoch", state["epoch"]), whole("position", state["position"]))
    if point.position < 0 or (num_samples is not None and point.position > num_samples):
        raise ValueError(f"the state has position={point.position}, outside [0, {num_samples}]: the state is damaged")
    return point
