"""Memory of which each rank keeps an equal slice while a model is built, until an operation asks for it again.

Tensors keep their identity, shape and strides while their memory is parked: the storage has no bytes then, so views and
tied weights need no care. Start reading at `ParkedMemory.make_room`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.collectives.world import World
from unisono.errors import RankMismatchError
from unisono.machine import give_memory_back
from unisono.state.digest import digest

__all__ = ["NamedTensor", "ParkedMemory", "memory_of"]

_SMALL_NBYTES = 4096
"""Memory that is not worth a slice."""
_READING = "unisono.parallel.build reading a parameter"


class NamedTensor(NamedTuple):
    """A parameter, and what it is called in messages."""

    name: str
    tensor: Tensor


class _Slice(NamedTuple):
    """The parked memory that a rank keeps."""

    name: str
    storage: torch.UntypedStorage
    nbytes: int
    own: Tensor
    digest: str


def memory_of(tensor: Tensor) -> int | None:
    """Return the identity of a tensor's memory; None for one without plain memory on a CPU."""
    if (
        tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    ):
        return None
    storage = tensor.untyped_storage()
    return storage._cdata if storage.device.type == "cpu" else None


class ParkedMemory:
    """Parks the memory of parameters, and brings it back.

    All ranks run the same code on the same values, so they park and ask for the same memory in the same order. That is
    checked whenever memory is brought back.

    Args:
        world: The ranks, more than one.
        budget_nbytes: The memory of parameters that stays whole on each rank, besides what is in use.
    """

    def __init__(self, world: World, *, budget_nbytes: int) -> None:
        self._world, self._budget = world, budget_nbytes
        self._slices: dict[int, _Slice] = {}
        self._pinned: dict[int, torch.UntypedStorage] = {}
        self._used: dict[int, int] = {}
        self._clock = self._times_read = 0

    def is_parked(self, memory: int) -> bool:
        """Return True if this rank has a slice of some memory alone."""
        return memory in self._slices

    def note_use(self, memory: int) -> None:
        """Note that memory was used just now, so that other memory is parked before it."""
        self._clock += 1
        self._used[memory] = self._clock

    def pin(self, tensor: Tensor) -> None:
        """Keep a tensor's memory whole and in its place from now on: something outside of torch may refer to it."""
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = storage

    def make_room(self, parameters: Callable[[], Iterable[NamedTensor]], in_use: Collection[int]) -> None:
        """Park the memory that was not used for longest, until what is whole is within the budget. Local.

        Args:
            parameters: Returns the parameters that there are.
            in_use: Memory that is not parked.
        """
        self._forget_dropped()
        whole: dict[int, NamedTensor] = {}
        for each in parameters():
            memory = memory_of(each.tensor)
            if memory is not None and memory not in self._slices and each.tensor.untyped_storage().nbytes():
                whole.setdefault(memory, each)
        self._used = {memory: self._used.get(memory, 0) for memory in whole}
        total = sum(each.tensor.untyped_storage().nbytes() for each in whole.values())
        for memory in sorted(whole, key=self._used.__getitem__):
            if total <= self._budget:
                break
            storage = whole[memory].tensor.untyped_storage()
            if memory in in_use or not self._can_go(storage) or storage.nbytes() <= _SMALL_NBYTES:
                continue
            total -= storage.nbytes()
            self._park(whole[memory].name, storage)
        give_memory_back()

    def is_all(self, tensor: Tensor) -> bool:
        """Return True if a tensor of parked memory, which is dense, has all of its bytes."""
        return tensor.numel() * tensor.element_size() == self._slices[tensor.untyped_storage()._cdata].nbytes

    def bring(self, memory: int) -> int:
        """Bring parked memory together on all ranks, and return its size in bytes. Every rank must call it.

        Raises:
            RankMismatchError: Ranks bring different memory together, or do something else.
        """
        entry = self._slices[memory]
        self._times_read += 1
        asked = self._world.gather((entry.name, entry.nbytes, self._times_read, entry.digest), _READING)
        if len(set(asked)) > 1:
            told = "; ".join(f"rank {rank}: {name}, {nbytes:,} bytes" for rank, (name, nbytes, *_) in enumerate(asked))
            raise RankMismatchError(
                f"ranks read different parameters, or different values, while they build the model ({told}). Every "
                "rank must build the same model in the same way: nothing in the function given to "
                "unisono.parallel.build may depend on the rank."
            )
        self.join(memory)
        return entry.nbytes

    def join(self, memory: int) -> None:
        """Do what `bring` does, where ranks have agreed before."""
        entry = self._slices.pop(memory)
        entry.storage.resize_(entry.nbytes)
        whole = _bytes_of(entry.storage)
        for rank, part in enumerate(self._split(whole)):
            if rank == self._world.rank:
                part.copy_(entry.own)
            self._world.broadcast_tensor(part, source=rank)

    def overwrite(self, memory: int) -> int:
        """Give parked memory its bytes without values, since all are written next, and return their number. Local."""
        entry = self._slices.pop(memory)
        entry.storage.resize_(entry.nbytes)
        return entry.nbytes

    def release(self, tensor: Tensor) -> None:
        """Give back the memory of a tensor whose values are no longer needed, unless something may refer to it."""
        storage = tensor.untyped_storage()
        if self._can_go(storage):
            storage.resize_(0)

    def describe(self, tensor: Tensor) -> tuple[bool, str]:
        """Return True if the memory of a tensor is parked, and a hash of it."""
        storage = tensor.untyped_storage()
        entry = self._slices.get(storage._cdata)
        return (False, digest({"": _bytes_of(storage)})) if entry is None else (True, entry.digest)

    def _park(self, name: str, storage: torch.UntypedStorage) -> None:
        whole = _bytes_of(storage)
        own = self._split(whole)[self._world.rank].clone()
        self._slices[storage._cdata] = _Slice(name, storage, storage.nbytes(), own, digest({"": whole}))
        del whole
        storage.resize_(0)

    def _can_go(self, storage: torch.UntypedStorage) -> bool:
        return storage.resizable() and storage._cdata not in self._pinned

    def _forget_dropped(self) -> None:
        """Drop the slices of memory to which no tensor refers any more."""
        for memory, entry in [*self._slices.items()]:
            # The entry itself holds one reference, and the call below makes none.
            if torch._C._storage_Use_Count(entry.storage._cdata) == 1:
                del self._slices[memory]

    def _split(self, whole: Tensor) -> list[Tensor]:
        size = -(-whole.numel() // self._world.size)
        return [whole[rank * size : (rank + 1) * size] for rank in range(self._world.size)]


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)
