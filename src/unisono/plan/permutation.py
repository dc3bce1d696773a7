"""The order of an epoch: a keyed permutation of [0, n), computed only for the requested positions.

A pseudo-random permutation replaces the shuffled list. Nothing is drawn, kept or sent: position p of epoch e is sample
π(seed, e, p) on every rank, at a cost that does not depend on n. A list would cost 8 n bytes and seconds on every rank.

Large n: a Feistel network (Luby & Rackoff, "How to construct pseudorandom permutations from pseudorandom functions",
SIAM J. Comput. 17(2), 1988) on pairs (left, right) of Z_a × Z_b, which adds to each half in turn a keyed hash of the
other. Such pairs cover slightly more than [0, n); a value that falls outside is sent through the network again until it
lies inside. Both as in Black & Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002), sections 3 and 4.
Small n: the order that sorts n random numbers, kept between calls. A network on few values does not permute randomly.

It passes the statistical tests in tests/plan, but it is not a secure cipher. Start reading at `permute`.
"""

from __future__ import annotations

import hashlib
import operator
import struct
import sys
from array import array
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["MAX_SAMPLES", "permute"]

MAX_SAMPLES = 2**62
"""The most samples that `permute` can order. With more, products in the network would not fit into int64."""

# Networks permute tiny domains badly. With a and b odd, for example, every round is an even permutation, so half of all
# orders of 9 samples would never occur; and with few values the hashes of a round leave visible traces: at 64 samples 6
# rounds do not pass the tests. Sorting is uniform. At 4096 it takes 0.3 ms, once an epoch, and 32 KB.
_SORT_UP_TO = 4096

# The sharpest test found is the difference of the samples at positions that share a half (tests/plan). At 5000 samples,
# near the fewest that a network orders, 4 and 5 rounds fail it within 1000 seeds, 6 within 60,000; 8 pass those too.
_ROUNDS = 8

# Two halves and two temporaries of 64 KB stay in a core's second-level cache. Below 32,768 elements torch does not
# split an operation over threads, which would cost more than it saves.
_CHUNK = 8192

# Odd, with bits well spread: the fraction of the golden ratio (Knuth, TAOCP volume 3, section 6.4), as int64.
_MIX = 0x9E3779B97F4A7C15 - 2**64


