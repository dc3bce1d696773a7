"""State that each virtual rank carries from its share of one batch to its share of the next.

Examples are the hidden state of a recurrent network, or an environment in the middle of an episode. Like weights, it
belongs to the run: a step that fails restores it, rank 0 has all of it whenever a checkpoint may be written, and a
resume distributes it again, on any number of ranks. `Carried` is the class for users; `CarriedStates` are those of a
run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.arguments import flag, function
from unisono.errors import LossError
from unisono.trainer.nested import map_tensors, tensors_of
from unisono.trainer.run_context import RunContext

__all__ = ["Carried", "CarriedStates"]

_CPU = torch.device("cpu")


class _CarriedValue(NamedTuple):
    """The value of one virtual rank."""

    value: Any
    """Holds tensors without a graph, which must not be written to."""
    versions: tuple[int, ...]
    """The version of each tensor when it was stored."""

    @classmethod
    def of(cls, value: Any) -> _CarriedValue:
        return cls(value, tuple(tensor._version for tensor in tensors_of(value)))

    def is_intact(self) -> bool:
        return self.versions == tuple(tensor._version for tensor in tensors_of(self.value))


class Carried:
    """A value that each virtual rank carries from one batch to the next, such as a hidden state.

        hidden = unisono.Carried(lambda: torch.zeros(2, 4, 64), reset_each_epoch=True)
        trainer = unisono.Trainer(model, optimizer, virtual_ranks=8, stateful={"hidden": hidden})

        def loss(model, batch):
            output, hidden.value = model(batch[0], hidden.value)
            ...

    Pass it to one Trainer, in `stateful`. `value` may then be read and set in functions that the Trainer calls for one
    virtual rank: loss functions, `encode`, evaluated functions, and the functions of `rollouts` and `collect`. It is
    saved in checkpoints, and restored if a step fails. Evaluations begin with new values and do not change those of
    training.

    Args:
        initial: Called without arguments, returns the first value of a virtual rank, with the random numbers of this
            virtual rank.
        reset_each_epoch: Forget all values when the batches of an epoch begin.

    Raises:
        TypeError: initial cannot be called, or reset_each_epoch is not a truth value.
    """

    def __init__(self, initial: Callable[[], Any], *, reset_each_epoch: bool = False) -> None:
        meant = "give a function that returns the first value of a virtual rank, such as lambda: torch.zeros(4, 64)"
        function("initial", initial, meant=meant)
        self._initial = initial
        self.reset_each_epoch: bool = flag("reset_each_epoch", reset_each_epoch)
        """True if values are forgotten when the batches of an epoch begin."""
        self._entries: dict[int, _CarriedValue] = {}
        """By virtual rank of this rank; without those that have no value yet."""
        self._before: dict[int, _CarriedValue] | None = None
        """The entries at the start of a step, while it runs."""
        self._virtual_rank: int | None = None
        """The virtual rank whose function is running; None outside such functions."""
        self._micro_batches = 1
        self._run: RunContext | None = None
        self._kept: dict[str, Any] = {"values": {}, "accelerated": {}}

    @property
    def value(self) -> Any:
        """The value of the virtual rank whose samples the running function has received.

        Set it to a tensor, a number, a string, or a tuple, list or dict of these; a copy without a graph is kept. Do
        not write to the tensors that it returns.

        Raises:
            RuntimeError: No function of one virtual rank is running, or this object was not passed to its Trainer.
            LossError: The tensors of the value have been written to; or the function is called for several
                micro-batches of the virtual rank, of which only the first would continue the batch before.
            TypeError: It is set to a value that a checkpoint cannot hold.
        """
        virtual_rank = self._find()
        entry = self._entries.get(virtual_rank)
        if entry is None:
            entry = self._entries[virtual_rank] = _CarriedValue.of(map_tensors(self._initial(), _copied))
        self._check(entry)
        return entry.value

    @value.setter
    def value(self, value: Any) -> None:
        virtual_rank = self._find()
        if virtual_rank in self._entries:
            self._check(self._entries[virtual_rank])
        try:
            copied = map_tensors(value, _copied)
        except TypeError as error:
            raise TypeError(f"the value of a Carried holds {error}.") from None
        self._entries[virtual_rank] = _CarriedValue.of(copied)

    def state_dict(self) -> dict[str, Any]:
        """Return the values of all virtual ranks when the loop last asked for a batch.

        They are complete on rank 0 of a run with a directory.
        """
        return self._kept

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set this rank's values from those of all virtual ranks."""
        if self._run is None:
            raise RuntimeError(_UNKNOWN)
        self._kept = {"values": dict(state["values"]), "accelerated": dict(state["accelerated"])}
        self._entries = {
            virtual_rank: _CarriedValue.of(_placed(value, state["accelerated"][virtual_rank], self._run.device))
            for virtual_rank, value in state["values"].items()
            if virtual_rank in self._run.block
        }

    def _bind(self, run: RunContext) -> None:
        if self._run is not None:
            raise ValueError(
                "this Carried already belongs to a Trainer, whose values would be mixed up with those of another: make "
                "one for each name and each Trainer."
            )
        self._run = run

    def _find(self) -> int:
        """Return the virtual rank whose function is running."""
        if self._virtual_rank is None:
            raise RuntimeError(
                "the value of a Carried belongs to a virtual rank, and none is being computed here: use it in a "
                "function that is called for one virtual rank, such as a loss function; not in your loop, and not in "
                "the loss over a global batch that has encode=..."
                if self._run is not None
                else _UNKNOWN
            )
        if self._micro_batches > 1:
            raise LossError(
                f"the share of virtual rank {self._virtual_rank} is computed in {self._micro_batches} micro-batches, "
                "and a Carried has one value for all of its samples: leave micro_batch_size out, and for less memory "
                "give Trainer more virtual_ranks."
            )
        return self._virtual_rank

    def _check(self, entry: _CarriedValue) -> None:
        if not entry.is_intact():
            raise LossError(
                f"a tensor in the value of a Carried was written to, for virtual rank {self._virtual_rank}, so a step "
                "that fails could not put it back: compute a new tensor, or clone it first, and set value to that."
            )

    def _end(self) -> None:
        """Check the value after its function has returned, and end the calls for the virtual rank."""
        if self._virtual_rank in self._entries:
            self._check(self._entries[self._virtual_rank])
        self._virtual_rank = None


