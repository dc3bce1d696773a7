"""Steps that are not the plain one: they too have one digest on any number of ranks, and are those of plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from digests import digests
from unisono.errors import LossError

STEPS = Path(__file__).parent / "programs" / "steps.py"
NOT_SHARED = ("LBFGS", "SAM")
PLAIN = ["values", "encoded", "changed gradients", "SparseAdam and AdamW", "Muon and AdamW", "encoded in low precision"]
"""Forms that others have in them, with micro-batches, clipped, computed again, in turn or in fp16."""


@pytest.fixture(scope="module")
def steps_on_one_rank(fork_python) -> dict[str, str]:
    return digests(fork_python(STEPS, "auto"), least=19)


@pytest.mark.soak
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("engine", ["shared", "collective"])
def test_steps_of_all_forms_have_one_digest(fork_ranks, steps_on_one_rank, n, engine):
    expected = {k: v for k, v in steps_on_one_rank.items() if engine != "shared" or k not in NOT_SHARED}
    assert digests(fork_ranks(n, STEPS, engine).lines(), least=17) == expected


@pytest.mark.parametrize(
    ("without", "parts"),
    [
        (PLAIN, [(2, "collective", 2), (3, "shared", 0)]),
        pytest.param([], [(3, "shared", 2), (2, "collective", 5), (1, "auto", 0)], marks=pytest.mark.soak),
    ],
    ids=["once", "twice"],
)
def test_steps_of_all_forms_have_one_digest_with_other_ranks_and_another_engine_from_mid_epoch(
    fork_ranks, tmp_path, steps_on_one_rank, without, parts
):
    """Stopped in each epoch, and in fp16 while the scale falls."""
    expected = {name: sha for name, sha in steps_on_one_rank.items() if name not in without}
    for n, engine, steps in parts:
        job = fork_ranks(n, STEPS, engine, tmp_path, steps, *expected)
    assert digests(job.lines(), least=13) == expected


def test_to_encode_again_changes_no_bit(steps_on_one_rank):
    assert steps_on_one_rank["encoded"] == steps_on_one_rank["encoded again"]
    assert steps_on_one_rank["encoded by micro-batches"] == steps_on_one_rank["encoded again by micro-batches"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 7), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


@pytest.fixture
def pair():
    """Two equal models in float64, and a dataset."""
    torch.manual_seed(3)
    ours, plain = Net().double(), Net().double()
    plain.load_state_dict(ours.state_dict())
    return ours, plain, TensorDataset(torch.randn(28, 5, dtype=torch.float64), torch.arange(28) % 3)


def train(model, optimizer, data, loss, **step):
    """Take two epochs of steps of twelve samples in their order, on four virtual ranks."""
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, progress=False)
    return [
        trainer.step(loss, batch, **step)
        for _ in trainer.epochs(2)
        for batch in trainer.batches(data, batch_size=12, shuffle=False)
    ]


def whole_batches(data):
    return [data[start : start + 12] for _ in range(2) for start in (0, 12, 24)]


def check_equal(ours, plain):
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p, plain.get_parameter(name), rtol=1e-12, atol=1e-12, msg=name)


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize("recompute", [False, True])
def test_a_loss_over_the_global_batch_is_that_of_one_process(pair, recompute):
    ours, plain, data = pair

    def contrast(model, z):
        scores = F.normalize(z) @ F.normalize(z).t() * model.scale.exp()
        return F.cross_entropy(scores, torch.arange(len(z)).flip(0))

    results = train(
        ours,
        torch.optim.SGD(ours.parameters(), lr=0.5),
        data,
        contrast,
        encode=lambda model, batch: model(batch[0]),
        recompute=recompute,
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for result, (x, _) in zip(results, whole_batches(data), strict=True):
        optimizer.zero_grad()
        loss = contrast(plain, plain(x))
        loss.backward()
        optimizer.step()
        assert result == pytest.approx(loss.item(), rel=1e-6)
    check_equal(ours, plain)


def test_encodings_come_in_the_order_of_the_batch(pair):
    ours, _, data = pair
    seen = []

    def look(model, encodings):
        seen.append(encodings["row"].tolist())
        return (encodings["z"] * model.scale).sum(1)

    rows = TensorDataset(*data.tensors, torch.arange(28))
    train(
        ours,
        torch.optim.SGD(ours.parameters(), lr=0.1),
        rows,
        look,
        encode=lambda model, batch: {"z": model(batch[0]), "row": batch[2]},
    )
    assert seen == 2 * [[*range(12)], [*range(12, 24)], [*range(24, 28)]]


def test_several_optimizers_step_on_one_gradient(pair):
    ours, plain, data = pair

    def optimizers(model):
        return {
            "head": torch.optim.AdamW(model.head.parameters(), lr=0.1),
            "rest": torch.optim.SGD([*model.body.parameters(), model.scale], lr=0.3),
        }

    results = train(ours, optimizers(ours), data, cross_entropy)
    assert results[0].learning_rates == (0.1, 0.3) and results[0].learning_rate == 0.1
    parts = optimizers(plain)
    for x, y in whole_batches(data):
        plain.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        for each in parts.values():
            each.step()
    check_equal(ours, plain)


def test_a_parameter_of_several_optimizers_is_stepped_by_one_at_a_time(pair):
    ours, plain, data = pair

    def optimizers(model):
        return {
            "head": torch.optim.SGD([*model.head.parameters(), model.scale], lr=0.1),
            "rest": torch.optim.SGD([*model.body.parameters(), model.scale], lr=0.3, momentum=0.5),
        }

    trainer = unisono.Trainer(ours, optimizers(ours), virtual_ranks=4, progress=False)
    parts = optimizers(plain)
    batches = trainer.batches(data, batch_size=12, shuffle=False)
    for batch, (x, y) in zip(batches, whole_batches(data)[:3], strict=True):
        before = trainer.digest()
        with pytest.raises(ValueError, match=r"'scale' belongs to several optimizers, .* Step them one after"):
            trainer.step(cross_entropy, batch)
        assert trainer.digest() == before
        for name, each in parts.items():
            trainer.step(cross_entropy, batch, optimizer=name)
            plain.zero_grad()
            F.cross_entropy(plain(x), y).backward()
            each.step()
    check_equal(ours, plain)


def test_gradients_may_be_changed_between_sum_and_update(pair):
    ours, plain, data = pair

    def change(model):
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        model.head.bias.grad = None

    train(ours, torch.optim.SGD(ours.parameters(), lr=0.5), data, cross_entropy, on_gradients=change)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for x, y in whole_batches(data):
        optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        change(plain)
        optimizer.step()
    check_equal(ours, plain)


def test_lbfgs_looks_at_the_loss_as_in_plain_torch(pair):
    ours, plain, data = pair

    def lbfgs(model):
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=6)

    train(ours, lbfgs(ours), data, cross_entropy)
    optimizer = lbfgs(plain)
    for x, y in whole_batches(data):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(plain(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    check_equal(ours, plain)


def test_further_values_are_means_over_the_global_batch(pair):
    ours, plain, data = pair

    def loss(model, batch):
        scores = model(batch[0])
        hit = scores.argmax(1) == batch[1]
        return {"loss": F.cross_entropy(scores, batch[1]), "hits": hit, "ones": unisono.Sum(hit.sum(), batch[1].sum())}

    results = train(ours, torch.optim.SGD(ours.parameters(), lr=0.0), data, loss)
    for result, (x, y) in zip(results, whole_batches(data), strict=True):
        hits = plain(x).argmax(1) == y
        assert (result.values["hits"].total, result.values["hits"].count) == (hits.sum(), len(y))
        assert (result.values["ones"].total, result.values["ones"].count) == (hits.sum(), y.sum())


def test_a_step_that_fails_at_other_weights_leaves_no_trace(pair):
    ours, _, data = pair
    calls = []

    def breaks(model, batch):
        calls.append(1)
        if len(calls) > 4:  # the virtual ranks of the first look
            raise RuntimeError("no more")
        return cross_entropy(model, batch)

    before = {name: p.clone() for name, p in ours.named_parameters()}
    optimizer = torch.optim.LBFGS(ours.parameters(), lr=0.5)
    with pytest.raises(RuntimeError, match="no more"):
        train(ours, optimizer, data, breaks)
    assert all(torch.equal(p, before[name]) for name, p in ours.named_parameters())
    assert not optimizer.state


OUTPUTS = {
    "a number": (lambda z: 3.0, "encode returned a float: return a tensor with a row for each sample"),
    "a mean": (lambda z: z.mean(), r"encode returned a tensor of shape \[\] for a micro-batch of 3 samples"),
    "too few rows": (lambda z: z[:2], r"encode returned a tensor of shape \[2, 3\] for a micro-batch of 3 samples"),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_encodings_without_a_row_for_each_sample_are_refused(pair, kind):
    ours, _, data = pair
    make, words = OUTPUTS[kind]
    with pytest.raises(LossError, match=words):
        train(
            ours,
            torch.optim.SGD(ours.parameters(), lr=0.1),
            data,
            lambda model, z: z.sum(1),
            encode=lambda model, batch: make(model(batch[0])),
        )


REFUSED = {
    "recompute alone": ({"recompute": True}, ValueError, "recompute=True is for steps with encode"),
    "encode": ({"encode": 3}, TypeError, "encode is an int, which cannot be called"),
    "on_gradients": ({"on_gradients": "clip"}, TypeError, "on_gradients is a str, which cannot be called"),
    "closure": ({"closure": 1}, TypeError, "closure=1 must be True or False"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_options_that_cannot_be_meant_are_refused(pair, kind):
    ours, _, data = pair
    options, error, words = REFUSED[kind]
    with pytest.raises(error, match=words):
        train(ours, torch.optim.SGD(ours.parameters(), lr=0.1), data, cross_entropy, **options)


def test_a_closure_is_for_one_optimizer(pair):
    ours, _, data = pair
    both = {"a": torch.optim.SGD(ours.body.parameters(), lr=0.1), "b": torch.optim.SGD(ours.head.parameters(), lr=0.1)}
    with pytest.raises(ValueError, match="closure=True is for a step of one optimizer"):
        train(ours, both, data, cross_entropy, closure=True)


FAILURES = """
def says(function):
    before = trainer.digest()
    try:
        function()
    except Exception as error:
        say(type(error).__name__, error)
    assert trainer.digest() == before

