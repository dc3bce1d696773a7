"""A module on another rank does what the same module does on this one, and mistakes are told to all."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize(("ranks", "owner"), [(1, 0), (3, 1), pytest.param(2, 0, marks=pytest.mark.soak)])
def test_a_remote_module_has_the_bits_of_a_local_one(fork_ranks, ranks, owner):
    done = fork_ranks(ranks, PROGRAMS / "remote_bits.py", owner)
    assert [done.lines(rank) for rank in range(ranks)] == [["same"]] * ranks


EVAL = """
import torch
import unisono

unisono.init()
torch.manual_seed(0)
module = unisono.parallel.remote(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).eval(), on=1)
x = torch.ones(2, 4)
print(module.training, torch.equal(module(x), module(x)))
"""


def test_a_module_in_eval_mode_is_in_eval_mode_on_all_ranks(fork_ranks):
    done = fork_ranks(2, EVAL)
    assert [done.lines(rank) for rank in range(2)] == [["False True"]] * 2


TOLD = {
    "module fails": (
        "KeyError: 'too large'",
        "PeerError: remote Net on rank 1 failed for the input of rank 2, with KeyError: 'too large'",
    ),
    "backward fails": (
        "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation",
        "PeerError: remote Net on rank 1 failed in backward for the outputs of rank 0, with RuntimeError: one of the",
    ),
    "a collective": (
        "GroupError: the module of remote Net on rank 1 called a collective. It runs on its owner alone",
        "PeerError: remote Net on rank 1 failed for the input of rank 0, with GroupError: the module",
    ),
    "no tensor for one": (
        "TypeError: outputs for rank 2 have no floating-point tensor, and those for other ranks require a gradient",
        "PeerError: remote Net on rank 1 failed after its passes, with TypeError: outputs for rank 2",
    ),
    "function fails": ("RuntimeError: no weights here", "PeerError: remote was not done, for it failed on rank 1"),
    "no module": (
        "TypeError: the function for remote() has returned an int: give a torch.nn.Module, or a function",
        "PeerError: remote was not done, for it failed on rank 1",
    ),
    "within itself": ("ValueError: '0' is a remote module itself", "PeerError: remote was not done"),
}
"""What the owner raises, and what the others do."""

TOLD_TO_ALL = {
    "other mode": "RankMismatchError: ranks are in different calls: remote Net on rank 1: call 2, train mode, with "
    "gradients on ranks 0-1; remote Net on rank 1: call 2, eval mode, with gradients on rank 2. Call remote",
    "other grad mode": "RankMismatchError: ranks are in different calls: remote Net on rank 1: call 2, train mode, "
    "with gradients on ranks 0-1; remote Net on rank 1: call 2, train mode, without gradients on rank 2.",
    "other module": "RankMismatchError: ranks are in different calls: ",
    "no such rank": "ValueError: on=3 is not in the group: it has ranks 0-2",
    "other rank": "RankMismatchError: remote() got other arguments on some ranks: on=0, average=True, name=None on "
    "rank 0, on=1,",
    "closure": "TypeError: LBFGS evaluates the loss within its step, on the owner alone",
    "no optimizer": "TypeError: optimizer() got SGD (",
    "trainer": "ValueError: '0' is on rank 1, by unisono.parallel.remote, and all ranks must call it together, "
    "which a Trainer does not: give it the whole model and parallel=unisono.parallel.Pipeline(...)",
    "cut": "ValueError: '0' is on rank 1, by unisono.parallel.remote, and all ranks must call it together, which cut()",
    "sums and means": "ValueError: model.0 is a remote module with average=True, and replicate() has average=False",
}


def test_mistakes_are_told_to_all_ranks_and_calls_work_afterwards(fork_ranks):
    done = fork_ranks(3, PROGRAMS / "remote_errors.py")
    said = []
    for rank in range(3):
        pairs = (line.split(" | ", 1) for line in done.lines(rank))
        said.append({name: ast.literal_eval(text) for name, text in pairs})
    for name, (owners, others) in TOLD.items():
        assert said[1][name].startswith(owners), (name, said[1][name])
        for rank in (0, 2):
            assert said[rank][name].startswith(others), (name, rank, said[rank][name])
    for name, text in TOLD_TO_ALL.items():
        for rank in range(3):
            assert said[rank][name].startswith(text), (name, rank, said[rank][name])
    assert "remote_errors.py" in said[0]["module fails"]  # the owner's traceback
    assert said[0]["module fails"].endswith("KeyError: 'too large'")
    assert said[2]["cannot be sent"].startswith("TypeError: args[0] is of type lock, which cannot be pickled")
    assert said[0]["cannot be sent"].startswith("PeerError: remote Net on rank 1 was not done, for it failed on rank 2")
    (warning,) = said[1]["afterwards"]
    assert warning.startswith("remote Net on rank 1 gets gradients, and nothing is there to apply them")
    assert said[0]["afterwards"] == said[2]["afterwards"] == []


_FAILS = """
import torch, unisono
from torch import nn

class Net(nn.Module):
    def forward(self, x):
        raise ValueError(f"{len(x)} rows")

unisono.init()
unisono.parallel.remote(Net, on=1)(torch.ones(2 + unisono.rank()))
"""


def test_the_owner_is_named_when_its_module_fails(run_ranks, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(_FAILS)
    done = run_ranks(2, script, code=1)
    assert "rank 1 failed: ValueError: 2 rows" in done.said
    assert "rank 0 only heard of the failure of rank 1" in done.said
