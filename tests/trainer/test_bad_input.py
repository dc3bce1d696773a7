"""A mistake gets one clear sentence with the numbers and the remedy, and nothing is lost."""

from __future__ import annotations

import contextlib
import re
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import unisono
from unisono.errors import CheckpointError, DataError, LossError, NonFiniteLossError


def make_trainer(model=None, **options):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = options.pop("optimizer", None) or torch.optim.AdamW(model.parameters(), lr=0.1)
    return unisono.Trainer(model, optimizer, **{"virtual_ranks": 4, "progress": False, **options})


def make_data(n=40):
    return TensorDataset(torch.randn(n, 4, generator=torch.Generator().manual_seed(1)), torch.arange(n) % 3)


def per_sample(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def first_batch(trainer, data=None, **options):
    return next(trainer.batches(data if data is not None else make_data(), **{"batch_size": 8, **options}))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"batch_size": 3}, ValueError, ["batch_size=3", "virtual_ranks=4", "Raise batch_size to 4"]),
        ({"micro_batch_size": 0}, ValueError, ["micro_batch_size=0", "at least 1"]),
        ({"workers": -1}, ValueError, ["workers=-1"]),
        ({"data": make_data(0)}, DataError, ["empty", "TensorDataset"]),
        ({"data": make_data(5), "drop_last": True}, DataError, ["5 samples", "batch_size=8", "drop_last"]),
        ({"data": DataLoader(make_data())}, TypeError, ["DataLoader", "the dataset itself"]),
        ({"data": 7}, TypeError, ["int", "map-style"]),
        ({"data": iter(())}, TypeError, ["map-style"]),
    ],
)
def test_batches_refuse_what_cannot_be(options, error, words):
    with pytest.raises(error) as caught:
        first_batch(make_trainer(), **options)
    assert_says(caught, *words)


def test_a_dataset_without_length_and_an_empty_stream():
    class Endless(Dataset):
        def __getitem__(self, index):
            return index

    class Nothing(IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(TypeError, match=r"Endless has no __len__: add it, or make the dataset an IterableDataset"):
        first_batch(make_trainer(), Endless())
    with pytest.raises(DataError, match="yielded nothing in epoch 0"):
        first_batch(make_trainer(), Nothing())
    with pytest.raises(ValueError, match="shuffle=True cannot be done for Nothing"):
        first_batch(make_trainer(), Nothing(), shuffle=True)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda m, b: per_sample(m, b).detach(), ["no gradient", "detached"]),
        (lambda m, b: m(b[0]), [r"shape [2, 3]", "micro-batch of 2 samples", "shape [2]", "reduction='none'"]),
        (lambda m, b: per_sample(m, b).sum().item(), ["float", "one loss per sample (shape [2] here)"]),
        (lambda m, b: None, ["None", "return a tensor"]),
        (
            lambda m, b: (per_sample(m, b).mean(), 0.5),
            ["tuple of 2 values", "unisono.Sum(total, weight)", '{"loss": loss'],
        ),
        (lambda m, b: {"a": 1, "b": 2}, ['a dict without the entry "loss"', "'a', 'b'"]),
        (lambda m, b: {"loss": {"loss": 1}}, ["a dict in place of a value"]),
        (lambda m, b: {"loss": None, "logits": m(b[0])}, ["returned None", "return a tensor"]),
        (lambda m, b: list(per_sample(m, b)), ["a list of 2 values", "torch.stack(losses)"]),
        (lambda m, b: per_sample(m, b).detach().numpy(), ["a numpy array of shape [2]", "return the tensor"]),
        (lambda m, b: per_sample(m, b).unsqueeze(1), ["shape [2, 1]", ".view(2)"]),
        (lambda m, b: per_sample(m, b).to("meta"), ["the loss lies on meta and this rank computes on cpu"]),
        (lambda m, b: per_sample(m, b) * 1j, ["complex numbers"]),
        (lambda m, b: unisono.Sum(per_sample(m, b), 2), ["a tensor of shape [2] as its total", "losses.sum()"]),
        (lambda m, b: unisono.Sum(per_sample(m, b).sum(), b[0]), ["a tensor of shape [2, 4] as its weight"]),
        (lambda m, b: unisono.Sum(per_sample(m, b).sum(), "2"), ["'2'", "number to divide the sum by"]),
        (lambda m, b: unisono.Sum(per_sample(m, b).sum(), -1.0), ["weight -1.0", "zero or more"]),
        (lambda m, b: unisono.Sum(per_sample(m, b).sum(), torch.tensor(-1.0)), ["weight -1.0", "zero or more"]),
        (lambda m, b: unisono.Sum(per_sample(m, b).sum(), 0), ["add up to 0", "8 samples"]),
    ],
)
def test_a_loss_that_cannot_be_trained_on_changes_nothing(loss, words):
    trainer = make_trainer()
    before = trainer.digest()
    batch = first_batch(trainer)
    with pytest.raises(LossError) as caught:
        trainer.step(loss, batch)
    assert_says(caught, *words)
    assert trainer.digest() == before
    assert trainer.step(per_sample, batch) > 0  # and one can go on


