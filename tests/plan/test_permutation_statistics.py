"""Orders that `permute` makes are as random as those of `torch.randperm`, by tests that wrong ones fail.

Each check takes a way to make orders and returns a p-value, of a statistic whose distribution under uniform random
permutations is known. All seeds are fixed, so every outcome is: a check that passes today passes always. Keys count up
0, 1, 2, … as those of users do, so that the checks would see keys that are related.
"""

import math
from functools import partial

import pytest
import torch

import unisono.plan.permutation as permutation
from late_imports import LateModule
from unisono.plan import derive_key, permute

stats = LateModule("scipy.stats")
PASS = 1e-4
"""Below, or this near to 1 (too even), a check fails. Good orders had a chance of 1% to fail any of 50 checks."""


def ours(n, seed, epoch):
    return permute(torch.arange(n), num_samples=n, seed=seed, epoch=epoch)


def randperm(n, seed, epoch):
    """The control: if it failed, the check would be wrong."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(derive_key(seed, "control", epoch)))


# Wrong ways, one at least for each check.


def few_rounds(n, seed, epoch, *, rounds):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(permutation, "_ROUNDS", rounds)
        patch.setattr(permutation, "_SORT_UP_TO", 1)
        return ours(n, seed, epoch)


def affine(n, seed, epoch):
    """A map p -> m·p + c mod n: cheap, a bijection, and often taken for a shuffle."""
    key = derive_key(seed, "affine", epoch)
    multiplier = 1 + key % n
    while math.gcd(multiplier, n) != 1:
        multiplier += 1
    return (torch.arange(n) * multiplier + key // n % n) % n


def naive_shuffle(n, seed, epoch):
    """The textbook mistake: swap each place with any other, not with one that is left."""
    generator = torch.Generator().manual_seed(derive_key(seed, "naive", epoch))
    values = list(range(n))
    for place, other in enumerate(torch.randint(n, (n,), generator=generator).tolist()):
        values[place], values[other] = values[other], values[place]
    return torch.tensor(values)


def even_only(n, seed, epoch):
    """Only permutations of even parity, as a network makes with two odd halves."""
    order = randperm(n, seed, epoch)
    cycles = sum(1 for _ in _cycles(order.tolist()))
    if (n - cycles) % 2:
        order[[0, 1]] = order[[1, 0]]
    return order


def seed_plus_epoch(n, seed, epoch):
    """How torch's DistributedSampler seeds: one run's second epoch is the next run's first."""
    return randperm(n, seed + epoch, 0)


def related_epochs(n, seed, epoch):
    """One order, rotated a little every epoch."""
    return (randperm(n, seed, 0) + epoch) % n


def _cycles(values):
    seen = set()
    for start in range(len(values)):
        if start not in seen:
            at, length = start, 0
            while at not in seen:
                seen.add(at)
                at, length = values[at], length + 1
            yield length


# Checks.


def even(counts):
    """Chi-square of independent draws against equal chances."""
    return stats.chisquare(counts.double().numpy()).pvalue


def places_of_values(order, *, n, seeds):
    """How often each position has each sample: the mean permutation matrix is flat."""
    counts, cells = torch.zeros(n * n, dtype=torch.int64), torch.arange(n) * n
    for seed in range(seeds):
        counts[cells + order(n, seed, 0)] += 1
    # Each row and column of a permutation matrix sums to 1, which leaves (n - 1)² degrees of freedom and makes the sum
    # n / (n - 1) as large as with independent cells.
    expected = seeds / n
    statistic = float((counts - expected).square().sum()) / expected * (n - 1) / n
    return stats.chi2.sf(statistic, (n - 1) ** 2)


def all_orders(order, *, n, seeds):
    """How often each of the n! orders comes, so parity too."""
    codes = torch.stack([order(n, seed, 0) for seed in range(seeds)]) @ (n ** torch.arange(n))
    counts = codes.unique(return_counts=True)[1]
    return even(torch.cat([counts, counts.new_zeros(math.factorial(n) - len(counts))]))


def neighbours_of_few(order, *, n, seeds):
    """How often each ordered pair of samples comes side by side; one pair a seed, so that all are independent."""
    pairs = torch.stack([order(n, seed, 0)[seed % (n - 1) :][:2] for seed in range(seeds)])
    counts = torch.bincount(pairs @ torch.tensor([n, 1]), minlength=n * n).view(n, n)
    return even(counts[~torch.eye(n, dtype=torch.bool)])


def differences(order, *, n, seeds, lag):
    """Differences modulo n between the samples at positions `lag` apart: each but 0 has the same chance."""
    counts = torch.zeros(n, dtype=torch.int64)
    for seed in range(seeds):
        samples = order(n, seed, 0)
        counts += torch.bincount((samples[lag:] - samples[:-lag]) % n, minlength=n)
    return even(counts[1:])


