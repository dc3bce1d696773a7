"""SyncBatchNorm on several ranks against BatchNorm over the whole batch in one process. Prints ok at the end."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import unisono
from unisono.errors import GroupError, RankMismatchError
from unisono.parallel import SyncBatchNorm, convert_sync_batchnorm, replicate, revert_sync_batchnorm

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
GROUPS = {"gloo": dist.group.WORLD, "shm": dist.new_group(backend="shm")}
# Samples of each rank, one list per step: also none, and one alone; on 3 ranks two steps and the last have both.
STEPS = 2 if SIZE == 3 else 4
SHARES = [[(5 * r + 3 * step) % 4 + (r == 1) for r in range(SIZE)] for step in range(STEPS)] + [[0] * (SIZE - 1) + [6]]
KINDS = {
    "1d": (nn.BatchNorm1d, (), torch.contiguous_format),
    "1d length": (nn.BatchNorm1d, (5,), torch.contiguous_format),
    "2d": (nn.BatchNorm2d, (3, 2), torch.contiguous_format),
    "2d channels last": (nn.BatchNorm2d, (3, 2), torch.channels_last),
    "3d": (nn.BatchNorm3d, (2, 3, 2), torch.contiguous_format),
    "3d channels last": (nn.BatchNorm3d, (2, 3, 2), torch.channels_last_3d),
}
CHANNELS = 4


def total(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def equal_everywhere(tensor: Tensor) -> bool:
    found: list[Tensor] = [torch.empty_like(tensor) for _ in range(SIZE)]
    dist.all_gather(found, tensor)
    return all(torch.equal(found[0], other) for other in found)


def layers(kind, dtype=torch.float64, **options):
    """One layer for the whole batch, and this rank's, with equal parameters."""
    torch.manual_seed(1)
    whole = kind(CHANNELS, dtype=dtype, **options)
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    return whole, convert_sync_batchnorm(copy.deepcopy(whole))


def cut(whole: Tensor, share: list[int]) -> Tensor:
    return whole.split(share)[RANK]


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-12) -> None:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def check_steps(kind: str, group: dist.ProcessGroup, **options: object) -> None:
    make, places, layout = KINDS[kind]
    whole, ours = layers(make, **options)
    ours.process_group = group
    torch.manual_seed(2)
    for share in SHARES:
        batch = torch.randn(sum(share), CHANNELS, *places, dtype=torch.float64) * 3 + 5
        weights = torch.randn_like(batch)
        x = batch.clone().to(memory_format=layout).requires_grad_()
        own = cut(batch, share).clone().to(memory_format=layout).requires_grad_()
        out, expected = ours(own), whole(x)
        close(out, cut(expected, share))
        assert out.is_contiguous(memory_format=layout) or not out.numel()
        (out.sin() * cut(weights, share)).sum().backward()
        (expected.sin() * weights).sum().backward()
        close(own.grad, cut(x.grad, share))
        for name, parameter in ours.named_parameters():
            close(total(parameter.grad), dict(whole.named_parameters())[name].grad)
            parameter.grad = None
        whole.zero_grad()
        for name, buffer in ours.named_buffers():
            close(buffer, dict(whole.named_buffers())[name])
            assert equal_everywhere(buffer)
    assert list(ours.state_dict()) == list(whole.state_dict())
    close(ours.eval()(own), cut(whole.eval()(x), share))


def same_as_one_process() -> None:
    """On 3 ranks each kind on one backend, and each pair of options; on other numbers of ranks all in all ways."""
    kinds = zip(KINDS, itertools.cycle(GROUPS.values()), strict=False)
    for kind, group in kinds if SIZE == 3 else itertools.product(KINDS, GROUPS.values()):
        check_steps(kind, group)
    for number, (affine, momentum, track) in enumerate(
        itertools.product([True, False], [None, 0.0, 1.0], [True, False])
    ):
        if SIZE == 3 and number in {1, 2, 5, 6, 9, 10}:
            continue
        kind = "2d channels last" if affine else "1d"
        check_steps(kind, dist.group.WORLD, affine=affine, momentum=momentum, track_running_stats=track)