class CarriedStates:
    """The state of virtual ranks of one run, on one rank.

    Args:
        carried: The objects by name.
        run: The constants of the run.

    Raises:
        ValueError: One of the objects belongs to another Trainer, or has two names.
    """

    def __init__(self, carried: Mapping[str, Carried], run: RunContext) -> None:
        self._carried, self._run = [*carried.values()], run
        for each in self._carried:
            each._bind(run)

    def __bool__(self) -> bool:
        return bool(self._carried)

    def begin(self, virtual_rank: int, *, micro_batches: int = 1) -> None:
        """Prepare calls for a virtual rank: in a step, with the values from before it."""
        for each in self._carried:
            each._virtual_rank, each._micro_batches = virtual_rank, micro_batches
            if each._before is None:
                continue
            if virtual_rank in each._before:
                each._entries[virtual_rank] = each._before[virtual_rank]
            else:
                each._entries.pop(virtual_rank, None)

    def end(self) -> None:
        """End the calls for a virtual rank.

        Raises:
            LossError: A value was written to.
        """
        for each in self._carried:
            each._end()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Return a context that restores all values if it ends with an exception."""
        for each in self._carried:
            each._before = dict(each._entries)
        try:
            yield
        except BaseException:
            for each in self._carried:
                each._entries = each._before or {}
            raise
        finally:
            for each in self._carried:
                each._before = each._virtual_rank = None

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Return a context with new values, which are discarded at its end."""
        before = [each._entries for each in self._carried]
        for each in self._carried:
            each._entries = {}
        try:
            yield
        finally:
            for each, entries in zip(self._carried, before, strict=True):
                each._entries, each._virtual_rank = entries, None

    def begin_epoch(self) -> None:
        """Forget the values that do not outlive an epoch."""
        for each in self._carried:
            if each.reset_each_epoch:
                each._entries.clear()

    def keep(self) -> None:
        """Collect the values of all ranks on rank 0, for checkpoints. Every rank must call it.

        Traffic: each rank sends its values to rank 0.
        """
        own = [{v: entry.value for v, entry in each._entries.items()} for each in self._carried]
        accelerated = [
            {v: [tensor.device.type != "cpu" for tensor in tensors_of(value)] for v, value in values.items()}
            for values in own
        ]
        everyone = self._run.world.gather_to_main(
            (map_tensors(own, lambda tensor: tensor.to(_CPU)), accelerated), "Trainer keeping Carried values"
        )
        for number, each in enumerate(self._carried):
            kept: dict[str, Any] = {"values": {}, "accelerated": {}}
            for values, where in everyone or ():
                kept["values"] |= values[number]
                kept["accelerated"] |= where[number]
            each._kept = kept


_UNKNOWN = (
    "this Carried belongs to no Trainer, which would save and deal out its values: give it to one, as "
    'stateful={"name": carried}.'
)


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy without a graph."""
    with torch.inference_mode(False), torch.no_grad():
        return tensor.detach().clone()


def _placed(value: Any, accelerated: list[bool], device: torch.device) -> Any:
    """Return a value with its tensors on the kinds of devices where they were, if `device` is an accelerator."""
    where = iter(accelerated)
    return map_tensors(value, lambda tensor: tensor.to(device if next(where) else _CPU))
