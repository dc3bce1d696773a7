"""Envelopes: what is written is read, what does not fit comes after, and what is no envelope is refused."""

from __future__ import annotations

import random

import pytest
import torch

from unisono.collectives.framing import ENVELOPE_NBYTES, LONGEST_CALL, FailedSend, read_envelope, write_envelope
from unisono.collectives.serialization import serialize
from unisono.errors import RankMismatchError


def _read(value, call="gather to rank 0", **flags):
    raw = write_envelope(call, value if isinstance(value, FailedSend) else serialize(value), **flags)
    assert len(raw) == ENVELOPE_NBYTES
    return read_envelope(raw, call, 1)


@pytest.mark.parametrize("seed", range(20))
def test_a_value_is_in_the_envelope_as_far_as_it_fits(seed):
    rng = random.Random(seed)
    text = "x" * rng.choice([0, 10, 500, 800, 2000])
    tensor = torch.arange(rng.choice([0, 1, 50, 200, 5000]), dtype=rng.choice([torch.uint8, torch.float64]))
    payload = serialize([text, tensor])
    envelope = _read([text, tensor])
    assert (envelope.body_nbytes, envelope.data_nbytes) == (len(payload.body), payload.data_nbytes)
    assert envelope.body == (payload.body if envelope.body_here else b"")
    if envelope.data_here and payload.data_nbytes:
        data = payload.data(torch.device("cpu"))[: tensor.nbytes]  # without the gap behind it
        assert envelope.data[: tensor.nbytes] == bytes(data.tolist())
    whole = len(payload.body) + payload.data_nbytes
    if whole < ENVELOPE_NBYTES - 100:
        assert not envelope.rest_nbytes
    if whole > ENVELOPE_NBYTES:
        assert envelope.rest_nbytes >= min(whole, len(payload.body), payload.data_nbytes or whole)
    assert envelope.rest_nbytes % 16 == 0


def test_flags_and_names_come_back():
    envelope = _read(1, padded=48, accelerated=True, more=True, followed=True)
    assert (envelope.call, envelope.padded) == ("gather to rank 0", 48)
    assert envelope.accelerated and envelope.more and envelope.followed and envelope.in_grad_mode
    assert not envelope.failed
    with torch.no_grad():
        assert not _read(1).in_grad_mode
    assert _read(torch.ones(2, requires_grad=True)).followed
    assert len(_read(1, call="c" * 500).call) == LONGEST_CALL


def test_a_failure_is_text_cut_to_the_room_that_there_is():
    envelope = _read(FailedSend(TypeError("no " * 1000)))
    assert envelope.failed and not envelope.rest_nbytes
    assert envelope.body.startswith(b"TypeError: no no") and len(envelope.body) < ENVELOPE_NBYTES


def test_bytes_of_another_call_are_refused():
    with pytest.raises(RankMismatchError, match=r"gather: the message from rank 3 belongs to another call"):
        read_envelope(bytes(ENVELOPE_NBYTES), "gather", 3)
