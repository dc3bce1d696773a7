"""Seeding of the random generators from which a dataset draws, and of no others.

To seed all three generators takes longer than to read a small sample, and most datasets draw nothing. So a generator is
seeded before each sample only once the dataset has been seen to draw from it. Until then it is put into a known state
before a step's samples are read and looked at afterwards: if it has moved, they are read again with all generators
seeded. So which generators are seeded changes no number that is drawn.

Copying a generator's state takes longer than seeding, so a look draws a number and compares it with the expected one;
of torch's, whose state is copied in little time, it compares the position.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch

from unisono.errors import UnisonoError

__all__ = ["SampleGenerators"]

_HEAD_NBYTES = 24
"""Of the state of a generator on the CPU, CPUGeneratorImplStateLegacy: its seed (8 bytes), and of the 624 numbers that
are made together, how many are left (4), whether there are any (4), and the next one (8)."""


class SampleGenerators:
    """The generators of this process that a dataset may draw from, and those it has been seen to draw from."""

    def __init__(self) -> None:
        self._quiet: list[_WatchedGenerator] = [_Torch(), _Python(), _NumPy()]
        self._drawn: list[_WatchedGenerator] = []
        self._is_noting = False

    @property
    def has_drawn(self) -> bool:
        """True if the dataset has been seen to draw from a generator."""
        return bool(self._drawn)

    @property
    def seed(self) -> Callable[[int], None]:
        """A function of a key that seeds the generators that the dataset has been seen to draw from."""
        return self._drawn[0].seed if len(self._drawn) == 1 else self._seed_drawn

    def settle(self, key: int) -> None:
        """Put the other generators into known states; torch's is seeded from the key."""
        self._is_noting = False
        for generator in self._quiet:
            generator.settle(key)

    def moved(self) -> bool:
        """Return True if one of the others has moved since `settle`. To be called once."""
        moved = [generator.moved() for generator in self._quiet]  # all, as each look moves a generator on
        return any(moved)

    def _seed_drawn(self, key: int) -> None:
        for generator in self._drawn:
            generator.seed(key)

    def seed_all(self, key: int) -> None:
        """Note the draws since the last call, and seed all generators."""
        self.note_draws()
        self._seed_drawn(key)
        for generator in self._quiet:
            generator.seed(key)
            generator.expect(key)
        self._is_noting = True

    def note_draws(self) -> None:
        """Note which generators have moved since `seed_all`, which was the last call."""
        if not self._is_noting:
            return
        self._is_noting = False
        moved = [generator.moved() for generator in self._quiet]
        if any(moved):
            self._drawn += [each for each, has in zip(self._quiet, moved, strict=True) if has]
            self._quiet = [each for each, has in zip(self._quiet, moved, strict=True) if not has]


class _WatchedGenerator(Protocol):
    """A generator of this process whose next draw is known after `expect` and `settle`."""

    def seed(self, key: int) -> None:
        """Seed the generator."""

    def expect(self, key: int) -> None:
        """Note what the generator, which has just been seeded, draws next."""

    def settle(self, key: int) -> None:
        """Bring the generator into a known state in the least time."""

    def moved(self) -> bool:
        """Return True if the generator has been drawn from since. This may draw from it."""


def _head(generator: torch.Generator) -> bytes:
    """Return the seed of a generator on the CPU and its position, which every draw changes."""
    state = generator.get_state()  # by a name, so that its memory lives while it is read
    return ctypes.string_at(state.data_ptr(), _HEAD_NBYTES)


class _Torch:
    """torch's CPU generator."""

    def __init__(self) -> None:
        self._expected = b""
        twin = torch.Generator()
        before = _head(twin)
        torch.empty((), dtype=torch.int64, device="cpu").random_(generator=twin)
        if _head(twin) == before:
            raise UnisonoError(
                f"torch {torch.__version__} keeps the state of its CPU generator in another form than unisono knows, "
                "so random numbers of datasets cannot be made the same on all ranks: use a version that it supports"
            )

    def seed(self, key: int) -> None:
        torch.default_generator.manual_seed(key)

    def expect(self, key: int) -> None:
        self._expected = _head(torch.default_generator)

    def settle(self, key: int) -> None:
        # Seeded anew, since libraries read torch.initial_seed() to seed their own generators.
        torch.default_generator.manual_seed(key)
        self._expected = _head(torch.default_generator)

    def moved(self) -> bool:
        return _head(torch.default_generator) != self._expected


class _Python:
    """The generator of the module `random`."""

    def __init__(self) -> None:
        self._twin = random.Random(0)
        self._twin.random()  # the first draw makes the next 624 numbers: after it, a look takes less time
        self._generator: Any = random._inst
        words: Any = super(random.Random, self._generator)
        self._seed_words: Callable[[int], None] = words.seed
        self._set_words: Callable[[Any], None] = words.setstate
        self._start = self._twin.getstate()[1]
        self._first = self._twin.random()
        self._expected = self._first

    def seed(self, key: int) -> None:
        # What random.seed does with an int, without looking at its type.
        self._seed_words(key)
        self._generator.gauss_next = None

    def expect(self, key: int) -> None:
        self._twin.seed(key)
        self._expected = self._twin.random()

    def settle(self, key: int) -> None:
        self._set_words(self._start)  # in half the time of seeding
        self._generator.gauss_next = None
        self._expected = self._first

    def moved(self) -> bool:
        return random.random() != self._expected


class _NumPy:
    """NumPy's global generator, if the program has imported NumPy."""

    def __init__(self) -> None:
        self._expected: float | None = None
        self._first: float | None = None

    def seed(self, key: int) -> None:
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(key & 0xFFFFFFFF)

    def expect(self, key: int) -> None:
        if (numpy := sys.modules.get("numpy")) is not None:
            self._expected = numpy.random.RandomState(key & 0xFFFFFFFF).random_sample()

    def settle(self, key: int) -> None:
        if (numpy := sys.modules.get("numpy")) is not None:
            if self._first is None:
                self._first = numpy.random.RandomState(0).random_sample()
            numpy.random.seed(0)
            self._expected = self._first

    def moved(self) -> bool:
        numpy = sys.modules.get("numpy")
        # If the dataset has just imported NumPy, nothing is known.
        return numpy is not None and numpy.random.random_sample() != self._expected
