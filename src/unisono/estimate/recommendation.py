"""Which of some layouts to take, and what to change if none fits. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.estimate.costs import LayoutCost, MemoryParts

__all__ = ["fits", "largest_part", "recommend"]

_TIE = 1.05
"""Layouts whose steps differ less are equal: the first of them is the simpler one."""


def fits(cost: LayoutCost, limit_nbytes: int | None) -> bool:
    """Return True if a layout keeps a limit of memory for each rank, or there is none."""
    return limit_nbytes is None or cost.known_nbytes <= limit_nbytes


def recommend(costs: Sequence[LayoutCost], limit_nbytes: int | None) -> LayoutCost | None:
    """Return the layout with the shortest step of those that fit, and of several about as short ones the first.

    Args:
        costs: The layouts, simpler ones first.
        limit_nbytes: The memory of a rank.

    Returns:
        The layout; None if none fits.

    >>> def cost(name, step_s, nbytes):
    ...     memory = MemoryParts(parameters=nbytes, gradients=0, optimizer=0, activations=0)
    ...     return LayoutCost(name=name, code="", memory=memory, sent_nbytes=0, step_s=step_s)
    >>> costs = [cost("one", 4.0, 900), cost("shared", 2.05, 800), cost("stages", 2.0, 500)]
    >>> [recommend(costs, limit).name for limit in (None, 600)], recommend(costs, 400)
    (['shared', 'stages'], None)
    """
    fitting = [cost for cost in costs if fits(cost, limit_nbytes) and not (cost.trial and cost.trial.has_failed)]
    # What is tried is better known than what is planned.
    fitting = [cost for cost in fitting if cost.trial and not cost.trial.why_not] or fitting
    if not fitting:
        return None
    fastest = min(cost.known_step_s for cost in fitting)
    return next(cost for cost in fitting if cost.known_step_s <= fastest * _TIE)


def largest_part(memory: MemoryParts) -> str:
    """Return the name of what takes most of a rank's memory, without the process itself.

    >>> largest_part(MemoryParts(parameters=3, gradients=4, optimizer=2, activations=1, base=9))
    'gradients'
    """
    names = ("parameters", "gradients", "optimizer", "activations", "copies")
    return max(names, key=lambda name: getattr(memory, name))