def permute(positions: Tensor, *, num_samples: int, seed: int, epoch: int) -> Tensor:
    """Return the samples at the given positions of an epoch's order.

    Pure, and the same on every rank and every machine. Distinct positions have distinct samples, and the positions
    [0, num_samples) have all samples. Orders of different seeds, epochs or num_samples are independent of each other.
    O(len(positions)) memory and time, about 30 ns for each position on one thread.

    Args:
        positions: int64 tensor of any shape, with values in [0, num_samples).
        num_samples: The number of samples in the epoch, at most `MAX_SAMPLES`.
        seed: The seed of the run, any integer.
        epoch: The number of the epoch, any integer.

    Returns:
        int64 tensor with the shape and on the device of `positions`.

    Raises:
        TypeError: `positions` is not int64.
        ValueError: A position or `num_samples` is out of range.

    >>> permute(torch.arange(10), num_samples=10, seed=0, epoch=0).sort().values
    tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    >>> some = permute(torch.tensor([999_999_999, 0]), num_samples=10**9, seed=0, epoch=3)
    >>> bool(some[1] == permute(torch.tensor(0), num_samples=10**9, seed=0, epoch=3))
    True
    """
    num_samples, seed, epoch = operator.index(num_samples), operator.index(seed), operator.index(epoch)
    _check(positions, num_samples)
    if num_samples <= _SORT_UP_TO:
        return _sorted_order(num_samples, seed, epoch).to(positions.device)[positions]
    network = _network(num_samples, seed, epoch, _ROUNDS)
    source = positions.reshape(-1)
    flat = torch.empty_like(source)
    for start in range(0, source.numel(), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        _pass_through(network, source[chunk], flat[chunk])
    # Few values fall outside: sending them all at the end costs one small call instead of one per chunk. The loop ends,
    # because the cycle of a value leads back to the position that it came from, which lies inside.
    outside = (flat >= num_samples).nonzero().view(-1)
    while outside.numel():
        values = flat[outside]
        _pass_through(network, values, values)
        flat[outside] = values
        outside = outside[values >= num_samples]
    return flat.view(positions.shape)


def _check(positions: Tensor, num_samples: int) -> None:
    if positions.dtype != torch.int64:
        raise TypeError(f"positions has dtype {positions.dtype}, expected torch.int64: use positions.long()")
    if not 1 <= num_samples <= MAX_SAMPLES:
        raise ValueError(f"num_samples={num_samples} is outside [1, 2**62]")
    if positions.numel():
        low, high = (int(bound) for bound in positions.aminmax())
        if low < 0 or high >= num_samples:
            raise ValueError(
                f"positions range from {low} to {high}, outside [0, {num_samples}): a position counts from the "
                "start of its epoch, so take what lies beyond the end from the next epoch."
            )


def _key_bytes(nbytes: int, num_samples: int, seed: int, epoch: int) -> bytes:
    """Return random bytes for one order: SHAKE-256 (FIPS 202) of the text of its arguments."""
    # ":d" because repr differs between equal int, bool and NumPy integers.
    text = f"permutation {seed:d} {epoch:d} {num_samples:d}".encode()
    return hashlib.shake_256(text).digest(nbytes)


@lru_cache(maxsize=32)
def _sorted_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """Return the order that sorts 64-bit random numbers; two are equal with probability < 2^-40, and stay in order."""
    numbers = array("q", _key_bytes(8 * num_samples, num_samples, seed, epoch))
    if sys.byteorder == "big":
        numbers.byteswap()
    # They count as unsigned: with the upper bit inverted, signed ones have the same order.
    return torch.frombuffer(numbers, dtype=torch.int64).bitwise_xor(-(2**63)).argsort(stable=True)


class _Network(NamedTuple):
    """The constants of a Feistel network on values left·2^bits + right, with 0 <= left < a and 0 <= right < 2^bits."""

    a: int
    """The smallest number of left halves such that a·2^bits >= num_samples."""
    bits: int
    """Width of the right half: half that of num_samples, so both halves have about √num_samples values."""
    rounds: list[tuple[int, Tensor]]
    """The random multiplier and addend of each round's hash."""


@lru_cache(maxsize=256)
def _network(num_samples: int, seed: int, epoch: int, rounds: int) -> _Network:
    bits = num_samples.bit_length() // 2
    numbers = struct.unpack(f"<{2 * rounds}q", _key_bytes(16 * rounds, num_samples, seed, epoch))
    # 0-d tensors, because torch.add requires one as its first argument; on the CPU whatever the default device is.
    addends = [torch.tensor(number, dtype=torch.int64, device="cpu") for number in numbers[1::2]]
    return _Network(-(-num_samples >> bits), bits, list(zip(numbers[::2], addends, strict=True)))


def _pass_through(network: _Network, values: Tensor, out: Tensor) -> None:
    """Send values through the network once; `out` may be `values`.

    All arithmetic is wrapping int64. Right shifts copy the sign; a comment at each says why that is correct.
    """
    a, bits, rounds = network
    left = values >> bits
    right = values & ((1 << bits) - 1)
    hashed, spare = torch.empty_like(left), torch.empty_like(left)
    for number, (multiplier, addend) in enumerate(rounds):
        # Multiply, fold, multiply: without the fold the hash, and so the whole network, would be nearly affine.
        # In the fold the copied sign is one more function of the upper half.
        torch.add(addend, left if number % 2 else right, alpha=multiplier, out=hashed)
        torch.bitwise_right_shift(hashed, 32, out=spare)
        hashed.bitwise_xor_(spare).mul_(_MIX)
        if number % 2:
            # The top bits, as a signed number, which is equal to the unsigned one modulo 2^bits.
            right.add_(hashed.bitwise_right_shift_(64 - bits)).bitwise_and_((1 << bits) - 1)
        else:
            # Top 32 bits h -> floor((h - 2^32)·a / 2^32), which is h·a / 2^32 - a: multiply-shift instead of a division
            # (Lemire, "Fast random integer generation in an interval", ACM TOMACS 29(1), 2019). In [-a, 0), so that
            # the sum with left is in [-a, a), and its sign says whether to add a.
            hashed.bitwise_right_shift_(32).bitwise_or_(-(1 << 32)).mul_(a).bitwise_right_shift_(32)
            left.add_(hashed)
            torch.bitwise_right_shift(left, 63, out=spare)
            left.add_(spare.bitwise_and_(a))
    torch.add(right, left, alpha=1 << bits, out=out)
