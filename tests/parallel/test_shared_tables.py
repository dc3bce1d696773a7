"""Embedding tables that ranks share in a loop of one's own."""

from pathlib import Path

import pytest
import torch

from unisono.parallel import share_tables

PROGRAM = Path(__file__).parent / "programs" / "shared_tables.py"


def test_ranks_and_servers_train_tables_as_one_process_does(fork_ranks, run_ranks, fork_python):
    alone = fork_python(PROGRAM)[-1].split()
    ranks = fork_ranks(2, PROGRAM)
    served = run_ranks(2, PROGRAM, flags=["--servers", "1"])
    assert served.sha() == ranks.sha() and served.lines(0) == served.lines(1)
    assert [job.lines()[-1].split()[3] for job in (ranks, served)] == ["False", "True"]
    sums = [float(number) for number in ranks.lines()[-1].split()[4:]]
    assert sums == pytest.approx([float(number) for number in alone[4:]], rel=1e-4)
    assert alone[2] != ranks.sha()  # not to the bit: each rank has a mean of its own samples


def test_what_is_no_tables_is_refused():
    with pytest.raises(TypeError, match="tables is a Linear; give the object that"):
        share_tables(torch.nn.Linear(2, 2))


def test_a_table_in_a_file_has_the_rows_of_one_in_memory(run_ranks, tmp_path):
    program = PROGRAM.with_name("shared_table_files.py")
    sums = {run_ranks(2, program, where).out.split()[-1] for where in ("-", tmp_path)}
    with_server = run_ranks(2, program, tmp_path, flags=["--servers", "1"])
    assert sums == {with_server.out.split()[-1]} and not any(tmp_path.iterdir())
