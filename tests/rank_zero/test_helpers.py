"""What one rank does for all: printing, logging, going first, progress; and seeds that are right for ranks."""

from __future__ import annotations

import io
import logging
import random
import re
import time
from pathlib import Path

import numpy
import pytest
import torch

import unisono

PROGRAM = Path(__file__).parent / "programs" / "helpers.py"


def test_the_helpers_on_four_ranks_of_two_nodes(run_ranks, tmp_path):
    job = run_ranks(4, PROGRAM, tmp_path, flags=["--cpu-backend", "gloo"])
    lines = {rank: job.lines(rank) for rank in range(4)}
    assert all(lines[rank][-1] == "ok" for rank in range(4))

    assert "once=0" in lines[0]
    assert [rank for rank in range(4) if any(line.startswith("once") for line in lines[rank])] == [0]
    assert [rank for rank in range(4) if f"per node {rank}" in lines[rank]] == [0, 2]

    said = re.findall(r"\[rank (\d)/4\] (\w+) (\w): (.*)", job.err)
    assert sorted(said) == sorted(
        [("0", "INFO", "a", "quiet from 0")]
        + [(f"{rank}", "WARNING", "a", f"loud from {rank}") for rank in range(4)]
        + [(f"{rank}", "DEBUG", "b", f"debug from {rank}") for rank in range(1, 4)]
    )

    drawn = [line.split()[1:] for rank in range(4) for line in lines[rank] if line.startswith("seeds")]
    assert len(drawn) == 4
    values = [value for of_rank in drawn for value in of_rank]
    assert len(values) == 4 * (3 + 2 * 4 * 3)
    assert len(set(values)) == len(values)  # of all ranks, workers, epochs and generators
    assert len({line for rank in range(4) for line in lines[rank] if line.startswith("common")}) == 1

    rows = {line.split("  ")[0]: line.split() for line in job.err.splitlines() if "/s" in line}
    assert rows["uneven"][1] == f"{5 + 6 + 7 + 8}/26"
    done, total = map(int, rows["early"][1].split("/"))
    assert 5 <= done < total == 20
    assert rows["files"][1:5] == ["40/40", "files", "loss", "0.2500"]
    assert rows["own"][1] == "2/2"
    assert len(re.findall(r"^(?:uneven|early|files|own) ", job.err, re.MULTILINE)) == 4  # once each


_ENDS_IN_ITS_TURN = """
import os, sys, time
from pathlib import Path
import unisono
from unisono.errors import PeerError

unisono.init("gloo")
other = Path(sys.argv[1])
if unisono.rank() == 1:
    other.touch()  # it has come out of init, where the end of rank 0 would be another error
try:
    with unisono.main_first():
        if unisono.rank() == 0:
            while not other.exists():
                time.sleep(0.01)
            os._exit(7)
except PeerError as error:
    print(error, flush=True)
    os._exit(0)
"""


def test_a_first_rank_that_ends_in_its_turn_is_not_waited_for(fork_ranks, tmp_path):
    (said,) = fork_ranks(2, _ENDS_IN_ITS_TURN, tmp_path / "other", code=7, watched=False).lines(1)
    assert said.startswith("rank 0 was not done with its block of main_first when rank 0's process ended")


def test_one_rank_needs_no_job(capsys):
    with unisono.main_first(), unisono.main_first(local=True):
        unisono.print0("alone", end="!")
    assert list(unisono.progress("abc", name="letters")) == ["a", "b", "c"]
    with pytest.raises(OSError, match="full"), unisono.main_first():
        raise OSError("full")
    out, err = capsys.readouterr()
    assert out == "alone!"
    assert re.match(r"letters   3/3 batches .*\n$", err)


def test_a_bar_tells_on_when_its_loop_is_left_or_fails(capsys):
    for letter in unisono.progress("abc", name="left"):
        if letter == "b":
            break
    with pytest.raises(ZeroDivisionError), unisono.progress(total=4, name="fails") as bar:
        bar.update(3)
        raise ZeroDivisionError
    bar.close()
    assert re.findall(r"(\w+) +(\d)/\d", capsys.readouterr().err) == [("left", "1"), ("fails", "3")]


