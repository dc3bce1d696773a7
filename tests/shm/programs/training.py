"""What trains with torch.distributed in many ways, on 2 ranks, and prints a digest of each result.

The program knows nothing of unisono: it asks for gloo. With two ranks a sum has one order, so every backend gives the
same bits. Usage: training.py FOLDER [NAME ...]
"""

import hashlib
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

warnings.simplefilter("ignore")
torch.set_num_threads(1)


def digest(*things):
    """Hash tensors, bit by bit."""
    sha = hashlib.sha256()
    for thing in things:
        for tensor in thing.state_dict().values() if isinstance(thing, nn.Module) else [thing]:
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            sha.update(full.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def mlp(*, norm=False):
    """Build the same network on all ranks."""
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(32)] if norm else []
    return nn.Sequential(nn.Linear(16, 32), *middle, nn.ReLU(), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))


def batches(n=4, size=8):
    """Draw this rank's batches."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return [
        (torch.randn(size, 16, generator=generator), torch.randint(4, (size,), generator=generator)) for _ in range(n)
    ]


def train(model, optimizer=None, n=4):
    """Take some steps."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in batches(n):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def ddp(**options):
    """Wrap the network in DDP with small buckets, so that there are several."""
    return DistributedDataParallel(mlp(norm=options.pop("norm", False)), bucket_cap_mb=0.005, **options)


def plain():
    return digest(train(ddp(norm=True)))


def views_and_static_graph():
    return digest(train(ddp(gradient_as_bucket_view=True)), train(ddp(static_graph=True)))


def unused_parameters():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([mlp(), mlp()])
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return self.parts[(self.calls + dist.get_rank()) % 2](x)

    return digest(train(DistributedDataParallel(Branches(), find_unused_parameters=True)))


def accumulation():
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(batches(6)):
        if i % 3 < 2:
            with model.no_sync():
                F.cross_entropy(model(x), y).backward()
        else:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return digest(model)


def uneven_inputs():
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for x, y in batches(3 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return digest(model)


def hooks():
    def bf16(state, bucket):  # torch refuses the hook itself by its name, except for NCCL
        return default_hooks.bf16_compress_hook(state, bucket)

    results = []
    for hook in (bf16, default_hooks.fp16_compress_hook, default_hooks.allreduce_hook):
        model = ddp()
        model.register_comm_hook(None, hook)
        results.append(train(model))
    model = DistributedDataParallel(mlp())  # one bucket: with several, gloo may mix up its calls
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return digest(*results, train(model))


def local_sgd():
    model = ddp()
    own, _ = dist.new_subgroups(1)
    state = post_localSGD_hook.PostLocalSGDState(None, own, start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    return digest(train(model, PostLocalSGDOptimizer(inner, averager), n=6))


def zero():
    model = ddp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01)
    train(model, optimizer)
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
    return digest(model)


def shards():
    results = []
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for policy in (MixedPrecisionPolicy(), mixed):
        model = mlp()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
        results.append(train(model))
    return digest(*results)


def saved_and_loaded():
    def sharded():
        return fully_shard(mlp(), mesh=init_device_mesh("cpu", (2,)))

    folder = Path(sys.argv[1], "checkpoint")
    before, after = train(sharded()), sharded()
    checkpoint.save(get_model_state_dict(before), checkpoint_id=folder)
    state = get_model_state_dict(after)
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(after, state)
    assert digest(after) == digest(before)
    return digest(after)


def tensors():
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    a, b = torch.randn(6, 8), torch.randn(8, 10)
    product = distribute_tensor(a, mesh, [Shard(1)]) @ distribute_tensor(b, mesh, [Shard(0)])
    rows = product.redistribute(placements=[Shard(0)])
    columns = rows.redistribute(placements=[Shard(1)])
    uneven = distribute_tensor(torch.arange(7.0), mesh, [Shard(0)]).redistribute(placements=[Replicate()])
    model = parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    outputs = model(a.repeat(1, 2))
    outputs.sum().backward()
    return digest(product, rows, columns, uneven, outputs, model[0].weight.grad, model[2].weight.grad)


def functions():
    x = torch.arange(8.0) + dist.get_rank()
    group = dist.group.WORLD
    found = [
        functional.all_reduce(x, "sum", group),
        functional.all_reduce(x, "max", group),
        functional.all_gather_tensor(x, 0, group),
        functional.reduce_scatter_tensor(x, "sum", 0, group),
        functional.all_to_all_single(x, [4, 4], [4, 4], group),
        functional.broadcast(x, 1, group),
        *functional.all_reduce_coalesced([x, x + 1], "sum", group),
    ]
    return digest(*[functional.wait_tensor(tensor) for tensor in found])


def pipeline():
    rank, results = dist.get_rank(), []
    for schedule in (ScheduleGPipe, Schedule1F1B):
        whole = mlp()
        half = whole[:2] if rank == 0 else whole[2:]
        stage = PipelineStage(half, rank, 2, torch.device("cpu"))
        runner = schedule(stage, n_microbatches=4, loss_fn=F.cross_entropy)
        generator = torch.Generator().manual_seed(1)
        optimizer = torch.optim.SGD(half.parameters(), lr=0.1)
        for _ in range(3):
            x, y = torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)
            optimizer.zero_grad()
            runner.step(x) if rank == 0 else runner.step(target=y)
            optimizer.step()
        results.append(half)
    return digest(*results)


CASES = (plain, views_and_static_graph, unused_parameters, accumulation, uneven_inputs, hooks, local_sgd, zero, shards,
         saved_and_loaded, tensors, functions, pipeline)  # fmt: skip

dist.init_process_group("gloo")
assert dist.get_backend() == "gloo"
for case in CASES:
    if case.__name__ in sys.argv[2:] or not sys.argv[2:]:
        print(case.__name__, case(), flush=True)
print("made by", type(dist.group.WORLD).__name__)
dist.destroy_process_group()