@pytest.mark.parametrize("sample", [lambda i: object(), lambda i: torch.zeros(i % 3)], ids=["object", "ragged"])
def test_samples_that_torch_makes_no_batch_of(sample):
    class Samples(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):
            return sample(i)

    words = r"(class 'object'>|\[1\] at entry 1): pass batches\(\.\.\., collate_fn=function\)"
    with pytest.raises((TypeError, RuntimeError), match=words):
        first_batch(make_trainer(), Samples())
    assert list(first_batch(make_trainer(), Samples(), collate_fn=len).micro_batches) == [2, 2, 2, 2]


def test_a_loss_may_come_with_further_values_which_train_nothing():
    """The output of a model of transformers is a mapping, too."""

    class ModelOutput(OrderedDict):
        pass

    def with_scores(model, batch):
        return ModelOutput(loss=per_sample(model, batch), scores=model(batch[0]))

    results = [make_trainer().fit(loss, make_data(), batch_size=8, epochs=1) for loss in (per_sample, with_scores)]
    assert results[0] == results[1]
    trainer = make_trainer(nn.Linear(4, 3))
    (result,) = trainer.fit(with_scores, make_data(), batch_size=8, epochs=1, validation=make_data())
    assert result.validation["validation loss"] == trainer.evaluate(per_sample, make_data())


def test_evaluated_functions_return_what_loss_functions_do():
    trainer = make_trainer()
    weighted = trainer.evaluate(lambda m, b: {"weighted": unisono.Sum(b[1].sum(), len(b[1]))}, make_data(9))
    assert (weighted["weighted"].total, weighted["weighted"].count) == (9, 9)
    with pytest.raises(LossError) as caught:
        trainer.evaluate(lambda m, b: {"both": (1.0, 2)}, make_data())
    assert_says(caught, "evaluated function (entry 'both') returned a tuple of 2 values")


def test_an_evaluated_function_returns_one_form():
    trainer = make_trainer()
    for first in ({"a": torch.ones(1)}, {}):
        forms = iter([first, torch.ones(1)])
        with pytest.raises(LossError, match="returned a dict and a single value for different micro-batches"):
            trainer.evaluate(lambda m, b, forms=forms: next(forms), make_data(2))


class Counting(nn.Linear):
    """Counts its calls, in a buffer or a cache."""

    def __init__(self, *, persistent, always):
        super().__init__(4, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=persistent)
        self.always = always

    def forward(self, x):
        if self.training or self.always:
            self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.9}])
def test_functions_that_write_to_buffers_in_evaluation_are_refused(options):
    trainer = make_trainer(nn.Sequential(Counting(persistent=True, always=True)), **options)
    for call in (trainer.evaluate, trainer.predict):
        with pytest.raises(LossError) as caught:
            call(lambda m, b: m(b[0]).sum(1), make_data())
        assert_says(caught, "wrote to buffer '0.calls'", "only where self.training is true", "persistent=False")
    with pytest.raises(LossError, match="wrote to buffer"):
        trainer.evaluate(lambda m, b: (delattr(m[0], "calls"), b[0].sum(1))[1], make_data())
    for model in (Counting(persistent=False, always=True), Counting(persistent=True, always=False)):
        trainer = make_trainer(model, **options)
        trainer.evaluate(lambda m, b: m(b[0]).sum(1), make_data())
        trainer.predict(lambda m, b: m(b[0]), make_data())


def test_an_evaluation_that_fails_leaves_the_random_numbers_of_the_loop():
    drawn = []
    for fails in (False, True):
        trainer = make_trainer()
        first_batch(trainer)
        with contextlib.suppress(KeyError):
            trainer.evaluate(lambda m, b, fails=fails: {}["mine"] if fails else m(b[0]).sum(1), make_data())
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


def test_nan_loss_is_named_with_step_virtual_rank_and_samples_and_changes_nothing():
    trainer = make_trainer()
    data = make_data()
    data.tensors[0][13] = torch.nan
    for batch in trainer.batches(data, batch_size=8, shuffle=False):
        before = trainer.digest()
        if batch.step < 1:
            trainer.step(per_sample, batch)
            continue
        with pytest.raises(NonFiniteLossError) as caught:
            trainer.step(per_sample, batch)
        break
    assert trainer.digest() == before
    # Position 13 is the sixth of step 1, so virtual rank 1 has it, with position 9.
    assert_says(caught, "loss is nan at epoch 0, step 1", "virtual rank 1 (rank 0): loss nan, samples 9, 13", "rate")
    assert "virtual rank 0" not in str(caught.value)


