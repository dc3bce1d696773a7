"""The one-way ring: pieces arrive in order, and a full ring holds its writer back."""

from __future__ import annotations

import random

import pytest
import torch

from unisono.shm.ring_buffer import NUM_CELLS, RingReader, RingWriter, create_ring, ring_nbytes
from unisono.shm.segment import Segment

_CELL = 64


@pytest.fixture
def ring():
    segment = Segment.create(256 + ring_nbytes(_CELL), name="test")
    create_ring(segment, 256)
    return RingWriter(segment, 256, cell_nbytes=_CELL), RingReader(segment, 256, cell_nbytes=_CELL)


def test_random_pieces_arrive_in_order(ring):
    writer, reader = ring
    rng = random.Random(3)
    written, read = [], []
    for number in range(500):
        if writer.may_write() and rng.random() < 0.6:
            piece = torch.tensor([rng.randrange(256) for _ in range(rng.randrange(1, _CELL))], dtype=torch.uint8)
            writer.write(number, 1000 + number, piece.data_ptr(), len(piece))
            written.append((number, piece.tolist()))
        elif reader.may_read():
            tag, total = reader.header()
            assert total == 1000 + tag
            target = torch.zeros(len(written[len(read)][1]), dtype=torch.uint8)
            reader.read(target.data_ptr(), len(target))
            read.append((tag, target.tolist()))
    assert len(read) > 100
    assert read == written[: len(read)]


def test_a_full_ring_holds_its_writer_back_and_asks_to_wake_it_every_half_ring(ring):
    writer, reader = ring
    assert not reader.may_read()
    for number in range(NUM_CELLS):
        assert writer.may_write()
        writer.write(number, 0, 0, 0)
    assert not writer.may_write()
    wakes = []
    for number in range(NUM_CELLS):
        assert reader.may_read() and reader.header() == (number, 0)
        wakes.append(reader.read(0, 0))
        assert writer.may_write()
    assert [i for i, wake in enumerate(wakes, 1) if wake] == [NUM_CELLS // 2, NUM_CELLS]
    assert not reader.may_read()
