"""Checkpoints of a model that is cut over ranks: each writes what its stages have, and any number of ranks reads it."""

from __future__ import annotations

import pytest

from tests.checkpoint_writers import writers

PROGRAM = """
import json, sys
import torch, torch.nn.functional as F
import unisono
from unisono.parallel import Pipeline
folder, parallel, optimizers, steps = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
torch.manual_seed(3)
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(32, 32), torch.nn.BatchNorm1d(32)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
    def forward(self, x):
        if self.training:
            self.calls += 1
        return torch.tanh(self.norm(self.linear(x))) + x
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.head = torch.nn.Linear(6, 32), torch.nn.Linear(32, 6), torch.nn.Linear(32, 32)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))
        self.head.weight = self.blocks[0].linear.weight
        self.columns = torch.nn.Parameter(torch.randn(6, 32).t())  # not contiguous
        self.unused = torch.nn.Parameter(torch.randn(5))
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.head(x)) + x @ self.columns
model = Model()
parameters = list(model.parameters())
optimizer = {
    "one": lambda: torch.optim.AdamW(parameters, lr=0.01),
    "two": lambda: {
        "a": torch.optim.AdamW(parameters[:6], lr=0.01), "b": torch.optim.SGD(parameters[6:], lr=0.01, momentum=0.9),
    },
}[optimizers]()
data = torch.utils.data.TensorDataset(torch.randn(48, 6), torch.randint(0, 6, (48,)))
trainer = unisono.Trainer(
    model, optimizer, virtual_ranks=4, seed=5, progress=False, directory=folder, ema_decay=0.9,
    checkpoints=unisono.Checkpoints(every_steps=1, every_minutes=None, keep=50),
    **({"parallel": eval(parallel)} if parallel else {}),
)
print("after", trainer.steps_done)
for epoch in trainer.epochs(2, max_steps=steps):
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"), batch)
        if trainer.steps_done == 3:
            trainer.save(tag="third")
        if trainer.steps_done == 6:
            trainer.save()
            trainer.save()
print(trainer.digest())
"""
GROUPS = ("model", "ema", "optimizer")


@pytest.fixture
def run(fork_ranks, tmp_path):
    """Run the program on ranks without shared memory; return what each of them prints: where it began, and a digest."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(ranks, folder, parallel="", optimizers="one", steps=8):
        job = fork_ranks(ranks, tmp_path / "program.py", tmp_path / folder, parallel, optimizers, steps)
        assert len({tuple(job.lines(rank)) for rank in range(ranks)}) == 1
        return job.lines(0)

    return run


@pytest.mark.parametrize(
    ("ranks", "parallel", "optimizers"),
    [
        (2, "Pipeline(stages=2)", "two"),
        (4, "Pipeline(stages=2, replicas=2)", "one"),
        (4, "Pipeline(stages=2, replicas=2, zero=1)", "two"),
        (4, "Pipeline(stages=4, replicas=2, zero=3)", "two"),
        (2, "Pipeline(stages=4, schedule='interleaved')", "one"),
        pytest.param(3, "Pipeline(stages=3)", "one", marks=pytest.mark.soak),
        pytest.param(4, "Pipeline(stages=4)", "two", marks=pytest.mark.soak),
    ],
)
def test_ranks_write_the_files_that_one_process_would_write(run, tmp_path, ranks, parallel, optimizers):
    assert run(1, "one", optimizers=optimizers) == run(ranks, "run", parallel, optimizers)
    found = sorted((tmp_path / "one").glob("checkpoints/*"))
    assert [path.name for path in found] == [*(f"step-{step:09}" for step in range(1, 9)), "tag-third"]
    for path in found:
        checkpoint = tmp_path / "run" / "checkpoints" / path.name
        for group in GROUPS:
            name = f"{group}.safetensors"
            assert (checkpoint / name).read_bytes() == (path / name).read_bytes(), f"{path.name}/{name}"
        found_writers = writers(checkpoint)
        assert [found_writers[group] for group in GROUPS] == [{*range(ranks)}] * len(GROUPS)
    assert sorted(each.name for each in (tmp_path / "run" / "checkpoints").iterdir()) == [each.name for each in found]


def test_any_number_of_ranks_goes_on_from_the_parts_of_stages(run):
    (_, sha) = run(1, "one")
    assert run(2, "run", "Pipeline(stages=2)", steps=3)[0] == "after 0"
    assert run(3, "run", "Pipeline(stages=3)", steps=5)[0] == "after 3"
    assert run(1, "run", steps=6)[0] == "after 5"
    assert run(4, "run", "Pipeline(stages=2, replicas=2)") == ["after 6", sha]


READER = """
import sys
import torch
import unisono
from unisono.parallel import Pipeline
folder, parallel, steps, saves = sys.argv[1], sys.argv[2], int(sys.argv[3]), "saves" in sys.argv
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(16, 64))
loss = lambda model, batch: model(batch[0]).square().mean(1)
trainer = unisono.Trainer(
    model, optimizer, virtual_ranks=4, progress=False, directory=folder, ema_decay=0.5,
    checkpoints=unisono.Checkpoints(every_steps=2, every_minutes=None), parallel=eval(parallel),
)
tensors = [*model.parameters(), *(each for state in optimizer.state.values() for each in state.values())]
kept = sum(each.untyped_storage().nbytes() for each in tensors)
if saves:
    trainer.save()
    trainer.export(folder + "/exported.safetensors")
