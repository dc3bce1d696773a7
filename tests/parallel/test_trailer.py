"""The numbers that ranks add up behind their gradients: what one rank writes, the sum of all says for each."""

from __future__ import annotations

import random

import pytest
import torch

from unisono.errors import RankMismatchError
from unisono.parallel.trailer import Trailer


def summed(trailers, parts, *, values=0):
    """The sum of the vectors of all ranks, as an all-reduce makes it."""
    total = torch.zeros(trailers[0].numel)
    for trailer, part in zip(trailers, parts, strict=True):
        vector = torch.full((trailer.numel,), float("nan"))
        trailer.write(vector, **part).fill_(values)
        total += vector
    return total


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("serial", [1, 7, 2**24, 2**24 + 1])
def test_all_read_what_any_rank_wrote(seed, serial):
    random.seed(seed)
    ranks, parameters, buffers = random.randrange(1, 6), random.randrange(8), random.randrange(4)
    parts = [
        {
            "rank": rank,
            "serial": serial if rank == 0 or random.random() < 0.7 else -serial,
            "used": [float(random.random() < 0.5) for _ in range(parameters)],
            "late": {i for i in range(parameters) if random.random() < 0.2},
            "changed": [random.random() < 0.5 for _ in range(buffers)],
            "frozen": bytes(parameters),
        }
        for rank in range(ranks)
    ]
    trailers = [Trailer(ranks=ranks, parameters=parameters, buffers=buffers, values=3) for _ in range(ranks)]
    vector = summed(trailers, parts, values=1)
    assert trailers[0].values(vector).tolist() == [ranks] * 3
    for trailer in trailers:
        summary = trailer.read(vector, serial=serial)
        assert summary.active == tuple(part["rank"] for part in parts if part["serial"] > 0)
        assert summary.used == {i for i in range(parameters) if any(part["used"][i] for part in parts)}
        assert summary.late == set().union(*(part["late"] for part in parts))
        assert summary.changed == tuple(any(part["changed"][i] for part in parts) for i in range(buffers))
        assert summary.alike
        assert trailer.read(vector, serial=serial) is summary


def test_ranks_that_froze_other_parameters_are_found_if_they_have_a_batch():
    trailers = [Trailer(ranks=2, parameters=2, buffers=0, values=0) for _ in range(2)]
    part = {"used": [1.0, 0.0], "late": set(), "changed": []}
    for serial, alike in ((1, False), (-1, True)):
        parts = [
            {**part, "rank": 0, "serial": 1, "frozen": b"\0\0"},
            {**part, "rank": 1, "serial": serial, "frozen": b"\0\1"},
        ]
        assert trailers[0].read(summed(trailers, parts), serial=1).alike is alike


def test_ranks_in_different_backward_passes_are_refused():
    trailers = [Trailer(ranks=2, parameters=1, buffers=0, values=0) for _ in range(2)]
    part = {"used": [1.0], "late": set(), "changed": [], "frozen": b"\0"}
    vector = summed(trailers, [{**part, "rank": 0, "serial": 5}, {**part, "rank": 1, "serial": 4}])
    with pytest.raises(RankMismatchError, match=r"rank 1 of the group is in backward pass 4 .* in pass 5"):
        trailers[0].read(vector, serial=5)
