"""What stays of lines that were drawn again and again, and what a terminal shows of them meanwhile."""

import math
import random

import pytest
from screen import Terminal, nested_bars

from unisono.launch.output.live import LiveArea, LiveLines, cut_to_width


def in_pieces(data, generator, longest):
    start = 0
    while start < len(data):
        size = generator.randint(1, longest)
        yield data[start : start + size]
        start += size


def test_lines_do_not_depend_on_the_pieces():
    text = b"one\n\ntwo \xff\xfe\r\n 1%\r 2%\r100%\n\x1b[31mred\x1b[0m\nlast"
    generator = random.Random(0)
    for _ in range(200):
        lines, found = LiveLines(), []
        for piece in in_pieces(text, generator, 9):
            found += lines.feed(piece, 0.0)
        assert found + lines.finish() == [b"one", b"", b"two \xff\xfe", b"100%", b"\x1b[31mred\x1b[0m", b"last"]
        assert lines.finish() == []


def test_nested_bars_leave_what_a_terminal_would_show():
    data = b"".join(nested_bars(3, 5))
    assert Terminal().write(data).text == ["loss 0", "loss 1", "loss 2", "epoch 3/3"]
    generator = random.Random(0)
    for _ in range(100):
        lines, found = LiveLines(), []
        for piece in in_pieces(data, generator, 40):
            found += lines.feed(piece, 0.0)
        assert found + lines.finish() == [b"loss 0", b"loss 1", b"loss 2", b"epoch 3/3"]


def test_a_bar_is_live_until_it_has_ended():
    lines = LiveLines(hold_s=0.1)
    assert lines.feed(b"start\n\r 10%", 1.0) == [b"start"]
    assert lines.live == [b" 10%"] and lines.deadline_s is None
    assert lines.feed(b"\r100%\n", 2.0) == []  # the cursor may come back, as it does for nested bars
    assert lines.live == [b"100%"]
    assert lines.deadline_s == pytest.approx(2.1)
    assert lines.settle(2.05) == []
    assert lines.settle(2.2) == [b"100%"]
    assert lines.live == [] and lines.deadline_s is None
    assert lines.feed(b"end\n", 2.3) == [b"end"]


def test_a_bar_that_was_wiped_out_leaves_nothing():
    lines = LiveLines()
    found = lines.feed(b"\r 10%\r    \r", 0.0)
    assert found + lines.finish() == []


def test_a_bar_that_never_ends_its_line_takes_no_memory():
    lines = LiveLines(limit=100)
    for percent in range(1000):
        assert lines.feed(b"\r%d%%" % percent, 0.0) == []
    assert lines.finish() == [b"999%"]


def test_a_line_without_end_is_given_in_parts():
    lines = LiveLines(limit=10)
    assert lines.feed(b"x" * 11, 0.0) == [b"x" * 11]
    assert lines.feed(b"y\n", 0.0) == [b"y"]


def test_a_block_that_is_drawn_for_ever_takes_no_memory():
    lines, found = LiveLines(), []
    for number in range(1000):
        found += lines.feed(b"\r%d\n" % number, 0.0)
    assert len(found) > 950
    assert found + lines.settle(math.inf) == [b"%d" % number for number in range(1000)]


def test_the_area_at_the_foot_comes_off_without_a_trace():
    generator = random.Random(0)
    terminal, area, printed = Terminal(), LiveArea(), []
    for number in range(300):
        terminal.write(area.erase())
        if generator.random() < 0.5:
            terminal.write(b"line %d\n" % number)
            printed.append(f"line {number}")
        rows = [b"bar %d" % number] * generator.randint(0, 4)
        terminal.write(area.draw(rows, columns=80))
        assert terminal.text == printed + [row.decode() for row in rows]
    terminal.write(area.erase())
    assert terminal.text == printed


def test_a_row_is_never_wider_than_the_terminal():
    assert cut_to_width(b"abcdef", 4) == b"abcd"
    assert cut_to_width("日本語".encode(), 5) == "日本".encode()
    assert cut_to_width("━━━━ 50%".encode(), 4) == "━━━━".encode()
    assert cut_to_width(b"a\x1b[2Jb\x07c\xff", 10) == "abc\ufffd".encode()