def frozen_parts() -> None:
    """Any of input and parameters may need no gradient, also on some ranks only."""
    for frozen in itertools.product([True, False], repeat=3):
        whole, ours = layers(nn.BatchNorm1d)
        batch = torch.randn(6, CHANNELS, dtype=torch.float64)
        share = [2] * SIZE if SIZE == 3 else [6 - SIZE + 1] + [1] * (SIZE - 1)
        x, own = batch.clone(), cut(batch, share).clone()
        for layer, values in ((whole, x), (ours, own)):
            values.requires_grad_(not frozen[0])
            layer.weight.requires_grad_(not frozen[1])
            layer.bias.requires_grad_(not frozen[2])
        if all(frozen):
            close(ours(own), cut(whole(x), share))
            continue
        ours(own).exp().sum().backward()
        whole(x).exp().sum().backward()
        if not frozen[0]:
            close(own.grad, cut(x.grad, share))
        for mine, other in zip(ours.parameters(), whole.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None)
            if mine.grad is not None:
                close(total(mine.grad), other.grad)
    _, ours = layers(nn.BatchNorm1d)
    own = torch.randn(3, CHANNELS, dtype=torch.float64, requires_grad=RANK == 0)
    ours(own).exp().sum().backward()
    assert (own.grad is not None) == (RANK == 0)


def second_derivatives() -> None:
    for make, places in ((nn.BatchNorm1d, ()), (nn.BatchNorm2d, (2, 2))):
        for affine in (True, False):
            whole, ours = layers(make, affine=affine)
            share = [3, 0, 2, 4, 1][:SIZE]
            batch = torch.randn(sum(share), CHANNELS, *places, dtype=torch.float64)
            x, own = batch.clone().requires_grad_(), cut(batch, share).clone().requires_grad_()
            for layer, values in ((whole, x), (ours, own)):
                (first,) = torch.autograd.grad(layer(values).exp().sum(), values, create_graph=True)
                first.square().sum().backward()
            close(own.grad, cut(x.grad, share), 1e-9)
            for mine, other in zip(ours.parameters(), whole.parameters(), strict=True):
                if other.grad is not None:
                    close(total(mine.grad), other.grad, 1e-9)


def low_precision() -> None:
    """16-bit values: statistics in float32, one rounding at the end, whatever the type of the parameters."""
    share = [4, 0, 3, 2, 5][:SIZE]
    for dtype, parameters in itertools.product([torch.bfloat16, torch.float16], [torch.float32, torch.bfloat16]):
        torch.manual_seed(3)
        exact, ours = layers(nn.BatchNorm2d, dtype=torch.float64)[0], layers(nn.BatchNorm2d, dtype=torch.float64)[1]
        for layer in (exact, ours):
            layer.to(parameters)
        exact.double()
        batch = (torch.randn(sum(share), CHANNELS, 3, 3) * 2 + 3).to(dtype)
        x, own = batch.double().requires_grad_(), cut(batch, share).clone().requires_grad_()
        out, expected = ours(own), exact(x)
        assert out.dtype == dtype and ours.running_mean.dtype == parameters
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(out.double(), cut(expected, share), rtol=2 * step, atol=2 * step)
        out.double().sin().sum().backward()
        expected.sin().sum().backward()
        torch.testing.assert_close(own.grad.double(), cut(x.grad, share), rtol=4 * step, atol=4 * step)
        coarse = torch.finfo(parameters).eps
        torch.testing.assert_close(ours.running_var.double(), exact.running_var, rtol=2 * coarse, atol=1e-5)
    model = nn.Sequential(nn.Linear(3, CHANNELS), SyncBatchNorm(CHANNELS))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(torch.randn(share[RANK], 3))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def far_from_zero() -> None:
    """A mean that is large against the spread loses no more than in one process."""
    share = [40, 0, 30, 20, 50][:SIZE]
    torch.manual_seed(4)
    batch = torch.randn(sum(share), CHANNELS) * 0.5 + 3000
    exact = nn.functional.batch_norm(batch.double(), None, None, training=True)
    alone = nn.functional.batch_norm(batch, None, None, training=True)
    ours = SyncBatchNorm(CHANNELS, affine=False)(cut(batch, share))
    lost = total((ours - cut(exact, share)).abs().sum())
    assert lost < 2 * (alone - exact).abs().sum() + 1e-4


def no_values_anywhere() -> None:
    layer = SyncBatchNorm(CHANNELS)
    own = torch.randn(0, CHANNELS, 2, requires_grad=True)
    layer(own).sum().backward()
    assert own.grad.shape == (0, CHANNELS, 2) and not layer.weight.grad.any()
    assert layer.running_var.tolist() == [1] * CHANNELS and layer.num_batches_tracked == 1


def wrong_input() -> None:
    layer = SyncBatchNorm(CHANNELS)
    with pytest.raises(ValueError, match=f"one value per channel .* on all {SIZE} ranks together"):
        layer(torch.randn(int(RANK == 1), CHANNELS))
    assert layer.num_batches_tracked == 0
    grad = torch.enable_grad() if RANK == 0 else torch.no_grad()
    with grad, pytest.raises(RankMismatchError, match=r"rank 0 record gradients .* ranks? 1.* do not"):
        layer(torch.randn(3, CHANNELS))
    with pytest.raises(ValueError, match=r"expected 4 channels in dimension 1, got shape \[3, 5\]"):
        layer(torch.randn(3, 5))
    flat = convert_sync_batchnorm(nn.BatchNorm2d(CHANNELS))
    with pytest.raises(ValueError, match="expected 4D input"):
        flat(torch.randn(3, CHANNELS))
    foreign = dist.new_group([0])
    if RANK:
        with pytest.raises(GroupError, match="this rank is not in the group"):
            SyncBatchNorm(CHANNELS, process_group=foreign)(torch.randn(3, CHANNELS))
    check_steps("1d", dist.group.WORLD)  # nothing of this has put the ranks out of step


