"""What people expect of a trainer: schedulers, clipping, averages, precision, GANs, fit, events."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import unisono
from unisono.watch import read_events

DROPPED = Path(__file__).parent / "programs" / "dropped.py"


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def make_data(n=40):
    return TensorDataset(torch.randn(n, 4, generator=torch.Generator().manual_seed(1)), torch.arange(n) % 3)


def per_sample(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def correct(model, batch):
    return model(batch[0]).argmax(1) == batch[1]


def make_trainer(model=None, optimizer=None, **options):
    model = model or make_model()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return unisono.Trainer(model, optimizer, **{"virtual_ranks": 4, "progress": False, **options})


def train(trainer, *, epochs=2, batch_size=8, loss=per_sample, data=None):
    for _ in trainer.epochs(epochs):
        for batch in trainer.batches(data or make_data(), batch_size=batch_size):
            trainer.step(loss, batch)
    return trainer


@pytest.mark.parametrize(("interval", "expected"), [("step", 0.1 * 0.5**10), ("epoch", 0.1 * 0.5**2)])
def test_scheduler_is_stepped_after_each_step_or_epoch(interval, expected):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(make_trainer(model, optimizer, scheduler=scheduler, scheduler_interval=interval))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)


def test_the_scheduler_of_a_lone_optimizer_with_a_name_is_stepped_without_naming_it():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(make_trainer(model, {"only": optimizer}, scheduler={"only": scheduler}), epochs=1)
    assert optimizer.param_groups[0]["lr"] < 1.0


def test_a_scheduler_of_the_users_own_loop_is_saved_as_stateful(tmp_path):
    def run(epochs):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0)
        trainer = make_trainer(model, optimizer, directory=tmp_path, stateful={"plateau": plateau})
        for _ in trainer.epochs(epochs):
            for batch in trainer.batches(make_data(), batch_size=8):
                trainer.step(per_sample, batch)
            plateau.step(1.0)  # never gets better
        return plateau.num_bad_epochs, optimizer.param_groups[0]["lr"]

    assert run(2) == (0, pytest.approx(0.01))
    assert run(4) == (0, pytest.approx(0.0001))


def test_clipping_bounds_the_global_norm():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = make_trainer(model, optimizer, clip_grad_norm=1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    trainer.step(per_sample, next(trainer.batches(make_data(), batch_size=8)))
    moved = torch.cat([(p - q).flatten() for p, q in zip(model.parameters(), before, strict=True)])
    assert moved.norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_average_of_weights_follows_its_formula_and_serves_evaluation():
    model = make_model()
    trainer = make_trainer(model, ema_decay=0.5)
    expected = None
    for batch in trainer.batches(make_data(), batch_size=8):
        trainer.step(per_sample, batch)
        now = model[0].weight.detach().clone()
        expected = now if expected is None else 0.5 * expected + 0.5 * now
    difference = trainer.evaluate(
        lambda m, b: (m[0].weight - expected).abs().max().expand(len(b[1])), make_data(), ema=True
    )
    assert difference < 1e-6
    plain = trainer.evaluate(lambda m, b: (m[0].weight - expected).abs().max().expand(len(b[1])), make_data())
    assert plain > 1e-4
    with pytest.raises(ValueError, match="ema=True needs averaged weights"):
        make_trainer().evaluate(correct, make_data(), ema=True)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_autocast_computes_in_low_precision_and_keeps_weights_in_float32(kind):
    seen = []

    def loss(model, batch):
        out = model(batch[0])
        seen.append(out.dtype)
        return F.cross_entropy(out.float(), batch[1], reduction="none")

    trainer = train(make_trainer(autocast=kind), loss=loss, epochs=1)
    assert set(seen) == {torch.bfloat16 if kind == "bf16" else torch.float16}
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())


def test_fp16_skips_a_step_whose_scaled_gradient_overflows_and_lowers_the_scale():
    model = nn.Linear(4, 3)
    trainer = make_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), autocast="fp16")
    before = trainer.digest()
    batch = next(trainer.batches(make_data(), batch_size=8))
    trainer.step(lambda m, b: m(b[0]).float().sum(1) * 1e36, batch)
    assert trainer.digest() == before
    trainer.step(lambda m, b: m(b[0]).float().sum(1) * 1e-3, batch)
    assert trainer.digest() != before


def test_a_skipped_fp16_step_moves_neither_schedule_nor_average():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    trainer = make_trainer(model, optimizer, autocast="fp16", scheduler=scheduler, ema_decay=0.5)
    batch = next(trainer.batches(make_data(), batch_size=8))
    trainer.step(lambda m, b: m(b[0]).float().sum(1) * 1e36, batch)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert trainer._averages[""].n_averaged == 0


def test_compiled_models_train_and_keep_plain_names(tmp_path):
    plain, compiled = make_model(), make_model()
    expected = train(make_trainer(plain), epochs=1).digest()
    trainer = make_trainer(torch.compile(compiled, backend="eager"), torch.optim.SGD(compiled.parameters(), lr=0.1))
    assert train(trainer, epochs=1).digest() == expected
    # A checkpoint of the compiled model is one of the plain model.
    first = make_trainer(torch.compile(make_model(), backend="eager"), directory=tmp_path)
    train(first, epochs=1)
    assert make_trainer(make_model(), directory=tmp_path).steps_done == 5


def test_gan_trains_each_network_by_its_own_optimizer_only():
    torch.manual_seed(0)
    models = {"g": nn.Linear(2, 4), "d": nn.Linear(4, 1)}
    optimizers = {name: torch.optim.SGD(m.parameters(), lr=0.1) for name, m in models.items()}
    trainer = unisono.Trainer(models, optimizers, virtual_ranks=2, progress=False)
    batch = next(trainer.batches(make_data(), batch_size=8))
    before = copy.deepcopy({name: m.state_dict() for name, m in models.items()})

    def unchanged(name):
        return all(torch.equal(v, before[name][key]) for key, v in models[name].state_dict().items())

    noise = []

    def forge(m, b):
        noise.append(torch.randn(len(b[0]), 2))
        return m["d"](m["g"](noise[-1])).squeeze(1)  # the gradient passes through both

    trainer.step(forge, batch, optimizer="g")
    assert unchanged("d")
    assert not unchanged("g")
    assert all(p.grad is None for p in models["d"].parameters())
    trainer.step(lambda m, b: m["d"](m["g"](torch.randn(len(b[0]), 2)).detach()).squeeze(1), batch, optimizer="d")
    assert not unchanged("d")
    assert trainer.steps_done == 1  # one batch
    assert not torch.equal(noise[0], noise[1])  # each virtual rank draws its own


def test_custom_collate_and_nested_batches():
    class Words(Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            return {"text": "a" * (index % 4 + 1), "label": index % 3}

    def collate(samples):
        width = max(len(s["text"]) for s in samples)
        return {
            "ids": torch.tensor([[1.0] * len(s["text"]) + [0.0] * (width - len(s["text"])) for s in samples]),
            "label": torch.tensor([s["label"] for s in samples]),
        }

    model = nn.Linear(1, 3)
    trainer = make_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in trainer.batches(Words(), batch_size=8, collate_fn=collate):
        shapes = [micro_batch["ids"].shape for micro_batch in batch.micro_batches]
        assert all(len(shape) == 2 for shape in shapes)
        trainer.step(lambda m, b: F.cross_entropy(m(b["ids"].sum(1, keepdim=True)), b["label"]), batch)


def test_fit_is_the_loop(tmp_path):
    looped = make_trainer()
    for _ in looped.epochs(2):
        for batch in looped.batches(make_data(), batch_size=8):
            looped.step(per_sample, batch)
        accuracy = looped.evaluate(correct, make_data(20), batch_size=8)
    fitted = make_trainer(directory=tmp_path)
    results = fitted.fit(
        per_sample, make_data(), batch_size=8, epochs=2, validation=make_data(20), metrics={"accuracy": correct}
    )
    assert fitted.digest() == looped.digest()
    assert [result.epoch for result in results] == [0, 1]
    assert results[-1].validation["accuracy"] == accuracy
    assert results[1].loss < results[0].loss
    again = make_trainer(directory=tmp_path)
    assert again.fit(per_sample, make_data(), batch_size=8, epochs=2) == results
    assert again.digest() == fitted.digest()
    *_, third = again.fit(per_sample, make_data(), batch_size=8, epochs=3, validation=make_data(20))
    assert third.epoch == 2
    assert third.validation["validation loss"].count == 20


def test_batches_without_epochs_count_epochs_by_themselves():
    trainer = make_trainer()
    for expected in range(3):
        seen = [batch.epoch for batch in trainer.batches(make_data(), batch_size=8)]
        assert seen == [expected] * 5


def test_generators_outside_the_step_follow_the_run_and_not_the_past():
    """What the user draws in the loop depends on the place in the run alone."""

    def draws(extra):
        trainer, drawn = make_trainer(), []
        for batch in trainer.batches(make_data(), batch_size=8):
            drawn.append(torch.rand(()).item())
            torch.rand(extra)
            trainer.step(lambda m, b: per_sample(m, b) * torch.rand(extra).sum() ** 0, batch)
            drawn.append(torch.rand(()).item())
        return drawn

    assert draws(1) == draws(100)
    assert len(set(draws(1))) == 10


def test_events_tell_the_run(tmp_path):
    trainer = make_trainer(directory=tmp_path, checkpoints=unisono.Checkpoints(every_steps=4))
    train(trainer)
    trainer.evaluate(correct, make_data(), name="accuracy")
    events = list(read_events(tmp_path / "events.jsonl"))
    kinds = [event["event"] for event in events if event["event"] not in ("checkpoint", "times")]
    epoch = ["epoch", *["step"] * 5]
    assert kinds == ["run", *epoch, *epoch, "end", "evaluation"]
    steps = [event for event in events if event["event"] == "step"]
    assert [(e["epoch"], e["step"], e["total_steps"], e["samples"]) for e in steps][5] == (1, 0, 6, 8)
    assert all(e["loss"] > 0 and e["step_s"] > 0 and e["lr"] == 0.1 for e in steps)
    assert events[-1]["values"]["accuracy"]["count"] == 40
    saved = [e["total_steps"] for e in events if e["event"] == "checkpoint"]
    assert saved == [4, 5, 9, 10]  # every four steps, and at the end of each epoch
    assert all(json.dumps(event) for event in events)


def test_step_events_tell_the_learning_rate_that_was_used(tmp_path):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(make_trainer(model, optimizer, scheduler=scheduler, directory=tmp_path), epochs=1)
    events = read_events(tmp_path / "events.jsonl")
    assert [event["lr"] for event in events if event["event"] == "step"] == [1.0, 0.5, 0.25, 0.125, 0.0625]


def test_batch_norm_that_can_never_learn_is_warned_of_once(tmp_path):
    trainer = make_trainer(directory=tmp_path)
    train(trainer, batch_size=4)
    warnings = [event["message"] for event in read_events(tmp_path / "events.jsonl") if event["event"] == "warning"]
    assert len(warnings) == 1
    assert "BatchNorm1d" in warnings[0]
    assert "one sample" in warnings[0]


def test_a_dataset_that_grows_between_epochs_is_dealt_as_it_is():
    class Growing(Dataset):
        n = 8

        def __len__(self):
            return self.n

        def __getitem__(self, index):
            return make_data()[index]

    data, trainer, seen = Growing(), make_trainer(), []
    for _ in trainer.epochs(2):
        seen.append(sum(len(batch) for batch in trainer.batches(data, batch_size=8)))
        data.n = 20
    assert seen == [8, 20]


def test_steps_end_a_run_in_mid_epoch(tmp_path):
    trainer = make_trainer(directory=tmp_path)
    seen = [b.step for _ in trainer.epochs(5, max_steps=7) for b in stepped(trainer)]
    assert seen == [0, 1, 2, 3, 4, 0, 1]
    resumed = make_trainer(directory=tmp_path)
    assert (resumed.epoch, resumed.steps_done) == (1, 7)
    assert [b.step for _ in resumed.epochs(5, max_steps=9) for b in stepped(resumed)] == [2, 3]


def stepped(trainer):
    for batch in trainer.batches(make_data(), batch_size=8):
        trainer.step(per_sample, batch)
        yield batch


def test_a_backward_that_writes_to_its_gradient_spoils_no_later_step():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient.mul_(2)

    def mean(factor):
        model, data = make_model(), make_data()
        trainer = make_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1 / factor))
        function = Doubled.apply if factor == 2 else torch.clone

        def loss(model, batch):
            total = function(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"))
            return unisono.Sum(total, len(batch[1]))

        return train(trainer, loss=loss, data=data).digest()

    assert mean(2) == mean(1)


@pytest.mark.parametrize(("ranks", "engine"), [(1, "auto"), (2, "collective"), (2, "shared")])
def test_nothing_stays_of_trainers_that_are_dropped(fork_ranks, ranks, engine):
    job = fork_ranks(ranks, DROPPED, engine)
    assert [job.lines(rank) for rank in range(ranks)] == [["ok"]] * ranks


class Watched(torch.Tensor):
    """A tensor that takes down what is done with it, as libraries do that put their own behind torch's functions."""

    calls: list[str]

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.calls.append(getattr(function, "__name__", str(function)))
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_loss_of_a_tensor_class_of_ones_own_goes_through_that_class():
    Watched.calls = []
    watched = train(make_trainer(), loss=lambda model, batch: per_sample(model, batch).as_subclass(Watched))
    assert Watched.calls.count("backward") == 2 * 5 * 4
    assert watched.digest() == train(make_trainer()).digest()


def test_compiled_models_have_kernels_for_each_size_of_a_share():
    """One for all sizes would round otherwise, and which sizes a rank meets first depends on the number of ranks."""
    graphs = []

    def compiler(graph, inputs):
        graphs.append([value for value in inputs if not isinstance(value, torch.Tensor)])
        return graph.forward

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(torch.compile(model, backend=compiler), optimizer, virtual_ranks=2, progress=False)
    data = TensorDataset(torch.randn(19, 4), torch.arange(19) % 3)
    for batch in trainer.batches(data, batch_size=7):  # shares of 4 and 3, and at last of 3 and 2
        trainer.step(lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"), batch)
    assert graphs == [[], [], []]
