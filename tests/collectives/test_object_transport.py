"""What of a payload travels in its envelope and what after it, and when rests are filled up for one collective."""

from __future__ import annotations

import random

import pytest
import torch

from unisono.collectives import object_transport as transport
from unisono.collectives.framing import read_envelope, write_envelope
from unisono.collectives.group import SINGLE_PROCESS
from unisono.collectives.received import read_payload
from unisono.collectives.serialization import serialize

_CPU = torch.device("cpu")


def _travel(value, fill=0):
    """Send a value as two messages would; return what is received, and the bytes of the second message."""
    payload = serialize(value)
    envelope = read_envelope(write_envelope("gather", payload), "gather", 1)
    rest = transport._rest(envelope, payload, _CPU)
    nbytes = 0 if rest is None else rest.numel()
    assert nbytes == envelope.rest_nbytes
    if nbytes:
        rest = transport._padded(rest, nbytes + fill, _CPU)
    return read_payload(envelope, rest, None, own=False).open(), nbytes


@pytest.mark.parametrize("seed", range(20))
def test_values_of_any_size_arrive(seed):
    rng = random.Random(seed)
    value = {
        "text": "x" * rng.choice([0, 300, 3000]),
        "tensors": [torch.randint(9, (rng.choice([0, 3, 70, 900]),)) for _ in range(rng.randrange(4))],
    }
    found, nbytes = _travel(value, fill=rng.choice([0, 16, 4096]))
    assert found["text"] == value["text"]
    assert all(torch.equal(a, b) for a, b in zip(found["tensors"], value["tensors"], strict=True))
    needed = len(value["text"]) + sum(tensor.nbytes for tensor in value["tensors"])
    assert (nbytes == 0) if needed < 500 else needed < 900 or nbytes > 0


@pytest.mark.parametrize(
    ("value", "second"),
    [(b"x" * 100, 0), (torch.zeros(50), 0), (b"x" * 2000, 2000), (torch.zeros(500), 2000), (torch.zeros(240), 960)],
)
def test_a_second_message_carries_only_what_does_not_fit(value, second):
    _, nbytes = _travel(value)
    assert second <= nbytes <= second + (256 if second else 0)


@pytest.mark.parametrize(
    ("sizes", "pads"),
    [
        ([0, 16, 16], True),
        ([1 << 10, 0, 0, 0], True),  # little is not worth a collective for each
        ([1 << 20, 1 << 20], True),
        ([1 << 20, 0], True),
        ([1 << 20, 0, 0], False),
        ([1 << 20, 1 << 19, 1 << 19], True),
    ],
)
def test_rests_are_filled_up_where_that_costs_little(sizes, pads):
    assert transport._may_pad(sizes) is pads


def test_one_process_gets_a_copy_of_its_own():
    tensor = torch.arange(4)
    (received,) = transport.all_gather(SINGLE_PROCESS, "all_gather", serialize([tensor, "a"]))
    found, text = received.open()
    tensor[0] = 7
    assert (found.tolist(), text) == ([0, 1, 2, 3], "a")