def pairs_of_many(order, *, n, lag, bins=64):
    """Where the sample at p lies does not tell where that at p + lag lies."""
    cell = order(n, 3, 0) * bins // n
    return even(torch.bincount(cell[lag:] * bins + cell[:-lag], minlength=bins * bins))


def displacements(order, *, n, seeds):
    """Differences modulo n between a sample and its position."""
    counts = sum(torch.bincount((order(n, seed, 0) - torch.arange(n)) % n, minlength=n) for seed in range(seeds))
    return even(counts)


def fixed_points(order, *, n, seeds):
    """Samples that stay in their place are Poisson(1) in number."""
    found = torch.stack([(order(n, seed, 0) == torch.arange(n)).sum() for seed in range(seeds)])
    chances = [math.exp(-1) / math.factorial(k) for k in range(5)]
    expected = [seeds * chance for chance in (*chances, 1 - sum(chances))]
    return stats.chisquare(torch.bincount(found.clamp(max=5), minlength=6).numpy(), expected).pvalue


def serial_correlation(order, *, n, lag):
    """The correlation of neighbours on a long order is normal around -1/(n - 1), of variance 1/n."""
    ranks = order(n, 4, 0).double()
    ranks = (ranks - ranks.mean()) / ranks.std()
    score = float((ranks * ranks.roll(lag)).mean() + 1 / (n - 1)) * math.sqrt(n)
    return 2 * stats.norm.sf(abs(score))


NEXT_EPOCH, NEXT_SEED = (lambda s: (0, s), lambda s: (0, s + 1)), (lambda s: (s, 0), lambda s: (s + 1, 0))
OTHER_RUN = (lambda s: (s, 1), lambda s: (s + 1, 0))


def keys_on_few(order, *, n, seeds, keys):
    """The sample at a position under one key does not tell that under the next key."""
    one, other = keys
    place = [s % n for s in range(seeds)]
    # Every second key begins a pair, so that pairs are independent.
    left = torch.stack([order(n, *one(2 * s))[place[s]] for s in range(seeds)])
    right = torch.stack([order(n, *other(2 * s))[place[s]] for s in range(seeds)])
    return even(torch.bincount(left * n + right, minlength=n * n))


def keys_on_many(order, *, n, seeds, keys):
    """Differences modulo n between the samples at a position under one key and under the next."""
    one, other = keys
    counts = torch.zeros(n, dtype=torch.int64)
    for s in range(seeds):
        counts += torch.bincount((order(n, *one(2 * s)) - order(n, *other(2 * s))) % n, minlength=n)
    return even(counts)


def rank_correlation(order, *, n, keys):
    """Spearman's correlation of two orders is normal around 0, of variance 1/(n - 1)."""
    one, other = keys
    left, right = order(n, *one(6)).double(), order(n, *other(6)).double()
    score = float(torch.corrcoef(torch.stack([left, right]))[0, 1]) * math.sqrt(n - 1)
    return 2 * stats.norm.sf(abs(score))


def named(function, **settings):
    return pytest.param(
        partial(function, **settings), id=f"{function.__name__}-{'-'.join(map(_word, settings.values()))}"
    )


def _word(setting):
    names = {id(NEXT_EPOCH): "epochs", id(NEXT_SEED): "seeds", id(OTHER_RUN): "runs"}
    return names.get(id(setting), str(setting))


# 4160 = 65·64 is the domain of a network with nothing to walk; positions 64 apart share a half in both.
CHECKS = [
    *(named(places_of_values, n=n, seeds=2000) for n in (2, 5, 17)),
    named(all_orders, n=4, seeds=2500),
    named(neighbours_of_few, n=12, seeds=4000),
    named(differences, n=1000, seeds=250, lag=1),
    named(differences, n=4160, seeds=500, lag=64),
    *(named(pairs_of_many, n=10**6, lag=lag) for lag in (1, 1024)),
    named(serial_correlation, n=10**6, lag=1024),
    named(displacements, n=5000, seeds=250),
    named(fixed_points, n=1000, seeds=1000),
    named(keys_on_few, n=9, seeds=2500, keys=OTHER_RUN),
    named(keys_on_many, n=5000, seeds=150, keys=NEXT_EPOCH),
    *(named(rank_correlation, n=10**6, keys=keys) for keys in (NEXT_EPOCH, NEXT_SEED, OTHER_RUN)),
]
MORE_CHECKS = [
    *(named(places_of_values, n=n, seeds=2000) for n in (3, 4, *range(6, 17), 100, 1000)),
    *(named(all_orders, n=n, seeds=20_000) for n in (2, 3, 4, 5)),
    *(named(neighbours_of_few, n=n, seeds=8000) for n in (4, 5, 8, 17)),
    named(differences, n=1000, seeds=500, lag=32),
    *(named(differences, n=n, seeds=1000, lag=lag) for n, lag in ((4160, 1), (5000, 1), (5000, 64))),
    *(named(pairs_of_many, n=10**6, lag=lag) for lag in (2, 1023, 1025)),
    *(named(serial_correlation, n=10**6, lag=lag) for lag in (1, 8)),
    named(fixed_points, n=5000, seeds=2000),
    *(named(keys_on_few, n=n, seeds=5000, keys=keys) for n in (5, 9) for keys in (NEXT_EPOCH, NEXT_SEED, OTHER_RUN)),
    *(named(keys_on_many, n=5000, seeds=300, keys=keys) for keys in (NEXT_SEED, OTHER_RUN)),
]
"""Other sizes and keys of the same: for the soak."""

