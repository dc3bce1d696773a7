"""Random collectives over shared memory, each compared, bit by bit, with what this program computes by itself.

    random_calls.py SEED COUNT [sleeps]

All ranks draw the same plan from the seed, and the data of a call from (seed, call, rank): so each rank knows what all
others give, and what it must get. Prints one line at the end.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.shm import Options

SEED, COUNT, SLEEPS = int(sys.argv[1]), int(sys.argv[2]), "sleeps" in sys.argv[3:]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
MOVED = [*FLOATS, *INTEGERS, *COMPLEX, torch.bool, torch.uint16, torch.float8_e4m3fn]
REDUCED = {
    "SUM": [*FLOATS, *INTEGERS, *COMPLEX, torch.bool],
    "PRODUCT": [*FLOATS, *INTEGERS],
    "AVG": [*FLOATS, torch.complex64],
    "PREMUL_SUM": FLOATS,
    "MIN": [*FLOATS, *INTEGERS, torch.bool],
    "MAX": [*FLOATS, *INTEGERS, torch.bool],
    "BAND": [*INTEGERS, torch.bool],
    "BOR": [*INTEGERS, torch.bool],
    "BXOR": [*INTEGERS, torch.bool],
}
FACTOR = 0.5


@dataclass
class Draw:
    """One call, as all ranks draw it."""

    number: int
    name: str
    group: int
    op: str
    dtype: torch.dtype
    numels: list[int]
    root: int
    is_async: bool
    strided: bool
    pause_s: list[float] = field(default_factory=list)


def draw(rng: random.Random, number: int, members: list[list[int]]) -> Draw:
    name = rng.choice(CALLS)
    group = rng.randrange(len(members))
    size = len(members[group])
    op = rng.choice([*REDUCED, "SUM", "SUM", "AVG"])
    dtype = rng.choice(REDUCED[op] if "reduce" in name else MOVED)
    most = rng.choice([0, 3, 40, 40, 2000, 2000, 9000, 70_000, 200_000] if rng.random() < 0.3 else [3, 40, 2000])
    if rng.random() < 0.01:
        most = 1_000_000
    count = rng.randint(0, most)
    numels = [rng.randint(0, max(1, most // size)) for _ in range(size * size)]
    numels[0] = count
    return Draw(
        number,
        name,
        group,
        op,
        dtype,
        numels,
        rng.randrange(size),
        rng.random() < 0.5,
        rng.random() < 0.15,
        [rng.random() * 0.01 if rng.random() < 0.2 else 0.0 for _ in range(size)],
    )


def data(call: Draw, rank: int, numel: int, part: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(((SEED * 1_000_003 + call.number) * 64 + rank) * 64 + part)
    if call.dtype.is_complex:
        return torch.randn(numel, dtype=call.dtype, generator=generator)
    if call.dtype.is_floating_point:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(call.dtype)
    if call.dtype is torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    return torch.randint(0, 100, (numel,), generator=generator).to(call.dtype)


def combine(op: str, parts: list[Tensor]) -> Tensor:
    """The reference: in the order of ranks, 16-bit numbers in float32."""
    dtype = parts[0].dtype
    wide = dtype in (torch.float16, torch.bfloat16) and op in ("SUM", "AVG", "PREMUL_SUM", "PRODUCT")
    if op == "PREMUL_SUM":
        parts = [part * FACTOR for part in parts]
    if wide:
        parts = [part.float() for part in parts]
    total = parts[0].clone()
    for part in parts[1:]:
        if op in ("SUM", "AVG", "PREMUL_SUM"):
            total = total | part if dtype is torch.bool else total + part
        elif op == "PRODUCT":
            total = total * part
        elif op in ("MIN", "MAX"):
            total = torch.where((part < total) if op == "MIN" else (part > total), part, total)
        else:
            total = {"BAND": total & part, "BOR": total | part, "BXOR": total ^ part}[op]
    if op == "AVG":
        (torch.view_as_real(total) if dtype.is_complex else total).div_(len(parts))
    return total.to(dtype)


def spread(tensor: Tensor, strided: bool) -> Tensor:
    """The same values in a tensor whose elements do not lie in order, if asked for."""
    if not strided or tensor.numel() % 2:
        return tensor
    return tensor.view(2, -1).t().contiguous().t()


def like(call: Draw, numel: int) -> Tensor:
    return spread(torch.zeros(numel, dtype=call.dtype), call.strided)


Pending = tuple["dist.Work | None", "list[tuple[Tensor, Tensor]]", Draw]


def reduce_op(call: Draw) -> object:
    return dist._make_nccl_premul_sum(FACTOR) if call.op == "PREMUL_SUM" else getattr(dist.ReduceOp, call.op)


def all_reduce(call, group, me, size):
    parts = [data(call, r, call.numels[0]) for r in range(size)]
    tensor = spread(parts[me].clone(), call.strided)
    work = dist.all_reduce(tensor, reduce_op(call), group=group, async_op=call.is_async)
    return work, [(tensor, combine(call.op, parts))]


def coalesced_all_reduce(call, group, me, size):
    numels = call.numels[: 1 + size]
    parts = [[data(call, r, n, i) for i, n in enumerate(numels)] for r in range(size)]
    tensors = [part.clone() for part in parts[me]]
    opts = torch._C._distributed_c10d.AllreduceCoalescedOptions()
    opts.reduceOp = reduce_op(call)
    opts.asyncOp = call.is_async
    work = group.allreduce_coalesced(tensors, opts)
    if not call.is_async:
        work.wait()
        work = None
    return work, [(t, combine(call.op, [p[i] for p in parts])) for i, t in enumerate(tensors)]


def reduce(call, group, me, size):
    parts = [data(call, r, call.numels[0]) for r in range(size)]
    tensor = spread(parts[me].clone(), call.strided)
    work = dist.reduce(tensor, group_dst=call.root, op=reduce_op(call), group=group, async_op=call.is_async)
    return work, [(tensor, combine(call.op, parts) if me == call.root else parts[me])]


def reduce_scatter_list(call, group, me, size):
    numels = call.numels[:size]
    parts = [[data(call, r, n, i) for i, n in enumerate(numels)] for r in range(size)]
    output = like(call, numels[me])
    work = dist.reduce_scatter(output, parts[me], reduce_op(call), group=group, async_op=call.is_async)
    return work, [(output, combine(call.op, [part[me] for part in parts]))]


def reduce_scatter_tensor(call, group, me, size):
    numel = call.numels[0]
    parts = [data(call, r, numel * size) for r in range(size)]
    output = like(call, numel)
    source = spread(parts[me].clone(), call.strided)
    work = group.reduce_scatter_single(output, source, scatter_options(call))
    if not call.is_async:
        work.wait()
        work = None
    return work, [(output, combine(call.op, [p[me * numel : (me + 1) * numel] for p in parts]))]


def scatter_options(call):
    opts = torch._C._distributed_c10d.ReduceScatterOptions()
    opts.reduceOp, opts.asyncOp = reduce_op(call), call.is_async
    return opts


def broadcast(call, group, me, size):
    tensor = spread(data(call, me, call.numels[0]), call.strided)
    work = dist.broadcast(tensor, group_src=call.root, group=group, async_op=call.is_async)
    return work, [(tensor, data(call, call.root, call.numels[0]))]


def gather(call, group, me, size):
    numel = call.numels[0]
    outputs = [like(call, numel) for _ in range(size)] if me == call.root else None
    work = dist.gather(data(call, me, numel), outputs, group_dst=call.root, group=group, async_op=call.is_async)
    return work, [(output, data(call, r, numel)) for r, output in enumerate(outputs or [])]


def scatter(call, group, me, size):
    numel = call.numels[0]
    inputs = [data(call, call.root, numel, r) for r in range(size)] if me == call.root else None
    output = like(call, numel)
    work = dist.scatter(output, inputs, group_src=call.root, group=group, async_op=call.is_async)
    return work, [(output, data(call, call.root, numel, me))]


def all_gather(call, group, me, size):
    numels = call.numels[:size]
    outputs = [like(call, n) for n in numels]
    work = dist.all_gather(outputs, data(call, me, numels[me]), group=group, async_op=call.is_async)
    return work, [(output, data(call, r, numels[r])) for r, output in enumerate(outputs)]


def all_gather_tensor(call, group, me, size):
    numel = call.numels[0]
    output = like(call, numel * size)
    opts = torch._C._distributed_c10d.AllgatherOptions()
    opts.asyncOp = call.is_async
    work = group.all_gather_single(output, spread(data(call, me, numel), call.strided), opts)
    if not call.is_async:
        work.wait()
        work = None
    return work, [(output, torch.cat([data(call, r, numel) for r in range(size)]))]


def all_to_all_list(call, group, me, size):
    numels = [call.numels[r * size : (r + 1) * size] for r in range(size)]
    inputs = [data(call, me, n, r) for r, n in enumerate(numels[me])]
    outputs = [like(call, numels[r][me]) for r in range(size)]
    work = dist.all_to_all(outputs, inputs, group=group, async_op=call.is_async)
    return work, [(output, data(call, r, numels[r][me], me)) for r, output in enumerate(outputs)]


def all_to_all_single(call, group, me, size):
    numels = [call.numels[r * size : (r + 1) * size] for r in range(size)]
    rows = [torch.cat([data(call, r, n, i) for i, n in enumerate(numels[r])]) for r in range(size)]
    taken = [numels[r][me] for r in range(size)]
    output = torch.zeros(sum(taken), dtype=call.dtype)
    work = dist.all_to_all_single(output, rows[me], taken, numels[me], group=group, async_op=call.is_async)
    return work, [(output, torch.cat([data(call, r, numels[r][me], me) for r in range(size)]))]


def barrier(call, group, me, size):
    return dist.barrier(group=group, async_op=call.is_async), []


FUNCTIONS: dict[str, Callable[..., tuple]] = {
    f.__name__: f
    for f in (
        all_reduce,
        coalesced_all_reduce,
        reduce,
        reduce_scatter_list,
        reduce_scatter_tensor,
        broadcast,
        gather,
        scatter,
        all_gather,
        all_gather_tensor,
        all_to_all_list,
        all_to_all_single,
        barrier,
    )
}
CALLS = [*FUNCTIONS, "all_reduce", "all_reduce"]


def check(pending: Pending) -> None:
    work, results, call = pending
    if work is not None:
        if call.number % 3 == 0:
            done = work.get_future().then(lambda f: len(f.value()))
            work.wait()
            assert isinstance(done.wait(), int)
        work.wait()
    for i, (found, wanted) in enumerate(results):
        same = found.shape == wanted.shape if not call.strided else found.numel() == wanted.numel()
        flat = found.contiguous().view(-1)
        assert same and torch.equal(as_bytes(flat), as_bytes(wanted)), (
            f"result {i} of {call}: {flat[:8]} instead of {wanted[:8]}, rank {dist.get_rank()}"
        )


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def main() -> None:
    dist.init_process_group("shm")
    rank, world = dist.get_rank(), dist.get_world_size()
    rng = random.Random(SEED)
    small = Options(mib=2 if world <= 6 else 24)  # small slots, so that more calls go in pieces
    members = [list(range(world)), list(range(world))]
    groups = [dist.group.WORLD, dist.new_group(pg_options=small)]
    for ranks in ([0, world > 1], list(range(1, world)), [0, world - 1], [world - 1]):
        members.append(sorted({int(r) for r in ranks}) or [0])
        groups.append(dist.new_group(members[-1], pg_options=small))
    pending: list[Pending] = []
    for number in range(COUNT):
        call = draw(rng, number, members)
        waits = [rng.random() for _ in range(8)]
        if rank in members[call.group]:
            me, size = members[call.group].index(rank), len(members[call.group])
            if SLEEPS:
                time.sleep(call.pause_s[me])
            if (call.dtype.is_complex or call.dtype is torch.bool) and call.op == "PRODUCT":
                call.op = "SUM"
            work, results = FUNCTIONS[call.name](call, groups[call.group], me, size)
            pending.append((work, results, call))
        own = random.Random(f"{SEED} {number} {rank}")
        while len(pending) > 6 or (pending and waits[0] < 0.3 and own.random() < 0.5):
            check(pending.pop(own.randrange(len(pending))))
    while pending:
        check(pending.pop())
    dist.barrier()
    dist.destroy_process_group()
    print(f"{COUNT} calls agree")


if __name__ == "__main__":
    main()