found = [trainer.evaluate(loss, data, batch_size=8, ema=ema) for ema in (False, True)] if trainer.steps_done else []
for _ in trainer.epochs(9, max_steps=steps):
    for batch in trainer.batches(data, batch_size=8):
        found.append(float(trainer.step(loss, batch)))
print(kept, found, trainer.digest())
"""


@pytest.mark.parametrize(
    ("ranks", "parallel", "part"),
    [
        (2, "Pipeline(stages=['4'])", 1 / 2),
        (2, "Pipeline(stages=2)", 0.9),
        pytest.param(4, "Pipeline(stages=['4'], zero=1)", 1 / 2 / 3, marks=pytest.mark.soak),  # the weights alone
        (4, "Pipeline(stages=['2', '4', '6'], replicas=2, zero=3)", 0),
    ],
)
def test_each_rank_reads_what_its_stages_have_if_these_are_the_same(fork_ranks, tmp_path, ranks, parallel, part):
    (tmp_path / "program.py").write_text(READER)

    def run(ranks, parallel, steps, *options):
        job = fork_ranks(ranks, tmp_path / "program.py", tmp_path / "run", parallel, steps, *options)
        lines = [job.lines(rank)[0].split(" ", 1) for rank in range(ranks)]
        return [int(kept) for kept, _ in lines], {rest for _, rest in lines}

    whole = 3 * 4 * 8 * (64 + 1) * 64
    run(ranks, parallel, 2)
    kept, found = run(ranks, parallel, 4, "saves")
    assert all(each < part * whole + 0.03 * whole for each in kept)
    (tmp_path / "run").rename(tmp_path / "other")
    run(1, "None", 2)
    kept, expected = run(1, "None", 4, "saves")
    assert kept[0] >= whole
    assert found == expected
    exported = [(tmp_path / folder / "exported.safetensors").read_bytes() for folder in ("run", "other")]
    assert exported[0] == exported[1]


def test_with_other_stages_each_rank_reads_all(fork_ranks, tmp_path):
    (tmp_path / "program.py").write_text(READER)
    digests = {}
    for ranks, parallel, steps in [(2, "Pipeline(stages=['4'])", 2), (2, "Pipeline(stages=['3'])", 4), (1, "None", 6)]:
        job = fork_ranks(ranks, tmp_path / "program.py", tmp_path / "run", parallel, steps)
        digests[steps] = {job.lines(rank)[0].split()[-1] for rank in range(ranks)}
    job = fork_ranks(1, tmp_path / "program.py", tmp_path / "alone", "None", 6)
    assert digests[6] == {job.lines(0)[0].split()[-1]}