def test_infinite_gradient_under_a_finite_loss_is_refused_when_clipping():
    trainer = make_trainer(clip_grad_norm=1.0)
    before = trainer.digest()
    batch = first_batch(trainer)
    with pytest.raises(NonFiniteLossError, match=r"norm of the gradient is (inf|nan)"):
        trainer.step(lambda m, b: (m(b[0]) * 0).sum(1).sqrt(), batch)
    assert trainer.digest() == before


def test_an_exception_in_the_loss_function_is_the_users_own_and_changes_nothing():
    trainer = make_trainer()
    before, calls = trainer.digest(), []

    def fails_late(model, batch):
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("mine")
        return per_sample(model, batch)

    batch = first_batch(trainer)
    with pytest.raises(KeyError, match="mine"):
        trainer.step(fails_late, batch)
    assert trainer.digest() == before


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"virtual_ranks": 0}, ValueError, ["virtual_ranks=0", "at least 1"]),
        ({"ema_decay": 1.0}, ValueError, ["ema_decay=1.0", "below 1"]),
        ({"scheduler_interval": "batch"}, ValueError, ["'batch'", "'step', 'epoch'"]),
        ({"resume": "must"}, ValueError, ["directory"]),
        ({"autocast": "fp8"}, ValueError, ["'fp8'", "bf16"]),
        ({"clip_grad_norm": -1.0}, ValueError, ["clip_grad_norm=-1.0"]),
        ({"threads": 0}, ValueError, ["threads=0"]),
        ({"engine": "fast"}, ValueError, ["'fast'", "'auto', 'shared', 'collective'"]),
        ({"resume": "maybe"}, ValueError, ["'maybe'", "auto"]),
        ({"listeners": [print, 3]}, TypeError, ["listeners[1] is an int", "cannot be called"]),
        ({"listeners": print}, TypeError, ["listeners is a builtin_function_or_method", "a list of functions"]),
    ],
)
def test_trainer_refuses_arguments_that_cannot_be(options, error, words):
    with pytest.raises(error) as caught:
        make_trainer(**options)
    assert_says(caught, *words)


@pytest.mark.parametrize("options", [{}, {"virtual_ranks": None}, {"directory": "/nowhere", "resume": "must"}])
def test_virtual_ranks_have_no_default_since_they_decide_the_result(options):
    model = nn.Linear(4, 3)
    with pytest.raises(TypeError) as caught:
        unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    assert_says(caught, "virtual_ranks is missing", "decides the result", "Give virtual_ranks=8")


def test_trainer_refuses_optimizers_and_schedulers_that_cannot_serve():
    model = nn.Linear(4, 3)
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer"):
        make_trainer(model, optimizer=model.parameters())
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"ReduceLROnPlateau needs a metric: .* stateful="):
        make_trainer(model, scheduler=plateau)
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    trainer = make_trainer(model, optimizer=stranger)
    with pytest.raises(ValueError, match=r"parameter of shape \[2, 2\] that belongs to no model"):
        trainer.step(per_sample, first_batch(trainer))


def test_a_batch_is_used_in_its_turn():
    trainer = make_trainer()
    batches = trainer.batches(make_data(), batch_size=8)
    stale = next(batches)
    next(batches)
    with pytest.raises(ValueError, match=r"the batch that trainer\.batches gave last"):
        trainer.step(per_sample, stale)


def test_an_optimizer_of_another_name_is_refused_with_those_that_there_are():
    models = {"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)}
    optimizers = {name: torch.optim.SGD(m.parameters(), lr=0.1) for name, m in models.items()}
    trainer = unisono.Trainer(models, optimizers, virtual_ranks=2, progress=False)
    with pytest.raises(ValueError, match="optimizer='c', but Trainer was given several: name one of 'a', 'b', or none"):
        trainer.step(lambda m, b: per_sample(m["a"], b), first_batch(trainer), optimizer="c")


@pytest.mark.parametrize(("named", "words"), [(False, "one: leave the name out"), (True, "one, named 'a': give that")])
def test_a_name_that_no_optimizer_has_is_refused(named, words):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, {"a": optimizer} if named else optimizer, virtual_ranks=2, progress=False)
    with pytest.raises(ValueError, match=f"optimizer='x', but Trainer was given {words}"):
        trainer.step(per_sample, first_batch(trainer), optimizer="x")


def test_a_directory_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError) as caught:
        make_trainer(directory=tmp_path / "file" / "run")
    assert_says(caught, "cannot be used", "Not a directory", "directory=None")
    with pytest.raises(CheckpointError, match="cannot be used"):
        make_trainer(directory="/proc/nothing/run")


