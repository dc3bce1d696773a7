"""The output of several launchers on one terminal."""

import io

import pytest

from unisono.launch.ray.merged_output import MergedOutput


@pytest.fixture
def merged():
    return MergedOutput(io.StringIO(), io.StringIO())


def shown(merged):
    return [stream.getvalue() for stream in merged._streams]


def test_lines_stay_whole(merged):
    merged.write("a", 0, "[0] begun ", now_s=1)
    merged.write("b", 0, "[1] between\n[1] more", now_s=1)
    merged.write("a", 0, "and ended\n", now_s=1)
    assert shown(merged) == ["[1] between\n[0] begun and ended\n", ""]
    merged.end("b")
    assert shown(merged)[0].endswith("[1] more\n")


def test_what_all_launchers_say_is_shown_once(merged):
    line = "unisono: rank 1 was killed by SIGKILL; replaced, 0.31 s\n"
    for launcher in "abc":
        merged.write(launcher, 1, line, now_s=1)
    assert shown(merged) == ["", line]
    merged.write("b", 1, line, now_s=2)  # it happened again
    merged.write("a", 1, line, now_s=2)
    assert shown(merged) == ["", 2 * line]


def test_the_same_line_much_later_is_news(merged):
    merged.write("a", 1, "unisono: saved\n", now_s=1)
    merged.write("b", 1, "unisono: saved\n", now_s=100)
    assert shown(merged) == ["", "unisono: saved\nunisono: saved\n"]


def test_what_ranks_print_is_never_left_out(merged):
    for launcher in "ab":
        merged.write(launcher, 0, "done\n", now_s=1)
    assert shown(merged) == ["done\ndone\n", ""]
