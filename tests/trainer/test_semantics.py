"""The loss and the gradient are those of the global batch: against plain PyTorch, written out."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DistributedSampler, TensorDataset

import unisono

LEARNING_RATE = 0.5


def make_data(n: int, features: int = 6) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(n, features, generator=generator), torch.randint(0, 3, (n,), generator=generator))


def make_model(*, batch_norm: bool = False) -> nn.Module:
    torch.manual_seed(1)
    middle = [nn.BatchNorm1d(8)] if batch_norm else []
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, 3)).double()


def per_sample(model, batch):
    return F.cross_entropy(model(batch[0].double()), batch[1], reduction="none")


def trained(model, data, *, loss=per_sample, virtual_ranks, batch_size, optimizer=None, steps=None, **options):
    """Train one epoch without shuffling; return the losses of the steps."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=virtual_ranks, progress=False)
    losses = []
    for _ in trainer.epochs(1, max_steps=steps):
        for batch in trainer.batches(data, batch_size=batch_size, shuffle=False, **options):
            losses.append(trainer.step(loss, batch).loss)
    return losses


def plain_full_batch(model, data, batch_size):
    """What one process without any library would do with the global batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for start in range(0, len(data), batch_size):
        x, y = data[start : start + batch_size]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.double()), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_equal_to_rounding(ours: nn.Module, plain: nn.Module) -> None:
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


# 37 = 2 * 16 + 5: with 8 virtual ranks the last batch gives five of them one sample and three none.
@pytest.mark.parametrize("virtual_ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("micro_batch_size", [None, 1, 3])
def test_a_step_is_full_batch_training(virtual_ranks, micro_batch_size):
    data = make_data(37)
    ours, plain = make_model(), make_model()
    losses = trained(ours, data, virtual_ranks=virtual_ranks, batch_size=16, micro_batch_size=micro_batch_size)
    torch.testing.assert_close(losses, plain_full_batch(plain, data, 16), rtol=1e-6, atol=0.0)
    assert_equal_to_rounding(ours, plain)


def test_a_scalar_counts_as_the_mean_of_its_micro_batch():
    data = make_data(37)
    ours, plain = make_model(), make_model()
    trained(
        ours,
        data,
        loss=lambda model, batch: F.cross_entropy(model(batch[0].double()), batch[1]),
        virtual_ranks=4,
        batch_size=16,
        micro_batch_size=3,
    )
    plain_full_batch(plain, data, 16)
    assert_equal_to_rounding(ours, plain)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_token_weights_are_those_of_the_global_batch(as_tensor):
    """Sequences of different lengths: the mean is over all tokens of the batch, not a mean of means."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(22, 4, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (22, 4), generator=generator)
    lengths = torch.randint(1, 5, (22,), generator=generator)
    mask = (torch.arange(4) < lengths[:, None]).double()
    ours, plain = make_model(), make_model()

    def by_token(model, batch):
        losses = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="none")
        weight = batch[2].sum()
        return unisono.Sum((losses * batch[2].flatten()).sum(), weight if as_tensor else weight.item())

    losses = trained(ours, TensorDataset(x, y, mask), loss=by_token, virtual_ranks=4, batch_size=12)

    optimizer = torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE)
    expected = []
    for part in (slice(0, 12), slice(12, 22)):
        token_losses = F.cross_entropy(plain(x[part]).flatten(0, 1), y[part].flatten(), reduction="none")
        loss = (token_losses * mask[part].flatten()).sum() / mask[part].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0.0)
    assert_equal_to_rounding(ours, plain)


@pytest.mark.parametrize("n", [32, 37, 39])
def test_batch_norm_sees_its_virtual_rank_and_keeps_the_mean_of_their_statistics(n):
    """Against a loop over micro-batches; a lone sample is normalised by the running statistics."""
    data = make_data(n)
    ours, plain = make_model(batch_norm=True), make_model(batch_norm=True)
    trained(ours, data, virtual_ranks=8, batch_size=16)

    norm = plain[1]
    optimizer = torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE)
    for start in range(0, n, 16):
        x, y = data[start : min(start + 16, n)]
        before = {name: value.clone() for name, value in norm.named_buffers()}
        means, variances = [], []
        optimizer.zero_grad()
        for v in range(min(8, len(x))):
            share_x, share_y = x[v::8].double(), y[v::8]
            norm.load_state_dict({**norm.state_dict(), **before})
            if len(share_x) == 1:
                norm.eval()
            (F.cross_entropy(plain(share_x), share_y, reduction="sum") / len(x)).backward()
            norm.train()
            means.append(norm.running_mean.clone())
            variances.append(norm.running_var.clone())
        optimizer.step()
        norm.running_mean.copy_(torch.stack(means).mean(0))
        norm.running_var.copy_(torch.stack(variances).mean(0))
    assert_equal_to_rounding(ours, plain)
    torch.testing.assert_close(ours[1].running_mean, norm.running_mean)
    torch.testing.assert_close(ours[1].running_var, norm.running_var)
    assert ours[1].training
    # Virtual rank 0 has the counter: in the third batch of 37 and 39 it has a lone sample, which does not count.
    assert ours[1].num_batches_tracked == n // 16


