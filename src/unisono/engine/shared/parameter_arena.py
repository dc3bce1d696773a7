"""The parameters of a Trainer in shared memory: moved there once, and guarded against writes from elsewhere.

All ranks see one copy. A loop that writes into a parameter between two steps does so once per rank, which is wrong
unless the write is idempotent. Such writes are detected by the version that torch counts for each parameter, and by a
few of its values, since torch does not count every write. `load_state_dict` is allowed; see `LoadStateDictHook`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter

import torch
from torch import Tensor, nn

from unisono.embedding.table_file import TableFile
from unisono.engine.base import Trained
from unisono.engine.norm import dense_strides, in_memory_order
from unisono.engine.shared.shared_runtime import SharedRuntime
from unisono.engine.step_transaction import StepTransaction
from unisono.errors import UnisonoError
from unisono.shm.segment import Segment, aligned

__all__ = ["ArenaLayout", "LoadStateDictHook", "SharedParameters"]


class ArenaLayout:
    """The places of tensors in a segment: in sequence, aligned, and each like one of some given tensors."""

    def __init__(self, likes: Sequence[Tensor]) -> None:
        self._likes = likes
        self.offsets: list[int] = []
        """The offset of each tensor, in bytes."""
        self.nbytes = 0
        """The size of all tensors together."""
        for like in likes:
            self.offsets.append(self.nbytes)
            self.nbytes += aligned(like.numel() * like.element_size())

    def vector(self, segment: Segment, index: int, start: int, stop: int, *, base: int = 0) -> Tensor:
        """Return a range of elements of one tensor as a vector, in memory order."""
        like = self._likes[index]
        return segment.tensor(base + self.offsets[index] + start * like.element_size(), (stop - start,), like.dtype)

    def whole(self, segment: Segment, index: int, *, base: int = 0) -> Tensor:
        """Return one tensor, with the shape and the dense strides of the tensor that it is like."""
        like = self._likes[index]
        return self.vector(segment, index, 0, like.numel(), base=base).as_strided(like.shape, dense_strides(like))


class LoadStateDictHook:
    """Makes load_state_dict write to a rank's private memory, by moving the weights out of shared memory first.

    A rank that is ahead then does not change weights that another rank still reads, and one rank may load alone, after
    training. The next step moves them to shared memory again. Copies of the modules have copies of this hook, which do
    nothing.
    """

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self.is_shared: Callable[[Tensor], bool] = lambda _: False
        self._handles = [
            module.register_load_state_dict_pre_hook(self._before)  # type: ignore[no-untyped-call]
            for module in {m for root in modules for m in root.modules()}
        ]

    def remove(self) -> None:
        """Remove the hook from all modules."""
        for handle in self._handles:
            handle.remove()

    def __reduce__(self) -> tuple[type[LoadStateDictHook], tuple[()]]:
        return LoadStateDictHook, ()

    def _before(self, module: nn.Module, *_: object) -> None:
        for p in module._parameters.values():
            if p is not None and self.is_shared(p):
                p.data = p.data.clone(memory_format=torch.preserve_format)


class _Arena:
    """Parameters that were moved to shared memory together."""

    def __init__(
        self, runtime: SharedRuntime, step: StepTransaction, trained: Trained, unwatched: Collection[int]
    ) -> None:
        self.names, self.parameters = trained
        layout = ArenaLayout(self.parameters)
        segment = runtime.segment(layout.nbytes, "weights")
        self.vectors = [layout.vector(segment, i, 0, p.numel()) for i, p in enumerate(self.parameters)]
        if runtime.rank == 0:
            for vector, p in zip(self.vectors, self.parameters, strict=True):
                vector.copy_(in_memory_order(p.detach(), dense_strides(p)))
        runtime.barrier("moving the weights to shared memory", step)
        for i, p in enumerate(self.parameters):
            p.data = layout.whole(segment, i)
        self.addresses = [p.data_ptr() for p in self.parameters]
        # The first, the middle and the last four bytes of each in memory: the dtype does not matter.
        places = [
            (name, offset // 4 + place)
            for name, offset, p in zip(self.names, layout.offsets, self.parameters, strict=True)
            if p.numel() and id(p) not in unwatched
            for length in [max(p.numel() * p.element_size() // 4, 1)]
            for place in (0, length // 2, length - 1)
        ]
        self._sampled = [name for name, _ in places]
        """The name of the parameter that each number of a sample belongs to."""
        self._words = memoryview(segment.memory).cast("i")
        self._take_sample: Callable[[memoryview], Sequence[int]] = (
            itemgetter(*(place for _, place in places)) if places else lambda _: ()
        )
        self.remember()

    def remember(self) -> None:
        self._versions = [p._version for p in self.parameters]
        self._sample = self._take_sample(self._words)

    def changed(self) -> str | None:
        """Return the name of a parameter that was written to here since `remember`, or None."""
        versions, sample = [p._version for p in self.parameters], self._take_sample(self._words)
        if versions == self._versions and sample == self._sample:
            return None
        places = zip(self.names, self.parameters, self.addresses, strict=True)
        here = {name for name, p, address in places if p.data_ptr() == address}  # others were written elsewhere
        by_version = zip(self.names, versions, self._versions, strict=True)
        by_value = zip(self._sampled, sample, self._sample, strict=True)
        return next((name for name, a, b in itertools.chain(by_version, by_value) if a != b and name in here), None)


class SharedParameters:
    """The parameters that a Trainer's optimizers train, in shared memory.

    Args:
        runtime: Allocates it.
        loads: Makes `load_state_dict` write elsewhere.
        files: Tables in files, which ranks share from the start: they are not moved.
    """

    def __init__(self, runtime: SharedRuntime, loads: LoadStateDictHook, files: Collection[TableFile] = ()) -> None:
        self._runtime, self.files = runtime, files
        loads.is_shared = lambda p: self._address(p) == p.data_ptr()
        self._arenas: list[_Arena] = []
        self._entries: dict[int, tuple[_Arena, int]] = {}

    def move(self, step: StepTransaction, trained: Trained, unwatched: Collection[int] = ()) -> None:
        """Move parameters to shared memory that are not there yet, with rank 0's values. Every rank must call it.

        Args:
            step: The step under way.
            trained: The parameters.
            unwatched: Those that other processes write between two steps, by `id`.
        """
        new = [
            i for i, p in enumerate(trained.parameters) if self._address(p) != p.data_ptr() and not self._is_in_file(p)
        ]
        if not new:
            return
        moved = Trained(*(tuple(of_all[i] for i in new) for of_all in trained))  # type: ignore[arg-type]
        arena = _Arena(self._runtime, step, moved, unwatched)
        self._arenas.append(arena)
        for i, p in enumerate(arena.parameters):
            self._entries[id(p)] = arena, i
        live = {id(entry) for entry, _ in self._entries.values()}
        self._arenas = [arena for arena in self._arenas if id(arena) in live and self._is_whole(arena)]

    def make_private(self) -> None:
        """Move this rank's parameters out of shared memory."""
        for entry, i in self._entries.values():
            p = entry.parameters[i]
            if self._address(p) == p.data_ptr():
                p.data = p.data.clone(memory_format=torch.preserve_format)

    def vector(self, parameter: Tensor) -> Tensor:
        """Return a parameter's values as a vector, in memory order."""
        arena, i = self._entries[id(parameter)]
        return arena.vectors[i]

    def check(self) -> None:
        """Raise UnisonoError if a parameter was written to in shared memory since `remember`."""
        for arena in self._arenas:
            name = arena.changed()
            if name is not None:
                raise _written(name)

    def remember(self) -> None:
        """Record the present values as those that the next step should find."""
        for arena in self._arenas:
            arena.remember()

    @contextmanager
    def writing(self) -> Iterator[Callable[[Tensor, Tensor], None]]:
        """Return a context in which all ranks write weights; see `WeightWrites`. It begins and ends with a barrier.

        Raises:
            UnisonoError: On all ranks, if a parameter was written to since the last step. Nothing has been changed.
            PeerError: Another rank has died, or failed while it wrote.
            KeyboardInterrupt: Ctrl-C came while other ranks relied on this one.
        """
        runtime, outside = self._runtime, StepTransaction()
        addresses = {address for arena in self._arenas for address in arena.addresses}
        # All ranks have looked once they have these, and rank 0 may write.
        found = runtime.world.gather([arena.changed() for arena in self._arenas], "Trainer writing weights")
        name = next((name for of_rank in found for name in of_rank if name is not None), None)
        if name is not None:
            raise _written(name)

        def write(tensor: Tensor, value: Tensor) -> None:
            if runtime.rank == 0 or not (tensor.data_ptr() in addresses or self._is_in_file(tensor)):
                tensor.copy_(value)

        try:
            with torch.no_grad():
                yield write
        except BaseException as error:
            runtime.abort(f"rank {runtime.rank} failed while weights were written: {error!r}")
            raise
        runtime.barrier("waiting until rank 0 has written the weights", outside)
        self.remember()
        outside.raise_interrupt()

    def _address(self, parameter: Tensor) -> int | None:
        entry = self._entries.get(id(parameter))
        return None if entry is None else entry[0].addresses[entry[1]]

    def _is_in_file(self, tensor: Tensor) -> bool:
        return any(file.has(tensor) for file in self.files)

    def _is_whole(self, arena: _Arena) -> bool:
        """Return True if all of its parameters are still in an arena. One that some have left is no longer checked."""
        return all(self._entries[id(p)][0] is arena for p in arena.parameters)


def _written(name: str) -> UnisonoError:
    return UnisonoError(
        f"parameter {name!r} was written to between two steps. All ranks share one copy of the weights, so a write in "
        "your loop happens once per rank. Leave optimizer.step() out of it, as trainer.step(...) calls that; change "
        "weights by model.load_state_dict(...) with equal values on all ranks, or give Trainer "
        'engine="collective", which keeps a copy for each rank.'
    )
