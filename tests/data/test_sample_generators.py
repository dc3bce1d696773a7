"""Each sample draws its own numbers, however seldom the dataset draws, and few are read twice for it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from test_map_loader import dealt, settings
from torch.utils.data import Dataset

from unisono.data.map_loader import MapLoader
from unisono.plan import derive_key
from unisono.state.random import set_generators

DRAWS = {
    "torch": lambda: torch.rand((), dtype=torch.float64).item(),
    "python": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "normal": np.random.standard_normal,
    "all": lambda: torch.rand((), dtype=torch.float64).item() + random.random() + np.random.rand(),
}


class Seldom(Dataset):
    """Draws in some of its samples, and counts how often each is read."""

    def __init__(self, draw, drawing):
        self.draw, self.drawing, self.reads = draw, drawing, [0] * 37

    def __len__(self):
        return 37

    def __getitem__(self, index):
        self.reads[index] += 1
        return index, self.draw() if index in self.drawing else -1.0


def read(dataset, **options):
    """Sample → what it has drawn, in two epochs."""
    loader = MapLoader(dataset, settings(**options))
    return [
        {
            int(i): x
            for parts in dealt(loader, epoch=epoch).values()
            for _, items in parts
            for i, x in zip(items[0].tolist(), items[1].tolist(), strict=True)
        }
        for epoch in (0, 1)
    ]


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("drawing", [{0, 5}, {20}, {36}, range(37), range(0)], ids=str)
def test_a_sample_draws_what_its_key_says_however_seldom_the_dataset_draws(name, drawing):
    dataset = Seldom(DRAWS[name], drawing)
    found = read(dataset)
    for epoch in (0, 1):
        for index in range(37):
            set_generators(derive_key(0, "train/sample", epoch, index))
            expected = DRAWS[name]() if index in drawing else -1.0
            assert found[epoch][index] == pytest.approx(expected, rel=0, abs=0)
    assert sum(dataset.reads) <= 2 * 37 + 3 * 8  # each generator is found out once, by reading a step's samples again


def test_a_dataset_that_draws_nothing_is_read_once():
    dataset = Seldom(random.random, ())
    read(dataset)
    assert dataset.reads == [2] * 37


def test_a_dataset_that_always_draws_is_read_once():
    dataset = Seldom(DRAWS["all"], range(37))
    read(dataset)
    assert dataset.reads == [2] * 37


def test_a_collate_function_that_seldom_draws_gets_its_own_numbers():
    def draws(samples):
        return [i for i, _ in samples], random.random() if samples[0][0] == 9 else None

    loader = MapLoader(Seldom(random.random, ()), settings(shuffle=False, collate_fn=draws))
    values = {key: parts[0][1][1] for key, parts in dealt(loader).items()}
    assert [key for key, value in values.items() if value is not None] == [(1, 1)]  # samples 9 and 13
    set_generators(derive_key(0, "train/collate", 0, 1, 1, 0))
    assert values[1, 1] == random.random()


def test_an_error_that_comes_of_numbers_drawn_without_a_seed_is_not_raised():
    """Sample 20 is read twice; with its own number it is fine, whatever it was before."""
    set_generators(derive_key(0, "train/sample", 0, 20))
    own = random.random()

    def picky():
        drawn = random.random()
        if drawn != own:
            raise ValueError("an impossible crop")
        return drawn

    loader = MapLoader(Seldom(picky, {20}), settings(shuffle=False))
    assert own in [x for parts in dealt(loader).values() for _, items in parts for x in items[1].tolist()]


def test_an_error_of_the_dataset_itself_is_raised_once():
    class Broken(Seldom):
        def __getitem__(self, index):
            if index == 20:
                self.reads[index] += 1
                raise OSError("disk of the user's")
            return super().__getitem__(index)

    dataset = Broken(random.random, ())
    with pytest.raises(OSError, match="disk of the user's"):
        dealt(MapLoader(dataset, settings(shuffle=False)))
    assert dataset.reads[20] == 1


def test_samples_are_collated_as_torch_does():
    from torch.utils.data import default_collate

    samples = [(torch.full((3,), float(i)), i, {"a": torch.tensor(i), "b": str(i)}) for i in range(4)]

    class Fixed(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return samples[index]

    ((_, items),) = dealt(MapLoader(Fixed(), settings(batch_size=4, virtual_ranks=1, shuffle=False)))[0, 0]
    expected = default_collate(samples)
    assert torch.equal(items[0], expected[0])
    assert torch.equal(items[1], expected[1])
    assert items[2].keys() == expected[2].keys()
    assert type(items) is type(expected)
    samples[2] = (torch.zeros(3), 2)
    with pytest.raises(RuntimeError, match="equal size"):
        dealt(MapLoader(Fixed(), settings(batch_size=4, virtual_ranks=1, shuffle=False)))
    samples[:] = [(torch.zeros(3).to_sparse(),)] * 4
    with pytest.raises(RuntimeError, match="sparse"):
        dealt(MapLoader(Fixed(), settings(batch_size=4, virtual_ranks=1, shuffle=False)))
