"""The part of a Trainer for code that makes its own samples or random numbers, such as reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from unisono import arguments
from unisono.arguments import text, whole
from unisono.data.batch import Batch
from unisono.job.user_function import refuse_inside
from unisono.plan import derive_key
from unisono.trainer.loop import Loop
from unisono.trainer.recovery import Recovery
from unisono.trainer.rollouts import Rollouts
from unisono.trainer.run_context import RunContext
from unisono.trainer.virtual_rank_calls import VirtualRankCalls

__all__ = ["ByVirtualRank"]


class ByVirtualRank:
    """The methods of a Trainer that call code for each of its virtual ranks in turn."""

    _run: RunContext
    _loop: Loop
    _recovery: Recovery
    _calls: VirtualRankCalls

    @property
    def local_virtual_ranks(self) -> range:
        """The virtual ranks that this rank computes: a contiguous block, and all of them with one rank.

        With `Shard(sums="divided")` it is every W-th one of W ranks.
        """
        return self._run.block

    def generator(self, name: str, virtual_rank: int, *, device: str | torch.device = "cpu") -> torch.Generator:
        """Return a generator of random numbers for one virtual rank, at this place of the run.

        Its seed depends on (seed, name, epoch, step, virtual rank), and on whether the step has been done. Nothing is
        saved, and every rank may ask for the generator of any virtual rank. Until the next step, the same call returns
        a generator of the same numbers: use another name for other numbers.

        Args:
            name: The purpose of the numbers, without spaces.
            virtual_rank: The virtual rank, such as one of `local_virtual_ranks`.
            device: The device on which numbers are drawn.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: name is empty or has spaces in it, or there is no such virtual rank.
        """
        virtual_rank = whole("virtual_rank", virtual_rank)
        if not 0 <= virtual_rank < self._run.virtual_ranks:
            raise ValueError(
                f"virtual_rank={virtual_rank} is outside [0, {self._run.virtual_ranks}), the virtual ranks of this run"
            )
        key = derive_key(self._run.seed, f"generator/{_stream(name)}", *self._loop.steps.moment, virtual_rank)
        return torch.Generator(device).manual_seed(key)

    def rollouts(
        self, function: Callable[[Any], Any], *, steps: int, micro_batch_size: int | None = None
    ) -> Iterator[Batch]:
        """Yield batches that a function makes for each virtual rank, such as the episodes of reinforcement learning.

        Use it instead of `batches`, and pass the batches to `step`. An epoch has `steps` of them; after a resume, the
        remaining ones are yielded. Each is made when the loop asks for it, with the weights of that moment. Every rank
        must call it. Ranks exchange their numbers of samples.

        Args:
            function: Called as function(model) for each virtual rank of this rank, in evaluation mode and without
                gradients, with random generators set from (seed, epoch, step, virtual rank). It returns the samples of
                the virtual rank, at least one: a tensor with a row for each sample, or a tuple, list or dict of such
                tensors. The loss function gets them as its micro-batch. Virtual ranks may have different numbers of
                samples. It may use `Carried` state, and must write neither to the model nor to other objects.
            steps: The number of batches in an epoch.
            micro_batch_size: The largest number of samples that go through the model at once in a step. None: those of
                a virtual rank.

        Raises:
            RuntimeError: It is called inside a loss function or an evaluated function, or torch's process group failed.
            TypeError: function cannot be called, or an argument has the wrong type.
            ValueError: A number is out of range; the epoch was begun with a dataset; or, inside a loop over `epochs`,
                all its batches have been yielded. From the iterator: another loop over batches has begun.
            DataError: From the iterator: function returned something else, or wrote to the model.
            GroupError: From the iterator: function called a collective.
            PeerError: From the iterator: function failed on another rank, or another rank has died.
            RankMismatchError: On all ranks, if they make different calls.
            UnisonoError, CheckpointError, OSError, KeyboardInterrupt, SystemExit: As described at `batches`.
        """
        refuse_inside("trainer.rollouts")
        _check_callable("trainer.rollouts", function)
        steps = whole("steps", steps, least=1)
        if micro_batch_size is not None:
            micro_batch_size = whole("micro_batch_size", micro_batch_size, least=1)
        self._calls.compare(
            f"trainer.rollouts(steps={steps}, micro_batch_size={micro_batch_size})", self._loop.steps.moment
        )
        return self._loop.batches(Rollouts(self._calls, function, steps=steps, micro_batch_size=micro_batch_size))

    def collect(self, function: Callable[[Any], Any], *, name: str = "collect") -> list[Any]:
        """Call a function once for each virtual rank, and return the results of all of them, in order, on every rank.

        Use it for results of all virtual ranks that every rank needs, such as transitions for a replay buffer or the
        returns of test episodes. Every rank must call it. Memory and traffic: each rank sends its results to all
        others.

        Args:
            function: Called as function(model), like that of `rollouts`; it returns any value that can be pickled.
            name: The purpose of its random numbers, without spaces. They depend on seed, name, place in the run and
                virtual rank: a second call at the same place needs another name to draw other numbers.

        Returns:
            The results, in the order of virtual ranks. Tensors may share memory with the results of function.

        Raises:
            RuntimeError: It is called inside a loss function or an evaluated function, or torch's process group failed.
            TypeError: function cannot be called, name is not a string, or a result cannot be pickled.
            ValueError: name is empty or has spaces in it.
            DataError: function wrote to the model.
            GroupError: function called a collective.
            PeerError: function failed on another rank, or another rank has died.
            RankMismatchError: On all ranks, if they make different calls.
        """
        refuse_inside("trainer.collect")
        _check_callable("trainer.collect", function)
        stream, moment = _stream(name), self._loop.steps.moment
        call = f"trainer.collect(name={name!r})"

        def compute() -> list[Any]:
            try:
                _, everyone = self._calls.call(
                    function, name=call, stream=f"collect/{stream}", moment=moment, pack=lambda results: results
                )
            finally:
                self._run.set_generators(f"loop/{stream}", *moment)
            return [result for of_rank in everyone for result in of_rank.values()]

        def account(_result: Any) -> None:
            self._run.set_generators(f"loop/{stream}", *moment)

        return self._recovery.call(call, compute, account=account)


def _stream(name: str) -> str:
    """Return a name that can be part of a key."""
    name = text("name", name)
    if len(name.split()) != 1 or name != name.strip():
        raise ValueError(f"name={name!r} must have no spaces in it: it is a part of the key of random numbers")
    return name


def _check_callable(call: str, function: Any) -> None:
    meant = "give a function of the model, which is called for each virtual rank"
    arguments.function(f"the function of {call}", function, meant=meant)
