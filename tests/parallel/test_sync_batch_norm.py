"""SyncBatchNorm is BatchNorm over the whole batch, and models are converted to it and back."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from unisono.errors import GroupError
from unisono.parallel import BatchNormNd, SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm

PROGRAM = Path(__file__).parent / "programs" / "sync_batch_norm.py"


def test_ranks_with_unequal_shares_equal_one_process(fork_ranks):
    assert fork_ranks(3, PROGRAM).lines(2)[-1] == "ok"


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_other_numbers_of_ranks_equal_one_process(fork_ranks, ranks):
    assert fork_ranks(ranks, PROGRAM).lines(1)[-1] == "ok"


MISMATCHES = """
import pytest, torch, unisono
from unisono.errors import RankMismatchError
from unisono.metrics import ConfusionCounts, Mean
from unisono.parallel import SyncBatchNorm

with unisono.init():
    rank = unisono.rank()
    layer = SyncBatchNorm(3)
    layer(torch.randn(rank + 2, 3)).sum().backward()
    with pytest.raises(RankMismatchError, match="rank 1: SyncBatchNorm over 4 channels of a batch of 2 at"):
        SyncBatchNorm(3 + rank)(torch.randn(2, 3 + rank))
    with pytest.raises(RankMismatchError, match=r"rank 1: computing of the metrics ConfusionCounts\\(3.*script.py:1"):
        ConfusionCounts(2 + rank).compute()
    loss = layer(torch.randn(2, 3, requires_grad=True)).sum()
    with pytest.raises(RankMismatchError, match="rank 1: backward of SyncBatchNorm over 3 channels"):
        loss.backward() if rank else Mean().compute()
print("ok")
"""


def test_check_mode_says_which_rank_called_what(run_ranks):
    assert run_ranks(2, MISMATCHES, flags=["--check"]).lines(1) == ["ok"]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 4, 3),
        nn.BatchNorm1d(4),
        nn.Unflatten(2, (2, 2)),
        nn.BatchNorm2d(4, momentum=None),
        nn.InstanceNorm2d(4),
    )


def test_one_process_has_the_bits_of_batch_norm():
    plain = network()
    ours = convert_sync_batchnorm(copy.deepcopy(plain))
    batch = torch.randn(3, 2, 6)
    for model in (plain, ours):
        model(batch).square().sum().backward()
    assert torch.equal(ours(batch), plain(batch))
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter.grad, dict(ours.named_parameters())[name].grad)
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in plain.state_dict().items())


def test_conversion_keeps_the_objects_and_goes_back():
    model = network()
    model[3].requires_grad_(False).eval()
    seen = []
    model[1].register_forward_hook(lambda layer, *_: seen.append(layer))
    layers, parameters = list(model), list(model.parameters())
    assert convert_sync_batchnorm(model) is model
    assert [type(layer) for layer in model] == [
        nn.Conv1d,
        SyncBatchNorm,
        nn.Unflatten,
        SyncBatchNorm,
        nn.InstanceNorm2d,
    ]
    assert all(a is b for a, b in zip(model, layers, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert not model[3].training and model[3].momentum is None
    model(torch.randn(3, 2, 6))
    assert seen == [model[1]]
    again = pickle.loads(pickle.dumps(convert_sync_batchnorm(network())))
    for reverted in (revert_sync_batchnorm(model), revert_sync_batchnorm(again)):
        assert [type(layer) for layer in reverted] == [type(layer) for layer in network()]
        assert not {"_was", "process_group"} & vars(reverted[1]).keys()


def test_a_layer_by_itself_and_a_layer_in_two_places():
    layer = nn.BatchNorm2d(3)
    assert convert_sync_batchnorm(layer) is layer and type(layer) is SyncBatchNorm
    assert type(revert_sync_batchnorm(layer)) is nn.BatchNorm2d
    model = convert_sync_batchnorm(nn.ModuleList([layer, layer]))
    assert model[0] is model[1] and type(model[0]) is SyncBatchNorm


def test_torchs_own_layer_is_converted_and_state_dicts_are_exchanged():
    theirs = nn.SyncBatchNorm(3)
    with torch.no_grad():
        theirs.weight.copy_(torch.arange(3.0))
        theirs.running_mean.copy_(torch.arange(3.0))
    ours = SyncBatchNorm(3)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict()) == list(nn.BatchNorm2d(3).state_dict())
    converted = convert_sync_batchnorm(theirs)
    assert type(converted) is SyncBatchNorm and converted.weight.tolist() == [0, 1, 2]
    assert type(revert_sync_batchnorm(converted)) is BatchNormNd
    with pytest.raises(ValueError, match=r"expected \[N, C\] or more dimensions, got shape \[3\]"):
        converted(torch.randn(3))


def test_options_are_those_of_torchs_layer():
    layer = SyncBatchNorm(3, 1e-3, None, True, False, device="cpu", dtype=torch.float64, bias=False)
    assert layer.bias is None and layer.running_mean is None and layer.weight.dtype == torch.float64
    assert "3, eps=0.001, momentum=None" in repr(layer)
    assert SyncBatchNorm(3, affine=False).weight is None


def test_wrong_inputs_are_told_with_one_process_too():
    with pytest.raises(ValueError, match=r"expected 2 channels in dimension 1, got shape \[4, 3\]"):
        SyncBatchNorm(2)(torch.ones(4, 3))
    with pytest.raises(TypeError, match=r"takes floating-point numbers, and got torch\.int64"):
        SyncBatchNorm(2)(torch.ones(4, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match="module is an int"):
        convert_sync_batchnorm(3)


def test_layers_to_leave_alone():
    model = convert_sync_batchnorm(network(), skip=["3"])
    assert type(model[1]) is SyncBatchNorm and type(model[3]) is nn.BatchNorm2d
    with pytest.raises(ValueError, match=r"skip names \['7'\]; the BatchNorm layers are \['1', '3'\]"):
        convert_sync_batchnorm(network(), skip=["7"])


class WithActivation(nn.BatchNorm2d):
    def forward(self, values):
        return super().forward(values).relu()


class Renamed(nn.BatchNorm2d):
    """A subclass that computes the same."""


def test_what_a_conversion_would_break_is_refused_and_nothing_changed():
    model = nn.Sequential(nn.BatchNorm2d(3), WithActivation(3))
    with pytest.raises(TypeError, match=r"layer '1' is a WithActivation with a forward of its own.*skip=\['1'\]"):
        convert_sync_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm2d
    assert type(convert_sync_batchnorm(model, skip=["1"])[0]) is SyncBatchNorm
    with pytest.raises(TypeError, match="the layer is a LazyBatchNorm1d that has seen no input"):
        convert_sync_batchnorm(nn.LazyBatchNorm1d())
    assert type(revert_sync_batchnorm(convert_sync_batchnorm(Renamed(3)))) is Renamed


def test_training_as_one_of_several_ranks_needs_the_group(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    layer = SyncBatchNorm(3)
    with pytest.raises(GroupError, match=r"rank 1 of 2.*unisono.init"):
        layer(torch.randn(2, 3))
    assert layer.eval()(torch.randn(2, 3)).shape == (2, 3)