def groups_and_copies() -> None:
    """Ranks 0 and 1 normalise together; a copy has the same group; a group of one is local."""
    pair, alone = dist.new_group([0, 1]), [dist.new_group([rank]) for rank in range(SIZE)][RANK]
    torch.manual_seed(5)
    batch = torch.randn(5, CHANNELS)
    if RANK < 2:
        model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(CHANNELS)), pair)
        for ours in (model, copy.deepcopy(model)):
            assert ours[0].process_group is pair
            expected = nn.BatchNorm1d(CHANNELS)(batch).split([3, 2])[RANK]
            torch.testing.assert_close(ours(batch.split([3, 2])[RANK]), expected)
    local = SyncBatchNorm(CHANNELS, process_group=alone)
    assert torch.equal(local(batch + RANK), nn.BatchNorm1d(CHANNELS)(batch + RANK))


def in_a_model() -> None:
    """Under DistributedDataParallel, which refuses torch's layer on the CPU, and replicate: as in one process."""
    for wrap in (DistributedDataParallel, lambda model: replicate(model) and model):
        torch.manual_seed(6)
        norm, last = nn.BatchNorm2d(CHANNELS), nn.Linear(CHANNELS, 2)
        layers = [nn.Conv2d(2, CHANNELS, 3), norm, nn.ReLU(inplace=True), nn.Flatten(), last]
        whole = nn.Sequential(*layers).double()
        ours = convert_sync_batchnorm(copy.deepcopy(whole))
        wrapped = wrap(ours)
        share = [2, 3, 1, 2, 4][:SIZE]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (whole, ours)]
        for _ in range(3):
            batch = torch.randn(sum(share), 2, 3, 3, dtype=torch.float64)
            for optimizer in optimizers:
                optimizer.zero_grad()
            whole(batch).square().sum().div(sum(share)).backward()
            (wrapped(cut(batch, share)).square().sum() * (SIZE / sum(share))).backward()
            for optimizer in optimizers:
                optimizer.step()
        for name, value in ours.state_dict().items():
            close(value, whole.state_dict()[name], 1e-9)
        plain = revert_sync_batchnorm(ours)
        assert type(plain[1]) is nn.BatchNorm2d
        close(plain(batch), whole(batch), 1e-9)


def the_trainer_says_no() -> None:
    model = convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with pytest.raises(ValueError, match=r"'1' is a SyncBatchNorm, .*revert_sync_batchnorm"):
        unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=4)


def checkpointed() -> None:
    """Activations that are computed again in backward, when all ranks come by once more."""
    share = [3, 0, 2, 4, 1][:SIZE]
    batch = torch.randn(sum(share), CHANNELS, dtype=torch.float64)
    for reentrant in (True, False):
        whole, ours = layers(nn.BatchNorm1d)
        x, own = batch.clone().requires_grad_(), cut(batch, share).clone().requires_grad_()
        checkpoint(ours, own, use_reentrant=reentrant).exp().sum().backward()
        whole(x).exp().sum().backward()
        close(own.grad, cut(x.grad, share))


def compiled() -> None:
    whole, ours = layers(nn.BatchNorm1d)
    batch = torch.randn(2 * SIZE, CHANNELS, dtype=torch.float64)
    own = batch.split(2)[RANK].clone().requires_grad_()
    model = torch.compile(nn.Sequential(nn.Tanh(), ours, nn.Tanh()), backend="aot_eager")
    x = batch.clone().requires_grad_()
    model(own).exp().sum().backward()
    whole(x.tanh()).tanh().exp().sum().backward()
    close(own.grad, x.grad.split(2)[RANK], 1e-9)
    torch._dynamo.reset()
    strict = torch.compile(ours, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        strict(own)
    torch._dynamo.reset()
    close(torch.compile(ours.eval(), backend="eager", fullgraph=True)(own), ours(own))


for check in (
    same_as_one_process, frozen_parts, second_derivatives, low_precision, far_from_zero, no_values_anywhere,
    wrong_input, groups_and_copies, in_a_model, the_trainer_says_no, checkpointed, compiled,
):  # fmt: skip
    check()
    print("passed", check.__name__, flush=True)
dist.destroy_process_group()
print("ok", flush=True)
