"""Ranks part, each time in a group of its own and all at once; prints what each rank is told. Argument: the backend.

At last they part in the group of all, and nobody catches the error.
"""

import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import unisono
from unisono import comm

unisono.init(sys.argv[1])
rank = unisono.rank()
patience = 1 if sys.argv[1] == "gloo" else 0.1  # of what looks late


def wait(group):
    x = torch.ones(3, requires_grad=True)
    total = comm.all_reduce(x, group=group).sum()
    if rank == 1:
        total.backward()
    else:
        comm.barrier(group=group)


def order(group):
    tensor = torch.ones(3)
    if rank == 1:
        comm.barrier(group=group)
    comm.broadcast(tensor, uniform=True, group=group)
    if rank != 1:
        comm.barrier(group=group)


def slow(group):
    if rank == 1:
        time.sleep(1.7 * patience)
    return comm.all_reduce(torch.ones(2), group=group).tolist()


def slow_objects(group):
    if rank == 1:
        time.sleep(1.5 * patience)
    first = comm.all_gather("x" * 2000 if rank == 1 else rank, group=group)
    if rank == 2:
        time.sleep(1.5 * patience)
    return [len(first[1]), comm.scatter([0, "a", None] if rank == 2 else None, src=2, group=group)]


def either(usual, other):
    return other if rank == 1 else usual


def tensor(group):
    return comm.all_reduce(torch.ones(2, 2), group=group)


def barrier(group):
    comm.barrier(group=group)


CASES = {
    "number": either(tensor, lambda group: comm.all_reduce(3.0, group=group)),
    "structure": either(tensor, lambda group: comm.all_reduce({"a": torch.ones(2, 2)}, group=group)),
    "barrier": either(tensor, barrier),
    "object": either(lambda group: comm.all_gather("x", group=group), tensor),
    "uniform": either(
        lambda group: comm.all_gather(torch.ones(2), uniform=True, group=group),
        lambda group: comm.all_to_all(torch.ones(6), uniform=True, group=group),
    ),
    "parts": either(
        lambda group: comm.reduce_scatter(torch.ones(6), group=group),
        lambda group: comm.scatter(src=0, group=group),
    ),
    "backward": wait,
    "order": order,
    "subgroup": either(tensor, barrier),
    "slow": slow,
    "slow objects": slow_objects,
}


def part(name, group):
    try:
        said = f"gave {CASES[name](group)}"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    told[name] = said.replace("\n", " / ")


told: dict[str, str] = {}
some = {"subgroup": [0, 1]}
groups = {
    name: dist.new_group(some.get(name, [0, 1, 2]), backend=sys.argv[1], timeout=timedelta(seconds=600))
    for name in CASES
}
threads = [threading.Thread(target=part, args=(name, groups[name])) for name in CASES if rank in some.get(name, [rank])]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for name, said in told.items():
    print(f"{name} | {said}", flush=True)
try:
    barrier(groups["barrier"])
except Exception as error:
    print(f"again | {type(error).__name__}", flush=True)
store = dist.distributed_c10d._get_default_store()
try:
    if rank == 1:
        comm.barrier()
    comm.all_reduce(torch.ones(1))
finally:
    # Rank 0, whose process has the store, ends when the others have looked there for what went wrong.
    store.set(f"ended {rank}", "")
    if rank == 0:
        store.wait(["ended 1", "ended 2"], timedelta(seconds=60))
