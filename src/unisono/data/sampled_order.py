"""The order of an epoch that a user's sampler or batch sampler decides.

It is read as a whole before the epoch begins, with all random generators seeded from (seed, epoch). So it depends
neither on what the loop or the dataset draws in between nor on the number of ranks, its length is known, and ranks can
compare it before the first step. It takes 8 bytes for each index. A resume in mid-epoch reads it again, and no sample.
Start reading at `draw_order`.
"""

from __future__ import annotations

import hashlib
import operator
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from unisono.data.dataset import whole_batches
from unisono.data.loader_settings import LoaderSettings
from unisono.data.map_loader import StepSamples
from unisono.errors import DataError
from unisono.state.random import kept_generators
from unisono.text import a_type

__all__ = ["SampledOrder", "check_samplers", "draw_order"]

_NESTED = 8
"""How deep samplers within samplers are searched for."""
_ENDLESS = 1000
"""A sampler is taken as endless if it yields this many indices per sample, for at least 1000 samples."""

_BLOCK = 65536
"""Number of indices read from a sampler at a time."""


@dataclass(frozen=True, slots=True)
class SampledOrder:
    """The global batches of an epoch."""

    epoch: int
    indices: array[int]
    """The samples in order."""
    ends: Sequence[int]
    """The position at which each batch ends."""

    @property
    def fingerprint(self) -> str:
        """A hash of the order."""
        hashed = hashlib.blake2b(self.indices.tobytes(), digest_size=8)
        hashed.update(array("q", self.ends).tobytes())
        return hashed.hexdigest()

    def batches(self, first_step: int) -> Iterator[StepSamples]:
        """Yield the global batches from a step on."""
        for step in range(first_step, len(self.ends)):
            start = self.ends[step - 1] if step else 0
            yield StepSamples(self.epoch, step, self.indices[start : self.ends[step]].tolist(), start)


