"""The launcher's own streams: prefixes of lines, and writing that never waits for a reader."""

from __future__ import annotations

import os
import random

import pytest

from unisono.launch.output.streams import Prefixes, Sink


@pytest.fixture
def pipe():
    read, write = os.pipe()
    ends = {read, write}
    yield read, write, ends
    for end in ends:
        os.close(end)


def test_a_prefix_has_the_colour_of_its_rank():
    prefixes = Prefixes(colour=True)
    assert prefixes.of({1}) == b"\x1b[33m[1]\x1b[0m " and prefixes.of({7}) == b"\x1b[33m[7]\x1b[0m "
    assert prefixes.of({0, 1, 3}) == b"\x1b[1m[0-1,3]\x1b[0m "


def test_a_sink_keeps_what_the_reader_does_not_take(pipe):
    read, write, _ = pipe
    sink = Sink(write, high_water=1 << 16)
    random.seed(0)
    sent = b"".join(b"%d\n" % random.getrandbits(200) for _ in range(5000))
    sink.write(sent)
    assert sink.waiting and sink.full and not sink.broken
    received = b""
    while len(received) < len(sent):
        received += os.read(read, 1 << 20)
        sink.pump()
    assert received == sent and not sink.waiting and not sink.full


def test_a_sink_writes_whole_lines_where_it_can(pipe):
    read, write, _ = pipe
    sink = Sink(write)
    while not sink.waiting:
        sink.write(b"x" * 999 + b"\n")
    assert os.read(read, 1 << 20).endswith(b"x\n")


def test_a_sink_without_a_reader_drops_what_is_written(pipe):
    read, write, ends = pipe
    os.close(read)
    ends.remove(read)
    sink = Sink(write)
    sink.write(b"nobody reads this\n")
    assert sink.broken and not sink.waiting
    sink.flush()