WRONG = [
    (naive_shuffle, named(places_of_values, n=17, seeds=2000)),
    (naive_shuffle, named(all_orders, n=4, seeds=5000)),
    (even_only, named(all_orders, n=4, seeds=1000)),
    (affine, named(all_orders, n=4, seeds=1000)),
    (affine, named(neighbours_of_few, n=12, seeds=8000)),
    (affine, named(differences, n=1000, seeds=500, lag=1)),
    (partial(few_rounds, rounds=4), named(differences, n=4160, seeds=1000, lag=64)),
    (partial(few_rounds, rounds=2), named(pairs_of_many, n=10**6, lag=1024)),
    (partial(few_rounds, rounds=2), named(serial_correlation, n=10**6, lag=1024)),
    (affine, named(displacements, n=5000, seeds=500)),
    (partial(few_rounds, rounds=3), named(fixed_points, n=1000, seeds=2000)),
    (seed_plus_epoch, named(keys_on_few, n=9, seeds=2500, keys=OTHER_RUN)),
    (seed_plus_epoch, named(keys_on_many, n=5000, seeds=300, keys=OTHER_RUN)),
    (related_epochs, named(rank_correlation, n=10**6, keys=NEXT_EPOCH)),
]
MORE_WRONG = [
    (naive_shuffle, named(places_of_values, n=100, seeds=2000)),
    (related_epochs, named(keys_on_few, n=9, seeds=5000, keys=NEXT_EPOCH)),
    (partial(few_rounds, rounds=4), named(differences, n=4160, seeds=1000, lag=1)),
    (partial(few_rounds, rounds=4), named(differences, n=5000, seeds=1000, lag=64)),
    (partial(few_rounds, rounds=5), named(differences, n=5000, seeds=1000, lag=64)),
    (partial(few_rounds, rounds=3), named(fixed_points, n=5000, seeds=2000)),
]


def soak(param):
    return pytest.param(*param.values, id=param.id, marks=pytest.mark.soak)


@pytest.mark.parametrize("check", [*CHECKS, *map(soak, MORE_CHECKS)])
def test_orders_are_uniform_and_independent(check):
    assert PASS < check(ours) < 1 - PASS


@pytest.mark.soak
@pytest.mark.parametrize("check", [*CHECKS, *MORE_CHECKS])
def test_the_control_passes_every_check(check):
    assert PASS < check(randperm) < 1 - PASS


@pytest.mark.parametrize(
    ("order", "check"),
    [
        pytest.param(o, *c.values, id=f"{getattr(o, '__name__', 'few_rounds')}-{c.id}", marks=marks)
        for wrong, marks in ((WRONG, ()), (MORE_WRONG, pytest.mark.soak))
        for o, c in wrong
    ],
)
def test_the_check_finds_a_wrong_order(order, check):
    assert not 1e-9 < check(order) < 1 - 1e-9


@pytest.mark.parametrize(
    ("n", "stride"),
    [
        pytest.param(n, stride, marks=() if i % 3 == j else pytest.mark.soak)
        for i, n in enumerate((10**9, 2**40 + 7, 2**53 - 111, 2**62 - 57))
        for j, stride in enumerate(("side by side", "sharing a half", "spread out"))
    ],
)
def test_a_part_of_a_huge_order_is_uniform_and_independent(n, stride):
    count, bins = 2**18, 512
    step = {"side by side": 1, "sharing a half": 2 ** (n.bit_length() // 2), "spread out": n // count}[stride]
    positions = torch.arange(min(count, n // step)) * step
    last, now, then = (permute(positions, num_samples=n, seed=s, epoch=e) for s, e in ((0, 1), (1, 0), (1, 1)))
    cells = [(samples // (n // bins + 1)) for samples in (last, now, then)]
    p_values = [even(torch.bincount(cell, minlength=bins)) for cell in cells]
    coarse = [cell // 16 for cell in cells]
    for left, right in ((now[1:], now[:-1]), (now, last), (now, then)):
        p_values.append(even(torch.bincount((left - right) % n // (n // bins + 1), minlength=bins)))
    for one, other in ((coarse[1][1:], coarse[1][:-1]), (coarse[1], coarse[0]), (coarse[1], coarse[2])):
        p_values.append(even(torch.bincount(one * 32 + other, minlength=1024)))
    # And the low bits, which bins do not see.
    p_values.append(even(torch.bincount(now % 256, minlength=256)))
    assert min(p_values) > PASS
    assert max(p_values) < 1 - PASS