def check_samplers(
    sampler: Any, batch_sampler: Any, *, batch_size: Any, shuffle: Any, drop_last: Any, sharded: Any
) -> None:
    """Check which arguments are given together, as torch's DataLoader does, and the type of the sampler.

    Raises:
        ValueError: Two arguments exclude each other, or the sampler yields a rank's indices alone.
        TypeError: batch_size is missing, or the sampler cannot be iterated over again in each epoch.
    """
    if sharded and not (sampler is None and batch_sampler is None):
        raise ValueError("sharded=True is for iterable datasets, whose samples have no indices: leave the sampler out")
    if sampler is not None and batch_sampler is not None:
        raise ValueError("sampler and batch_sampler are two ways to give the order: give one of them")
    if batch_sampler is not None:
        for name, value in {"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last}.items():
            if value:
                raise ValueError(f"{name}={value!r} is for the batch sampler to decide: leave it out")
    elif batch_size is None:
        raise TypeError(
            "batch_size is missing: the number of samples of a batch over all ranks together. Give batch_size=64, for "
            "example, or a batch_sampler, each of whose lists is a batch"
        )
    if sampler is not None and shuffle:
        raise ValueError("shuffle=True and a sampler are two orders: leave shuffle out, the sampler gives the order")
    for name, given in (("sampler", sampler), ("batch_sampler", batch_sampler)):
        if given is not None:
            _check_type(name, given)


def draw_order(
    sampler: Any,
    batch_sampler: Any,
    *,
    settings: LoaderSettings,
    epoch: int,
    num_samples: int,
    batch_size: int | None,
    drop_last: bool,
) -> SampledOrder:
    """Read the order of an epoch from one of the samplers.

    The CPU generator of torch and those of Python and NumPy are seeded first, and restored afterwards. A
    `torch.Generator` in the attribute `generator` of the sampler, or of one within it, is seeded as well, and
    `set_epoch` is called if there is one.

    Args:
        sampler: Yields indices, which are cut into batches of `batch_size`. None if there is a batch sampler.
        batch_sampler: Yields lists of indices; each is a batch. None if there is a sampler.
        settings: The settings, with the seed.
        epoch: The epoch.
        num_samples: The number of samples of the dataset.
        batch_size: Samples of a batch of a sampler.
        drop_last: True to leave out the last batch of a sampler if it is smaller.

    Raises:
        TypeError: It yields values other than indices, or than lists of indices.
        DataError: It yields nothing, an index that the dataset does not have, or an empty batch; it does not end; or
            drop_last leaves no batch.
    """
    given = sampler if batch_sampler is None else batch_sampler
    with kept_generators():
        settings.set_generators("sampler", epoch)
        for number, each in enumerate(_nested(given)):
            if isinstance(getattr(each, "generator", None), torch.Generator):
                each.generator.manual_seed(settings.key("sampler/generator", epoch, number))
            if callable(getattr(each, "set_epoch", None)):
                each.set_epoch(epoch)
        most = _ENDLESS * max(num_samples, _ENDLESS)
        if batch_sampler is None:
            indices = _indices(islice(iter(sampler), most + 1), "sampler")
            ends: Sequence[int] = ()
        else:
            indices, ends = _joined(batch_sampler, most)
    name = "sampler" if batch_sampler is None else "batch_sampler"
    if not indices:
        raise DataError(f"the {name} ({type(given).__name__}) yielded nothing in epoch {epoch}: check its arguments")
    if len(indices) > most:
        raise DataError(
            f"the {name} has yielded {most} indices for {num_samples} samples, and goes on: an epoch needs an end. "
            "Let it end after as many indices as an epoch should have."
        )
    if min(indices) < 0 or max(indices) >= num_samples:
        place = next(place for place, index in enumerate(indices) if not 0 <= index < num_samples)
        raise DataError(
            f"the {name} yielded index {indices[place]} at position {place} of epoch {epoch}, and the dataset has "
            f"{num_samples} samples, from 0 to {num_samples - 1}: make the {name} for this dataset."
        )
    if batch_size is not None:
        if drop_last:
            del indices[whole_batches(len(indices), batch_size) :]
        ends = [min(start + batch_size, len(indices)) for start in range(0, len(indices), batch_size)]
    return SampledOrder(epoch, indices, ends)


def _joined(batch_sampler: Any, most: int) -> tuple[array[int], list[int]]:
    """Return the indices of all batches of a batch sampler, and their ends."""
    indices, sizes = array("q"), []
    for number, batch in enumerate(batch_sampler):
        if (hasattr(batch, "__index__") and not hasattr(batch, "__len__")) or not isinstance(batch, Iterable):
            raise TypeError(
                f"the batch_sampler yielded {batch!r}, {a_type(batch)}; it should yield lists of indices, "
                "each of which is a batch. A sampler of single indices is given as sampler=..., with a batch_size"
            )
        own = _indices(batch, "batch_sampler")
        if not own:
            raise DataError(f"the batch_sampler yielded an empty list as batch {number}: leave empty batches out")
        indices.extend(own)
        sizes.append(len(own))
        if len(indices) > most:
            break
    return indices, list(accumulate(sizes))


def _indices(values: Iterable[Any], name: str) -> array[int]:
    indices, remaining = array("q"), iter(values)
    while block := list(islice(remaining, _BLOCK)):  # alone: a TypeError here is the sampler's own
        try:
            indices.extend(array("q", block))
        except (TypeError, OverflowError):
            found = next(value for value in block if not _is_index(value))
            raise TypeError(
                f"the {name} yielded {found!r:.60}, {a_type(found)}; it should yield "
                + (
                    "indices. A sampler of lists is given as batch_sampler=..., without a batch_size"
                    if name == "sampler"
                    else "lists of indices"
                )
            ) from None
    return indices


def _is_index(value: Any) -> bool:
    try:
        return abs(operator.index(value)) < 2**63
    except TypeError:
        return False


def _check_type(name: str, given: Any) -> None:
    if isinstance(given, type):
        raise TypeError(f"{name} is the class {given.__name__}, not called: give an object of it")
    if isinstance(given, (str, bytes, DataLoader)) or (
        not isinstance(given, Iterable) and not hasattr(given, "__getitem__")
    ):
        raise TypeError(f"{name} is {a_type(given)}; give an object that yields indices, such as a Sampler")
    if isinstance(given, Iterator):
        raise TypeError(
            f"{name} is {a_type(given)}, which is used up after one epoch: give an object whose __iter__ "
            "begins anew, such as a list or a Sampler"
        )
    for each in _nested(given):
        if isinstance(each, TorchDistributedSampler) and each.num_replicas > 1:
            raise ValueError(
                f"{name} is {a_type(each)} for {each.num_replicas} ranks: batches are dealt to ranks here, "
                "so it must yield the indices of all ranks. Leave it out, or make it with num_replicas=1, rank=0."
            )


def _nested(given: Any) -> Iterator[Any]:
    """Yield a sampler, and those within it, such as that of a BatchSampler."""
    each = given
    for _ in range(_NESTED):
        yield each
        each = getattr(each, "sampler", None)
        if each is None:
            return
