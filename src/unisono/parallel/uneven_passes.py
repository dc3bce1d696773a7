"""Ranks with different numbers of backward passes, as inside `Replicas.join`.

A rank that has none left follows the reductions of the others; then all take the state of one that ran the most.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from unisono.parallel.model_agreement import broadcast_values
from unisono.parallel.reducer import Reducer
from unisono.parallel.replicated_models import tensors_of_model
from unisono.state.stateful import Stateful

__all__ = ["follow_others", "take_longest"]


def follow_others(reducers: Sequence[Reducer]) -> None:
    """Participate in the rounds of other ranks until no rank has a batch any more. Every rank must call it."""

    def follow(reducer: Reducer) -> None:
        while reducer.shadow():
            pass

    if len(reducers) < 2:
        for reducer in reducers:
            follow(reducer)
        return
    # The order in which backward reaches the models is known to the other ranks alone, so each has a thread.
    failed: list[BaseException] = []

    def try_to_follow(reducer: Reducer) -> None:
        try:
            follow(reducer)
        except BaseException as error:  # raised below, in the thread that waits
            failed.append(error)

    threads = [threading.Thread(target=try_to_follow, args=(r,), name="unisono-join") for r in reducers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def take_longest(reducers: Sequence[Reducer], rounds: int, stateful: Sequence[Stateful]) -> None:
    """Copy models and states from the first of the ranks that ran the most rounds. Every rank must call it.

    Args:
        reducers: Those of all models, of which there is one at least.
        rounds: How many this rank ran.
        stateful: Objects whose states are copied as well.
    """
    gradient_transport = reducers[0].gradient_transport
    everyone = gradient_transport.gather(rounds, "replicas.join()")
    source = everyone.index(max(everyone))
    if min(everyone) == max(everyone):
        return
    for reducer in reducers:
        broadcast_values(tensors_of_model(reducer.model).values(), reducer.gradient_transport, source)
    states = gradient_transport.broadcast_value([thing.state_dict() for thing in stateful], source, "replicas.join()")
    if gradient_transport.rank != source:
        for thing, state in zip(stateful, states, strict=True):
            thing.load_state_dict(state)