def noisy(model):
    if R == 1:
        model[0].bias.grad += 1

def broken(model):
    if R == 1:
        raise KeyError("tables")

def encode_on_some(model, batch):
    if R == 1:
        raise KeyError("z")
    return model(batch[0])

def other_shape(model, batch):
    z = model(batch[0])
    return z[:, :2] if R == 1 else z

trainer = make_trainer(engine=ENGINE)
for batch in trainer.batches(data, batch_size=12):
    says(lambda: trainer.step(loss, batch, on_gradients=noisy))
    says(lambda: trainer.step(loss, batch, on_gradients=broken))
    says(lambda: trainer.step(lambda m, z: z.sum(1), batch, encode=encode_on_some))
    says(lambda: trainer.step(lambda m, z: z.sum(1), batch, encode=other_shape))
    says(lambda: trainer.step(loss, batch, on_gradients=broken if R == 1 else None))
    say(float(trainer.step(loss, batch)))
    break
say(trainer.digest())
"""


@pytest.mark.parametrize("engine", ["shared", "collective"])
def test_a_rank_that_fails_within_a_step_is_named_on_all_and_they_go_on(run_alone, engine):
    said = [text.splitlines() for text in run_alone(2, f"ENGINE = {engine!r}\n{FAILURES}")]
    differs = "RankMismatchError on_gradients made another gradient of '0.bias' on rank 1 than on rank 0."
    assert all(lines[0].startswith(differs) for lines in said)
    assert said[0][1].startswith("PeerError rank 1 failed in on_gradients: KeyError: 'tables'")
    assert said[1][1] == "KeyError 'tables'"
    assert said[0][2].startswith("PeerError rank 1 failed in encode: KeyError: 'z'")
    assert said[1][2] == "KeyError 'z'"
    shapes = "LossError encode returned float32 [3, 3] for virtual rank 0 and float32 [3, 2] for virtual rank 2"
    assert all(lines[3].startswith(shapes) for lines in said)
    calls = "RankMismatchError ranks call different things: trainer.step() on rank 0, trainer.step(on_gradients=…) on"
    assert all(lines[4].startswith(calls) for lines in said)
    assert said[0][5:] == said[1][5:]
