"""`unisono.parallel.cut` in loops of one's own: losses, norms, results and weights of one rank, to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import unisono

PROGRAM = Path(__file__).parent / "programs" / "cut_own_loop.py"
STARTS = {"mlp": "5,9,16", "residual": "blocks.1,blocks.3,head", "language_model": "layers.1,layers.2,norm"}


WAYS = [(4, "", "zero-bubble"), (2, "", "interleaved"), (2, "n2", "gpipe")]
"""Ranks, stages ("" for those above), and a schedule."""


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("residual", WAYS[:1]),
        ("language_model", WAYS[1:2]),
        ("mlp", WAYS[2:]),
        *(pytest.param(name, WAYS, marks=pytest.mark.soak) for name in STARTS),
    ],
)
def test_any_number_of_ranks_has_the_bits_of_one(fork_ranks, fork_python, name, ways):
    losses, results, sha = json.loads(fork_python(PROGRAM, name, STARTS[name], "1f1b")[-1])
    for ranks, stages, schedule in ways:
        job = fork_ranks(ranks, PROGRAM, name, stages or STARTS[name], schedule)
        told = [json.loads(job.lines(rank)[-1]) for rank in range(ranks)]
        assert [each[0] for each in told] == [losses] * ranks
        assert [each[1] for each in told] == [None] * (ranks - 1) + [results]
        assert [each[2] for each in told] == [sha] * ranks


def test_messages_of_any_size_have_the_bits_of_one_rank(fork_ranks):
    script = """
import torch, unisono
from torch import nn
from unisono.state.digest import digest
torch.set_num_threads(1)
unisono.init()
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
stages = unisono.parallel.cut(model, unisono.parallel.Pipeline(stages=["1", "3"][: max(unisono.world_size() - 1, 1)]))
# 25 KB, 0.5 MB and a little more, which are received ahead, and 4 MB, which no ring has room for; in turn.
inputs = [torch.randn(rows, 64) for rows in (100, 2048, 16384, 100, 16384, 2048, 100, 100)]
losses = stages.backward(lambda model, x: model(x).square().mean(), inputs, seed=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.step()
stages.gather()
print(digest(model.state_dict()), losses)
"""
    alone = fork_ranks(1, script).lines(0)
    for ranks in (2, 3):
        job = fork_ranks(ranks, script)
        assert [job.lines(rank) for rank in range(ranks)] == [alone] * ranks


def test_bad_input_is_refused():
    model, pipeline = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), unisono.parallel.Pipeline(stages=["1"])
    with pytest.raises(
        TypeError, match=r"takes an nn.Module and a unisono.parallel.Pipeline, and got Sequential and list"
    ):
        unisono.parallel.cut(model, ["1"])
    with pytest.raises(ValueError, match=r"'2', which is not a submodule of the model"):
        unisono.parallel.cut(model, unisono.parallel.Pipeline(stages=["2"]))
    with pytest.raises(ValueError, match=r"'0.weight' is on the meta device, without values"):
        unisono.parallel.cut(nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2)), pipeline)
    stages = unisono.parallel.cut(model, pipeline)
    with pytest.raises(TypeError, match=r"returned a tensor of shape \[3, 2\]: return the loss of the micro-batch"):
        stages.backward(lambda model, x: model(x), [torch.randn(3, 2)], seed=0)
    with pytest.raises(TypeError, match=r"which cannot be called: give a function of the model and a micro-batch"):
        stages.forward(None, [])


def test_ranks_with_other_micro_batches_are_refused(fork_ranks):
    script = """
import torch, unisono
from torch import nn
model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
stages = unisono.parallel.cut(model, unisono.parallel.Pipeline(stages=["1"]))
rank = torch.distributed.get_rank()
for micro_batches in ([torch.zeros(2, 2)] * (4 - rank), [torch.zeros(2, 2), torch.zeros(2 + rank, 2)]):
    for call in (lambda: stages.backward(lambda m, x: m(x).sum(), micro_batches, seed=0),
                 lambda: stages.forward(lambda m, x: m(x), micro_batches)):
        try:
            call()
        except unisono.errors.RankMismatchError as error:
            print(error)
"""
    job = fork_ranks(2, script)
    counts = (
        "rank 1 was given 3 micro-batches, and rank 0 4: give all ranks the same ones, also those without the first"
    )
    shapes = (
        "the tensors of micro-batch 1 are float32[3, 2] on rank 1, and float32[2, 2] on rank 0: give all ranks the same"
    )
    for rank in range(2):
        told = job.lines(rank)
        assert len(told) == 4
        assert all(line.startswith(start) for line, start in zip(told, [counts, counts, shapes, shapes], strict=True))


def test_more_ranks_than_stages_are_refused(fork_ranks):
    script = """
import torch, unisono
from torch import nn
try:
    unisono.parallel.cut(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), unisono.parallel.Pipeline(stages=["1"]))
except ValueError as error:
    print(error)
"""
    assert "4 ranks would make 2 replicas of the model, and cut() makes one: start 2 ranks" in fork_ranks(4, script).out
