"""Embedding tables whose rows are divided over ranks, in a loop of one's own."""

from itertools import product
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
PROGRAM, MISTAKES = PROGRAMS / "divided_loop.py", PROGRAMS / "mistaken_loops.py"
RANDOM = PROGRAMS / "random_table_loops.py"


def run(fork_ranks, n, *args, **options):
    """What the first rank prints: the rows with their state, what was exported, the dense part, and an evaluation."""
    lines = [line.removeprefix("[0] ") for line in fork_ranks(n, PROGRAM, *args, **options).lines()]
    return [line for line in lines if line.startswith(("rows ", "dense "))]


ENGINES = "shared", "collective"
LARGE = [pytest.param(kind, 4, marks=pytest.mark.soak) for kind in ("fixed", "dynamic")]


@pytest.mark.parametrize(("kind", "n"), [("fixed", 3), ("dynamic", 3), ("ddp", 2), *LARGE])
def test_divided_rows_have_the_bits_of_one_copy(fork_ranks, tmp_path, kind, n):
    found = [run(fork_ranks, n, engine, kind, 6, "-", tmp_path / engine) for engine in ENGINES]
    assert len(found[0]) == 2 and found[0] == found[1]
    # A run that goes on has them, too, in memory or in files.
    run(fork_ranks, n, "collective", kind, 3, "-", tmp_path / "half")
    (tmp_path / "disk").mkdir()
    for engine, variables in product(ENGINES, ({}, {"FILES": str(tmp_path / "disk")})):
        then = tmp_path / f"then-{engine}-{len(variables)}"
        assert run(fork_ranks, n, engine, kind, 3, tmp_path / "half", then, variables=variables) == found[0]
    assert not any((tmp_path / "disk").iterdir())


@pytest.mark.parametrize("kind", ["fixed", "dynamic"])
def test_any_number_of_ranks_and_servers_load_the_parts(fork_ranks, run_ranks, fork_python, tmp_path, kind):
    expected = run(fork_ranks, 3, "collective", kind, 4, "-", tmp_path / "3")
    assert run(fork_ranks, 2, "collective", kind, 0, tmp_path / "3", tmp_path / "2") == expected
    alone = fork_python(PROGRAM, "auto", kind, 0, tmp_path / "2", tmp_path / "1")
    assert alone[-2:] == expected
    of_servers = [
        run_ranks(2, PROGRAM, "auto", kind, 2, tmp_path / "1", tmp_path / "served", flags=flags).lines(0)[-2:]
        for flags in ([], ["--servers", "2"])
    ]
    assert of_servers[0] == of_servers[1] != expected


@pytest.mark.parametrize("seed", [1, 6, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(100, 130))])
def test_random_loops_have_the_bits_of_one_copy(fork_ranks, tmp_path, seed):
    """Also those that go on from a state, in the other form or in files."""
    n, engine = 2 + seed % 3, ENGINES[seed % 2]
    (tmp_path / "disk").mkdir()
    files = [tmp_path / "disk"] if seed % 3 else []
    jobs = [
        fork_ranks(n, RANDOM, seed, "shared", 0, 8, "-", tmp_path / "one"),
        fork_ranks(n, RANDOM, seed, "collective", 0, 8, "-", tmp_path / "divided"),
        fork_ranks(n, RANDOM, seed, "collective", 0, 4, "-", tmp_path / "half", *files),
        fork_ranks(n, RANDOM, seed, engine, 4, 8, tmp_path / "half", tmp_path / "then", *files),
    ]
    one, divided, half, then = (job.lines(0)[-1].removeprefix("[0] ") for job in jobs)
    assert one.startswith("state sha256: ") and one == divided == then != half


def test_mistakes_are_told(fork_ranks):
    """Those that end a rank's call, in one job: see the program."""
    job = fork_ranks(2, MISTAKES, "told")
    told = "\n".join(line.removeprefix("[0] ") for line in job.lines(0))
    for expected in (
        "TypeError: parts is a dict, as of one rank: give load_state_dict a list",
        "CheckpointError: there are no parts",
        "CheckpointError: the state is that of 2 ranks, and the parts of rank 1 are missing",
        "CheckpointError: the part of rank 0 is there twice",
        "CheckpointError: an int among the parts is not one of tables",
        "UnisonoError: load_state_dict of the shared tables failed",
        "CheckpointError: the parts have table 'item' with shape [50000, 8], and the loop one with [60000, 8]",
        "CheckpointError: the parts have the tables ['item'], and the loop ['user']",
        "UnisonoError: table 'item' is divided over ranks already, by a Trainer or by share_tables",
        "of the rows that are looked up have not come, as shared.fetch has not got their ids",
        "ValueError: what fetch gets has ids of table 'items', which there is none: did you mean 'item'?",
        "UnisonoError: table 'item' is divided over ranks, so no state_dict has its rows",
        "ValueError: Tables.step updates the rows of this process, and these tables are divided over ranks",
        "RankMismatchError: ranks differ: lr of parameter group 0 is 0.1 on rank 0 and 0.5 on rank 1",
        "RankMismatchError: ranks call different things: shared.step() on rank 0, shared.evaluation() on rank 1",
        "TableFullError: table 'user' is full: 75 of its 100 rows are taken",
        "RankMismatchError: share_tables was given different things on different ranks: rows of table 'item' is 50000",
        "RankMismatchError: the rows of table 'item' that were written before share_tables are not the same on rank 1",
        "ValueError: table 'item' has copies=2, from which a Trainer replaces a rank that dies",
        'ValueError: engine="collective" divides the rows over ranks: make the tables with divided=True',
        "ValueError: engine='gpu' must be one of",
        "ValueError: table 'item' is on meta, and ranks keep shared rows in memory of the CPU",
    ):
        assert expected in told, f"{expected}\n{told}"
    assert told.endswith("done")


def test_a_rank_that_raises_in_an_evaluation_answers_the_others(fork_ranks):
    job = fork_ranks(2, MISTAKES, "raises", code=None, watched=False)
    assert job.codes == [0, 1] and "ValueError: of rank 1 alone" in job.err and "all 2 lookups" in job.out


ENDS = """
import time
import torch, torch.distributed as dist
import unisono
from unisono.embedding import SGD, Table, Tables
from unisono.parallel import share_tables

dist.init_process_group("gloo")
tables = Tables({"words": Table(rows=50, dim=2, init_std=0.1, optimizer=SGD(lr=0.1))}, divided=True)
shared = share_tables(tables, engine="collective")
tables.optimizer.register_step_post_hook(lambda *_: time.sleep(unisono.rank() > 0))
tables["words"](torch.arange(20)).sum().backward()
shared.step()
print("through")
"""


def test_a_rank_may_end_before_others_have_left_the_last_step(fork_ranks, tmp_path):
    (program := tmp_path / "ends.py").write_text(ENDS)
    job = fork_ranks(3, program)
    assert all(job.lines(rank)[-1] == "through" for rank in range(3))
