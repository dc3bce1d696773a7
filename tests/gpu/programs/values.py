"""Compare what calls on GPUs give with what one process computes; print "NAME ok" for each: `values.py BACKEND`."""

import copy
import os
import sys

import torch
from torch import nn

import unisono
from unisono import comm, metrics, parallel

BACKEND = sys.argv[1]
if BACKEND == "nccl":
    os.environ["NCCL_HOSTID"], os.environ["NCCL_SOCKET_IFNAME"] = os.environ["RANK"], "lo"
job = unisono.init(BACKEND, timeout=90)
rank, ranks, device = job.rank, job.world_size, job.device
assert device.type == "cuda"


def own(tensor):
    """This rank's part of a batch."""
    return tensor.chunk(ranks)[rank]


def close(found, expected, tolerance=1e-5):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, check_dtype=False)


def collectives():
    each = [torch.arange(5.0, device=device) * (r + 1) for r in range(ranks)]
    close(comm.all_reduce(each[rank]), sum(each))
    close(torch.stack(comm.all_gather(each[rank])), torch.stack(each))
    close(comm.reduce_scatter([each[rank] + i for i in range(ranks)]), sum(each) + ranks * rank)
    close(torch.stack(comm.all_to_all([each[rank] * (i + 1) for i in range(ranks)])), torch.stack(each) * (rank + 1))
    got = comm.broadcast({"a": each[rank], "b": [rank]}, src=ranks - 1)
    close(got["a"], each[-1])
    assert got["b"] == [ranks - 1] and got["a"].device == device
    low = each[rank].bfloat16()
    assert comm.all_reduce(low).dtype == torch.bfloat16
    if rank == 0:
        comm.send(each[0], dst=1)
    elif rank == 1:
        close(comm.recv(src=0), each[0])


def batch_norm(dtype, layout):
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(6 * ranks, 8, 5, 5, generator=generator).to(device, dtype).contiguous(memory_format=layout)
    weights = torch.randn(values.shape, generator=generator).to(device, dtype)
    whole = nn.BatchNorm2d(8).to(device)
    mine = parallel.SyncBatchNorm(8).to(device)
    expected_in, own_in = values.clone().requires_grad_(), own(values).clone().requires_grad_()
    expected = whole(expected_in)
    found = mine(own_in)
    (expected * weights).sum().backward()
    (found * own(weights)).sum().backward()
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    close(found, own(expected), tolerance)
    close(own_in.grad, own(expected_in.grad), tolerance)
    close(comm.all_reduce(mine.weight.grad), whole.weight.grad, 30 * tolerance)
    close(comm.all_reduce(mine.bias.grad), whole.bias.grad, 30 * tolerance)
    close(mine.running_var, whole.running_var, tolerance)


def batch_norms():
    for dtype in (torch.float32, torch.bfloat16):
        for layout in (torch.contiguous_format, torch.channels_last):
            batch_norm(dtype, layout)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))


def replicas():
    x = torch.randn(4 * ranks, 16, generator=torch.Generator().manual_seed(3)).to(device)
    whole, mine = net().to(device), net().to(device)
    parallel.replicate(mine)
    for model, part in ((whole, x), (mine, own(x))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(part).square().mean().backward()
            optimizer.step()
    close(list(mine.parameters()), list(whole.parameters()))


def remote_module():
    """On the CPU of its owner, called with tensors on GPUs; and then on its owner's GPU."""
    x = torch.randn(4, 16, device=device)
    whole = net()
    module = parallel.remote(net(), on=ranks - 1)
    module.optimizer(torch.optim.SGD, lr=0.1)
    for place in ("cpu", device):
        module.to(place)
        inputs, expected = x.clone().requires_grad_(), x.clone().cpu().requires_grad_()
        found = module(inputs)
        assert found.device == device
        found.sum().backward()
        whole(expected).sum().backward()
        close(inputs.grad.cpu(), expected.grad)


def devices_of_one_process():
    x = torch.randn(8, 16)
    whole, placed = net(), net()
    parallel.place(placed, {"0": "cuda:0", "1": "cpu", "2": "cuda:0"}, split_size=3)
    close(placed(x).cpu(), whole(x))
    on_gpu = copy.deepcopy(whole).to(device)
    for devices in ([0], [0, "cpu"]):
        close(parallel.DataParallel(on_gpu, devices)(x.to(device)).cpu(), whole(x))


def accuracy():
    logits = torch.randn(5 * ranks, 4, generator=torch.Generator().manual_seed(4)).to(device)
    classes = torch.arange(5 * ranks, device=device) % 4
    metric = metrics.Accuracy()
    metric.update(own(logits), own(classes))
    found = metric.compute()
    assert abs(float(found) - (logits.argmax(1) == classes).float().mean().item()) < 1e-6, found


def gradients_of_collectives():
    x = torch.ones(3, device=device, requires_grad=True)
    comm.all_reduce(x * (rank + 1)).sum().backward()
    close(x.grad, torch.full((3,), float(ranks * (rank + 1)), device=device))


for check in (
    collectives,
    batch_norms,
    replicas,
    remote_module,
    devices_of_one_process,
    accuracy,
    gradients_of_collectives,
):
    check()
    print(f"{check.__name__} ok", flush=True)