def test_a_bar_without_a_length_or_with_one_given():
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(3))

    loader = torch.utils.data.DataLoader(Endless())
    assert len(list(unisono.progress(loader))) == 3
    assert len(list(unisono.progress(range(3), total=9))) == 3
    with pytest.raises(ValueError, match="says the total twice"):
        unisono.progress(3, total=4)
    with pytest.raises(TypeError, match="nothing to iterate over"):
        list(unisono.progress(3))


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda: unisono.progress(3.5), TypeError, r"progress\(3\.5\) has nothing to iterate over: give an iterable"),
        (lambda: unisono.progress(-3), ValueError, "total=-3 must be 0 or more"),
        (lambda: unisono.progress("abc", total="3"), TypeError, "total='3' must be a whole number"),
        (lambda: unisono.progress(True), TypeError, r"progress\(True\) has nothing to iterate over"),
        (lambda: unisono.progress(total=True), TypeError, "total=True must be a whole number"),
        (lambda: unisono.progress(4).update(-5), ValueError, "count=-5 must be 0 or more"),
        (
            lambda: unisono.main_first(timeout_s=True).__enter__(),
            ValueError,
            "timeout_s=True must be a positive number",
        ),
        (lambda: unisono.progress(4).update(1.5), TypeError, r"count=1\.5 must be a whole number"),
        (lambda: unisono.progress(4).show(loss="low"), TypeError, "loss='low' cannot be shown: give a number"),
        (lambda: unisono.progress(4).show(loss=torch.ones(2)), TypeError, "a tensor with one element"),
    ],
)
def test_a_bar_counts_whole_numbers_and_shows_numbers(use, error, message):
    with pytest.raises(error, match=message):
        use()


def test_a_bar_counts_whole_numbers_of_all_kinds(capsys):
    with unisono.progress(total=numpy.int64(5), name="kinds") as bar:
        bar.update(numpy.int32(2))
        bar.update(torch.tensor(3))
    assert "5/5" in capsys.readouterr().err
    with unisono.progress(numpy.int64(3)) as bar:
        bar.update(3)
    assert "3/3" in capsys.readouterr().err


def test_a_logger_writes_where_standard_error_is_now(monkeypatch):
    log = unisono.get_logger("test_now", level="debug")
    for _ in range(2):
        stream = io.StringIO()
        monkeypatch.setattr("sys.stderr", stream)
        log.debug("here")
        assert re.fullmatch(r"\S+ \S+ \[rank 0/1\] DEBUG test_now: here\n", stream.getvalue())
    assert unisono.get_logger("test_now", level=logging.ERROR) is log
    log.warning("not any more")
    assert "not any more" not in stream.getvalue()
    with pytest.raises(ValueError, match="level='loud'"):
        unisono.get_logger(level="loud")
    with pytest.raises(TypeError, match=r"level=3\.5"):
        unisono.get_logger(level=3.5)


def test_seeds_are_whole_numbers_and_the_same_again():
    with pytest.raises(TypeError, match=r"seed=1\.5"):
        unisono.seed_everything(1.5)
    drawn = []
    for _ in range(2):
        seeds = unisono.seed_everything(-3)
        drawn.append((torch.rand(2).tolist(), random.random(), torch.rand(1, generator=seeds.generator).item()))
    assert drawn[0] == drawn[1]
    unisono.seed_everything(5)
    first = random.random()
    unisono.seed_everything(numpy.int64(5))
    assert random.random() == first


def test_a_bar_costs_little_and_is_quiet_between_its_lines(capsys):
    started_s = time.monotonic()
    for _ in unisono.progress(range(100_000)):
        pass
    assert len(capsys.readouterr().err.splitlines()) <= 1 + (time.monotonic() - started_s) // 10
