"""Calls of a user's function for each virtual rank outside of a step, such as one that plays episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from unisono.collectives.rank_errors import gather_or_raise
from unisono.engine import StepDescription
from unisono.engine.model_contents import plain_name
from unisono.engine.step_fingerprint import intent_of_call
from unisono.errors import DataError
from unisono.job.user_function import count_collectives, enter, leave, refuse_collectives_since
from unisono.trainer.carried import CarriedStates
from unisono.trainer.modules import evaluating
from unisono.trainer.run_context import RunContext

__all__ = ["VirtualRankCalls"]

T = TypeVar("T")


class VirtualRankCalls:
    """Calls functions for the virtual ranks of a run, each on the rank that computes the virtual rank.

    Args:
        run: The constants of the run.
        carried: The state of virtual ranks.
        compare: Compares what ranks are about to do.
        modules: The models by the prefix of their names.
        models: The model or the dict of models, as functions get it.
    """

    def __init__(
        self,
        run: RunContext,
        *,
        carried: CarriedStates,
        compare: Callable[[StepDescription], None],
        modules: Mapping[str, nn.Module],
        models: Any,
    ) -> None:
        self._run, self._carried, self._compare = run, carried, compare
        self._modules, self._models = modules, models

    @property
    def run(self) -> RunContext:
        """The constants of the run."""
        return self._run

    def compare(self, call: str, moment: tuple[int, ...]) -> None:
        """Check that all ranks make the same call at the same place of the run. Every rank must call it."""
        place = dict(zip(("epoch", "step", "steps_of_batch"), moment, strict=False))
        self._compare(intent_of_call(call, **place))

    def call(
        self,
        function: Callable[[Any], Any],
        *,
        name: str,
        stream: str,
        moment: tuple[int, ...],
        pack: Callable[[dict[int, Any]], T],
    ) -> tuple[dict[int, Any], list[T]]:
        """Call a function for each virtual rank of this rank, and exchange what ranks need to know. Every rank must.

        Models are in evaluation mode, and gradients disabled. If the function fails on one rank, the call fails on all,
        and values that virtual ranks carry are those from before.

        Args:
            function: Called as function(models), with random generators set for the virtual rank.
            name: The method of the Trainer, for messages.
            stream: The name of the stream of random numbers.
            moment: Where in the run the random numbers belong.
            pack: Makes what all ranks get from this rank's results.

        Returns:
            The results by virtual rank, and what `pack` made of those of each rank.

        Raises:
            DataError: The function wrote to a parameter or buffer.
            ValueError: The model is cut over ranks.
            GroupError: It called a collective.
            PeerError: It failed on another rank.
        """
        if not self._run.has_whole_model:
            raise ValueError(
                f"{name} calls a function of the whole model for each virtual rank, and parallel= divides the model "
                "over several ranks: leave out one of the two, or use trainer.evaluate or trainer.predict"
            )
        self.compare(name, moment)
        results: dict[int, Any] = {}
        error: Exception | None = None
        packed: Any = None  # of type T unless there is an error
        with self._carried.transaction():
            inside = enter(f"the function of {name}")
            try:
                counted = count_collectives()
                before = [tensor._version for _, tensor in self._tensors()]
                with evaluating(self._modules):
                    for virtual_rank in self._run.block:
                        self._run.set_generators(stream, *moment, virtual_rank)
                        self._carried.begin(virtual_rank)
                        results[virtual_rank] = function(self._models)
                        self._carried.end()
                refuse_collectives_since(counted)
                self._check_writes(name, before)
                packed = pack(results)
            except Exception as raised:  # of the user's function: it is raised once the other ranks know
                error = raised
            finally:
                leave(inside)
            everyone = gather_or_raise(self._run.world, packed, error, name, work=f"the function of {name}")
        return results, everyone

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, module in self._modules.items():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                yield prefix + plain_name(name), tensor

    def _check_writes(self, name: str, before: list[int]) -> None:
        """Raise DataError if the function wrote to a model: each rank would have written something else."""
        now = [*self._tensors()]
        if len(now) == len(before):
            written = [path for (path, tensor), version in zip(now, before, strict=True) if tensor._version != version]
            if not written:
                return
            found = f"wrote to {written[0]!r}"
        else:
            found = f"changed the number of the model's tensors from {len(before)} to {len(now)}"
        raise DataError(
            f"the function of {name} {found}, and ranks call it for different virtual ranks: weights and buffers would "
            "differ between ranks. Return what is to be counted, and write in your loop, the same on every rank."
        )