def test_state_that_would_need_pickle_is_named(tmp_path):
    class Odd:
        def state_dict(self):
            return {"inner": [object()]}

        def load_state_dict(self, state):
            pass

    trainer = make_trainer(directory=tmp_path, stateful={"odd": Odd()})
    with pytest.raises(CheckpointError) as caught:
        trainer.save()
    assert_says(caught, "odd.inner.0", "object")


FULL_DISK = """
import resource, sys, torch, unisono
from torch import nn
from torch.utils.data import TensorDataset
model = nn.Linear(1000, 100)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = unisono.Trainer(model, optimizer, virtual_ranks=2, directory=sys.argv[1],
                          checkpoints=unisono.Checkpoints(every_steps=1), progress=False)
data = TensorDataset(torch.randn(40, 1000))
for epoch in trainer.epochs(2):
    for batch in trainer.batches(data, batch_size=8):
        trainer.step(lambda m, b: m(b[0]).square().sum(1), batch)
        if trainer.steps_done == 3:
            # No file may grow beyond 100 kB from here on: what a full disk does, without one.
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        if trainer.steps_done == int(sys.argv[2]):
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("weights sha256:", trainer.digest())
"""


def test_a_disk_that_fills_up_does_not_end_the_run_and_is_told(fork_ranks, tmp_path):
    job = fork_ranks(1, FULL_DISK, tmp_path / "run", 7)
    steps = sorted(int(folder.name[5:]) for folder in (tmp_path / "run" / "checkpoints").iterdir())
    assert steps == [8, 9, 10]  # room again after step 7
    assert "checkpoint not written" in (tmp_path / "run" / "events.jsonl").read_text()
    assert job.sha()


def test_a_disk_that_stays_full_is_an_error_at_the_end_and_older_checkpoints_stay(fork_ranks, tmp_path):
    job = fork_ranks(1, FULL_DISK, tmp_path / "run", 100, code=1)
    assert "step 10 was not written" in job.said
    assert "Older checkpoints are untouched" in job.said
    kept = sorted(folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir())
    assert [name for name in kept if name.startswith("step")] == ["step-000000001", "step-000000002", "step-000000003"][
        : len(kept)
    ]
    assert kept


PREAMBLE = """
import os, torch, unisono
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
RANK = int(os.environ["RANK"])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
n, batch_size = 40, 8
data = TensorDataset(torch.randn(60, 4), torch.arange(60) % 3)
def loss(m, b): return F.cross_entropy(m(b[0]), b[1], reduction="none")
"""
RUN = """
trainer = unisono.Trainer(model, torch.optim.AdamW(model.parameters()), virtual_ranks=4, progress=False)
before = trainer.digest()
try:
    for batch in trainer.batches(TensorDataset(*(t[:n] for t in data.tensors)), batch_size=batch_size, shuffle=False):
        trainer.step(loss, batch)
        before = trainer.digest()
finally:
    print("unchanged", trainer.digest() == before, flush=True)
"""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "torch.manual_seed(RANK); model = nn.Linear(4, 3)",
            ["model differs", "'weight' of rank 1", "torch.manual_seed"],
        ),
        (
            "model = nn.Linear(4, 3 + RANK)",
            ["given different things", "'float32 [3, 4]' on rank 0 and 'float32 [4, 4]' on"],
        ),
        ("n = 40 - RANK", ["number of samples differs between ranks", "40 on rank 0, 39 on rank 1"]),
        ("batch_size = 8 + RANK", ["batch_size differs between ranks", "8 on rank 0, 9 on rank 1"]),
    ],
)
def test_ranks_that_differ_are_told_so_on_all_ranks(fork_ranks, change, words):
    job = fork_ranks(2, PREAMBLE + change + RUN, code=1)
    for word in words:
        assert word in job.said
    assert "RankMismatchError" in job.said


def test_nan_on_one_rank_is_named_on_all_ranks(fork_ranks):
    handler = "except unisono.errors.NonFiniteLossError as error:\n    print(error)\nfinally:"
    catch = RUN.replace("finally:", handler)
    job = fork_ranks(3, PREAMBLE + "import unisono.errors\ndata.tensors[0][11] = torch.inf" + catch)
    for rank in range(3):
        said = "\n".join(job.lines(rank))
        assert "epoch 0, step 1" in said
        assert re.search(r"virtual rank 3 \(rank 2\): loss (nan|inf), samples 11, 15", said)
        assert "unchanged True" in said


def test_more_ranks_than_virtual_ranks_says_what_to_change(fork_ranks):
    job = fork_ranks(5, PREAMBLE + RUN, code=1)
    assert "world_size=5 exceeds virtual_ranks=4: 1 rank would be idle" in job.said
    assert "Start at most 4 ranks, or raise virtual_ranks" in job.said


def assert_says(caught, *words):
    for word in words:
        assert word in str(caught.value)
