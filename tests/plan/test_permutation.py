"""What `permute` promises about one order; that many orders look random is in test_permutation_statistics.py."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import unisono.plan.permutation as permutation
from unisono.plan.permutation import MAX_SAMPLES, permute

# Primes, squares, powers of two and their neighbours, products of neighbours; small, sorted ones and networks.
LENGTHS = sorted(
    {2**k + d for k in range(1, 18) for d in (-1, 0, 1)}
    | {k * k + d for k in (64, 65, 100, 255, 256, 257, 300) for d in (-1, 0, 1)}
    | {k * (k + 1) for k in (64, 128, 181, 256, 300)}
    | {997, 4093, 4099, 7919, 65537, 104729, 131071}
)
BIG = [10**9, 2**40 - 1, 2**40, 2**53 - 111, 2**53, 2**62 - 57, 2**62]


def whole(num_samples, seed=0, epoch=0):
    return permute(torch.arange(num_samples), num_samples=num_samples, seed=seed, epoch=epoch)


def is_bijection(samples):
    return torch.equal(samples.sort().values, torch.arange(len(samples)))


def test_every_sample_once_for_all_small_lengths():
    assert all(is_bijection(whole(n, seed, epoch=n)) for n in range(1, 301) for seed in range(3))


@pytest.mark.parametrize("num_samples", LENGTHS)
def test_every_sample_once(num_samples):
    assert is_bijection(whole(num_samples, seed=7, epoch=3))


@pytest.mark.parametrize("num_samples", [10**6, 10**6 + 3])
def test_every_sample_once_of_a_million(num_samples):
    assert is_bijection(whole(num_samples, seed=1, epoch=2))


def test_every_sample_once_by_a_network_of_any_size(monkeypatch):
    # Networks start at 4097 samples; their arithmetic is right below that too, where all cases can be tried.
    monkeypatch.setattr(permutation, "_SORT_UP_TO", 1)
    assert all(is_bijection(whole(n, seed)) for n in range(2, 600) for seed in range(2))


@pytest.mark.parametrize("num_samples", BIG)
def test_distinct_positions_have_distinct_samples_when_there_are_many(num_samples):
    start, end = torch.arange(100_000), torch.arange(num_samples - 100_000, num_samples)
    anywhere = torch.randint(num_samples, (100_000,), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([start, end, anywhere]).unique()
    samples = permute(positions, num_samples=num_samples, seed=5, epoch=9)
    assert samples.min() >= 0
    assert samples.max() < num_samples
    assert len(samples.unique()) == len(positions)


def test_a_value_that_falls_outside_is_walked_until_it_lies_inside():
    # Of 64·65 + 1 samples a network covers 66·64 values: most often some fall outside.
    assert all(is_bijection(whole(64 * 65 + 1, seed)) for seed in range(50))


@pytest.mark.parametrize("num_samples", [10, 4096, 4097, 10**6, 2**40])
def test_a_sample_depends_on_nothing_but_its_position(num_samples):
    # Not on the batch it is asked for in, nor on what was asked before, nor on where chunks are cut.
    positions = torch.randint(num_samples, (20_000,), generator=torch.Generator().manual_seed(1))
    together = permute(positions, num_samples=num_samples, seed=2, epoch=1)
    assert torch.equal(together.flip(0), permute(positions.flip(0), num_samples=num_samples, seed=2, epoch=1))
    for at in (0, 8191, 8192, 19_999):
        assert permute(positions[at], num_samples=num_samples, seed=2, epoch=1) == together[at]


def test_orders_stay_as_they_are_between_versions():
    # A checkpoint resumes in mid-epoch only if these never change.
    positions = torch.arange(6)
    assert permute(positions, num_samples=10, seed=0, epoch=0).tolist() == ORDER_OF_10
    assert permute(positions, num_samples=10**9, seed=0, epoch=0).tolist() == ORDER_OF_1E9
    assert permute(positions, num_samples=2**62, seed=-1, epoch=10**20).tolist() == ORDER_OF_2_62


@pytest.mark.parametrize("num_samples", [100, 10**9])
def test_seed_and_epoch_are_any_integers(num_samples):
    positions = torch.arange(100)
    names = [(s, e) for s in (-(2**70), -1, 0, 1, 2**32, 2**64) for e in (-1, 0, 1, 2**64)]
    orders = {tuple(permute(positions, num_samples=num_samples, seed=s, epoch=e).tolist()) for s, e in names}
    assert len(orders) == len(names)
    # An integer of another type that is equal names the same order.
    same = permute(positions, num_samples=np.int64(num_samples), seed=np.int32(1), epoch=True)
    assert torch.equal(same, permute(positions, num_samples=num_samples, seed=1, epoch=1))


@pytest.mark.parametrize("num_samples", [100, 10**9])
@pytest.mark.parametrize("positions", [torch.tensor(3), torch.arange(0), torch.arange(24).view(2, 3, 4)])
def test_shape_is_kept_and_positions_are_not_written(positions, num_samples):
    before = positions.clone()
    samples = permute(positions, num_samples=num_samples, seed=0, epoch=0)
    assert (samples.shape, samples.dtype) == (positions.shape, torch.int64)
    assert torch.equal(positions, before)


@pytest.mark.parametrize("num_samples", [100, 10**9])
def test_strided_positions_are_taken_as_they_are(num_samples):
    positions = torch.arange(60).view(6, 10).t()[::2]
    expected = permute(positions.contiguous(), num_samples=num_samples, seed=0, epoch=0)
    assert torch.equal(permute(positions, num_samples=num_samples, seed=0, epoch=0), expected)


def test_the_caller_may_write_on_the_answer():
    first = whole(50)
    kept = first.clone()
    first.zero_()
    assert torch.equal(whole(50), kept)


@pytest.mark.parametrize("num_samples", [0, -1, MAX_SAMPLES + 1])
def test_a_number_of_samples_out_of_range_is_named(num_samples):
    with pytest.raises(ValueError, match=rf"num_samples={num_samples} is outside \[1, 2\*\*62\]"):
        permute(torch.arange(1), num_samples=num_samples, seed=0, epoch=0)


@pytest.mark.parametrize("num_samples", [100, 10**6])
@pytest.mark.parametrize(("shift", "found"), [(-1, "from -1 to"), (1, "to {last}")])
def test_positions_outside_the_epoch_are_named(num_samples, shift, found):
    positions = torch.tensor([0, num_samples - 1]) + shift
    with pytest.raises(ValueError, match=found.format(last=num_samples)):
        permute(positions, num_samples=num_samples, seed=0, epoch=0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
def test_positions_of_another_type_are_refused(dtype):
    with pytest.raises(TypeError, match=r"expected torch\.int64"):
        permute(torch.zeros(3, dtype=dtype), num_samples=10, seed=0, epoch=0)


def test_seeds_that_are_no_integers_are_refused():
    with pytest.raises(TypeError, match="float"):
        permute(torch.arange(3), num_samples=10, seed=0.5, epoch=0)


class Meter(TorchDispatchMode):
    """Counts torch operations and notes the largest tensor that one made."""

    calls = largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


def test_cost_does_not_depend_on_the_number_of_samples():
    # Counted, not timed.
    for num_samples in (10**5, 10**9, 2**62):
        with Meter() as meter:
            permute(torch.arange(256), num_samples=num_samples, seed=0, epoch=4)
        assert meter.largest <= 256
        assert meter.calls < 200


ORDER_OF_10 = [7, 1, 9, 8, 0, 6]
ORDER_OF_1E9 = [945582507, 663928306, 979939535, 180821241, 541313300, 537453734]
ORDER_OF_2_62 = [
    3380547006503739920,
    26196731384083865,
    2195251555451660779,
    1301204423641190505,
    238576773194548904,
    782433711595761771,
]