def test_one_virtual_rank_is_plain_pytorch_to_the_bit():
    data = make_data(48)
    ours, plain = make_model().float(), make_model().float()

    def mean(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    trained(ours, data, loss=mean, virtual_ranks=1, batch_size=16)
    optimizer = torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE)
    for start in range(0, 48, 16):
        x, y = data[start : start + 16]
        optimizer.zero_grad()
        (F.cross_entropy(plain(x), y, reduction="none").sum() / 16).backward()
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("n", [48, 50])
def test_unshuffled_dealing_is_that_of_distributed_sampler(n):
    data = make_data(n)
    model = make_model()
    trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), virtual_ranks=4, progress=False)
    dealt = {v: [] for v in range(4)}
    for batch in trainer.batches(data, batch_size=8, shuffle=False):
        for share in batch.shares:
            dealt[share.virtual_rank] += share.micro_batches[0].indices
    for rank in range(4):
        sampler = DistributedSampler(data, num_replicas=4, rank=rank, shuffle=False)
        assert dealt[rank] == [i for k, i in enumerate(sampler) if rank + 4 * k < n]  # without torch's padding


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("n", "batch_size", "virtual_ranks"), [(1, 1, 1), (2, 8, 8), (37, 16, 8), (64, 10, 3), (101, 50, 7)]
)
def test_every_sample_once_per_epoch(shuffle, n, batch_size, virtual_ranks):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=virtual_ranks, progress=False)
    orders = []
    for _ in trainer.epochs(2):
        order = []
        for batch in trainer.batches(make_data(n), batch_size=batch_size, shuffle=shuffle):
            order += [i for share in batch.shares for m in share.micro_batches for i in m.indices]
            assert len(batch) == sum(len(m.indices) for share in batch.shares for m in share.micro_batches)
        orders.append(order)
        assert sorted(order) == list(range(n))
    if n > 10:
        assert (orders[0] != orders[1]) == shuffle


def test_evaluate_sees_every_sample_once_and_leaves_the_model_as_it_was():
    data = make_data(37)
    model = make_model(batch_norm=True)
    model[2].eval()  # one part in evaluation mode, as users do with frozen layers
    trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=4, progress=False)
    before = trainer.digest()
    accuracy = trainer.evaluate(lambda m, b: m(b[0].double()).argmax(1) == b[1], data, batch_size=10)
    model.eval()
    hits = int((model(data.tensors[0].double()).argmax(1) == data.tensors[1]).sum())
    model.train()
    assert (accuracy.total, accuracy.count) == (hits, 37)
    assert str(accuracy) == f"{hits / 37:.4f} ({hits}/37)"
    assert trainer.digest() == before
    both = trainer.evaluate(lambda m, b: {"loss": per_sample(m, b), "one": torch.ones(len(b[1]))}, data, batch_size=10)
    assert both["one"] == 1.0
    assert both["loss"].count == 37


def test_a_rank_with_no_gradient_for_a_parameter_leaves_it_alone():
    """A parameter that no micro-batch used has no gradient, so AdamW does not decay it; as in plain PyTorch."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(6, 3), "unused": nn.Linear(6, 3)})
    before = model["unused"].weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, progress=False)
    for batch in trainer.batches(make_data(16), batch_size=8):
        trainer.step(lambda m, b: F.cross_entropy(m["used"](b[0]), b[1], reduction="none"), batch)
    assert torch.equal(model["unused"].weight, before)
    assert model["unused"].weight.grad is None


@pytest.mark.parametrize("virtual_ranks", [1, 4])
def test_a_parameter_that_is_frozen_after_some_steps_is_left_alone(virtual_ranks):
    """The optimizer would find its last gradient, and apply it again."""
    model = make_model()
    trainer = unisono.Trainer(model, torch.optim.Adam(model.parameters()), virtual_ranks=virtual_ranks, progress=False)
    for batch in trainer.batches(make_data(40), batch_size=8):
        if batch.step == 2:
            model[0].requires_grad_(False)
            kept = model[0].weight.detach().clone()
        trainer.step(per_sample, batch)
    assert torch.equal(model[0].weight, kept) and model[0].weight.grad is None
