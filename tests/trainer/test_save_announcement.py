"""Ranks that must know when a checkpoint is due, since each has a part of the state, learn it in the step before."""

from __future__ import annotations

import pytest

PROGRAM = """
import json, sys
import torch, torch.distributed as dist, torch.nn.functional as F
import unisono
from unisono.parallel import Pipeline, Shard
how, folder, settings = sys.argv[1:]
broadcasts, plain = [0], dist.broadcast
def counted(*arguments, **options):
    broadcasts[0] += 1
    return plain(*arguments, **options)
dist.broadcast = counted
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(6, 33), torch.nn.Tanh(), torch.nn.Linear(33, 3))
data = torch.utils.data.TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))
options = {
    "shard": {"parallel": Shard()}, "zero1": {"parallel": Shard(zero=1)},
    "stages": {"parallel": Pipeline(stages=2)}, "workers": {"sync": unisono.LocalSGD(every=2)},
}[how]
trainer = unisono.Trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=4, seed=5, progress=False, directory=folder,
    checkpoints=unisono.Checkpoints(**json.loads(settings)), **options,
)
seen = []
for epoch in trainer.epochs(2):
    for batch in trainer.batches(data, batch_size=8):
        before = broadcasts[0]
        seen[-1:] = [before - each for each in seen[-1:]]
        trainer.step(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"), batch)
        seen.append(broadcasts[0])
print(json.dumps(seen[:-1]))
"""


@pytest.fixture
def run(fork_ranks, tmp_path):
    """Run the program on two ranks; return the broadcasts after each step, and the steps of the checkpoints."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(how, settings):
        job = fork_ranks(2, tmp_path / "program.py", how, tmp_path / "run", settings)
        assert job.lines(0) == job.lines(1)
        steps = sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "run").glob("checkpoints/step-*"))
        return eval(job.lines(0)[0]), steps

    return run


@pytest.mark.parametrize("how", ["shard", "zero1", "stages", "workers"])
def test_a_directory_costs_no_exchange_between_two_steps(run, how):
    """Epochs have six steps: after the sixth comes the end of one."""
    broadcasts, steps = run(how, '{"every_steps": 4, "every_minutes": null, "every_epoch": false, "keep": 9}')
    assert steps == [4, 8, 12]
    quiet = [broadcasts[step - 1] for step in (1, 2, 3, 5, 7, 9, 10, 11)]
    assert quiet == [0] * 8


@pytest.mark.parametrize("how", ["shard", "stages", "workers"])
def test_a_checkpoint_that_is_due_by_time_comes_after_the_next_step(run, how):
    assert run(how, '{"every_minutes": 1e-9, "every_epoch": false, "keep": 20}')[1] == [*range(1, 13)]
