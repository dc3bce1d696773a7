"""Workers that train on their own (sync=): DiLoCo and local SGD, with equal bits on any number of ranks."""

import copy

import pytest
import torch
import torch.nn.functional as F

import unisono
from unisono import DiLoCo, LocalSGD

TRAIN = """
import torch
import torch.nn.functional as F
import unisono
torch.manual_seed(3)
model = torch.nn.Sequential(
    torch.nn.Linear(6, 33), torch.nn.BatchNorm1d(33), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(33, 3)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(50, 6), torch.randint(0, 3, (50,)))
trainer = unisono.Trainer(
    model, optimizer, virtual_ranks=4, seed=5, clip_grad_norm=0.5, sync=unisono.{sync}, directory={directory}
)
for epoch in trainer.epochs(4, max_steps={steps}):
    for batch in trainer.batches(data, batch_size=12):
        last = trainer.step(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"), batch)
trainer.print("last:", last.loss, last.grad_norm)
trainer.print("weights sha256:", trainer.digest())
"""


def script(sync: str, *, directory: str | None = None, steps: int = 20) -> str:
    return TRAIN.format(sync=sync, directory=repr(directory), steps=steps)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def make(sync, **options):
    """A Trainer of a small model, and its data."""
    torch.manual_seed(3)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(32, 6), torch.randint(0, 3, (32,)))
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, seed=5, sync=sync, progress=False, **options)
    return trainer, model, data


@pytest.mark.parametrize(
    ("sync", "ranks"),
    [
        ("DiLoCo(every=3)", 3),
        ("DiLoCo(every=4, workers=2)", 2),
        pytest.param("DiLoCo(every=3)", 2, marks=pytest.mark.soak),
        pytest.param("DiLoCo(every=3)", 4, marks=pytest.mark.soak),
        pytest.param("LocalSGD(every=1)", 2, marks=pytest.mark.soak),
    ],
)
def test_the_number_of_ranks_changes_no_bit(fork_ranks, sync, ranks):
    one, several = (fork_ranks(n, script(sync)) for n in (1, ranks))
    assert several.sha() == one.sha()
    assert several.out.partition("last:")[2].split()[:2] == one.out.partition("last:")[2].split()[:2]


def test_a_run_resumes_within_a_round_on_another_number_of_ranks(fork_ranks, tmp_path):
    sync, folder = "DiLoCo(every=5)", str(tmp_path / "run")
    whole = fork_ranks(1, script(sync))
    fork_ranks(2, script(sync, directory=folder, steps=7))
    fork_ranks(1, script(sync, directory=folder, steps=11))
    resumed = fork_ranks(3, script(sync, directory=folder))
    assert resumed.sha() == whole.sha()


@pytest.mark.parametrize("sync", [DiLoCo(every=4, workers=2, outer_lr=0.6, outer_momentum=0.8), LocalSGD(every=4)])
def test_the_weights_are_those_of_the_algorithm_written_down(sync):
    trainer, model, data = make(sync)
    outer = copy.deepcopy(model)
    count = sync.workers or 4
    workers = [copy.deepcopy(model) for _ in range(count)]
    optimizers = [torch.optim.AdamW(worker.parameters(), lr=0.01) for worker in workers]
    momentum = [torch.zeros_like(p) for p in outer.parameters()]
    rate, decay = sync.rule
    steps = 0
    for _ in trainer.epochs(4):
        for batch in trainer.batches(data, batch_size=16):
            shares = []

            def recorded(model, share, shares=shares):
                shares.append(share)  # this process computes all virtual ranks, in order
                return loss(model, share)

            trainer.step(recorded, batch)
            for number, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
                each = 4 // count
                own = shares[number * each : number * each + each]
                optimizer.zero_grad()
                torch.cat([loss(worker, share) for share in own]).mean().backward()
                optimizer.step()
            steps += 1
            if steps % sync.every == 0:
                everyone = [list(worker.parameters()) for worker in workers]
                with torch.no_grad():
                    for i, p in enumerate(outer.parameters()):
                        change = torch.stack([p - parameters[i] for parameters in everyone]).mean(0)
                        momentum[i].mul_(decay).add_(change)
                        p.sub_(rate * (change + decay * momentum[i]))
                        for parameters in everyone:
                            parameters[i].copy_(p)
            for ours, theirs in zip(model.parameters(), outer.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs)
    assert steps == 8


def test_between_rounds_the_model_has_the_outer_weights_also_after_a_step_that_failed():
    trainer, model, data = make(DiLoCo(every=8))
    before = copy.deepcopy(model.state_dict())
    for _ in trainer.epochs(1):
        for number, batch in enumerate(trainer.batches(data, batch_size=8)):
            trainer.step(loss, batch)
            if number == 2:
                with pytest.raises(unisono.errors.NonFiniteLossError):
                    trainer.step(lambda model, batch: loss(model, batch) * float("nan"), batch)
            for name, value in model.state_dict().items():
                assert torch.equal(value, before[name])
            assert all(p.grad is None for p in model.parameters())


def test_weights_that_are_loaded_in_a_round_begin_a_new_one():
    trainer, model, data = make(LocalSGD(every=3))
    for _ in trainer.epochs(1):
        for number, batch in enumerate(trainer.batches(data, batch_size=8)):
            if number == 1:
                with torch.no_grad():
                    model.weight.fill_(100.0)
            trainer.step(loss, batch)
    # One step before and three after: AdamW moves a weight by about its learning rate in each.
    assert (model.weight - 100.0).abs().max() < 0.1
    assert not torch.equal(model.weight, torch.full_like(model.weight, 100.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sync": LocalSGD(every=2), "parallel": unisono.parallel.Shard()},
            "parallel cannot be together with 4 workers",
        ),
        ({"sync": DiLoCo(every=2), "ema_decay": 0.9}, "meet once in 2 steps, and it averages after each"),
        ({"sync": DiLoCo(every=2), "engine": "shared"}, 'engine="shared" cannot be together'),
        ({"sync": DiLoCo(every=2), "autocast": "fp16"}, 'autocast="bf16" needs none'),
        ({"sync": DiLoCo(every=2, workers=3)}, "workers=3 do not divide virtual_ranks=4"),
    ],
)
def test_what_cannot_be_together_is_refused_with_numbers(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_other_mistakes_are_refused():
    with pytest.raises(TypeError, match=r"sync=50 is an int; give unisono.DiLoCo"):
        make(50)
    with pytest.raises(ValueError, match="every=0"):
        DiLoCo(every=0)
    with pytest.raises(ValueError, match="outer_lr=0 must be positive"):
        DiLoCo(every=5, outer_lr=0)
    with pytest.raises(ValueError, match="outer_momentum=1"):
        DiLoCo(every=5, outer_momentum=1)
    model = torch.nn.Linear(6, 3)
    with pytest.raises(ValueError, match="cannot be together with LBFGS"):
        unisono.Trainer(model, torch.optim.LBFGS(model.parameters()), virtual_ranks=2, sync=DiLoCo(every=2))
    halves = {name: torch.optim.SGD([p], lr=0.1) for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match="this run has 2"):
        unisono.Trainer(model, halves, virtual_ranks=2, sync=DiLoCo(every=2))
    rows = torch.nn.Sequential(torch.nn.Embedding(7, 3, sparse=True))
    with pytest.raises(ValueError, match="'0' has 7 rows with sparse=True"):
        unisono.Trainer(rows, torch.optim.SGD(rows.parameters(), lr=0.1), virtual_ranks=2, sync=DiLoCo(every=2))
    trainer, model, data = make(DiLoCo(every=2))
    for _ in trainer.epochs(1):
        for batch in trainer.batches(data, batch_size=32):
            with pytest.raises(ValueError, match="on_gradients=…, which needs the gradient or the outputs of all"):
                trainer.step(loss, batch, on_gradients=lambda model: None)
            trainer.step(loss, batch)


def test_a_model_with_tables_is_refused():
    from unisono.embedding import RowwiseAdagrad, Table, Tables, dense_parameters

    tables = Tables({"item": Table(rows=50, dim=4, pooling="sum", optimizer=RowwiseAdagrad(lr=0.05))})
    model = torch.nn.Sequential(tables["item"], torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(dense_parameters(model), lr=0.1)
    with pytest.raises(ValueError, match=r"this run has 2, those of tables of unisono\.embedding included"):
        unisono.Trainer(model, optimizer, virtual_ranks=2, sync=DiLoCo(every=2))
