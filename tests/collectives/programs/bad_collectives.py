"""Wrong calls of the collectives: every rank prints what it is told, and the group works afterwards.

It is run as `unisono run -n 3 bad_collectives.py`.
"""

import sys
import threading

import torch
import torch.distributed as dist

import unisono
from unisono import comm

unisono.init(sys.argv[1])
RANK, SIZE = unisono.rank(), unisono.world_size()
ODD = RANK == 1
pair = unisono.subgroup([0, 1])
ended = unisono.subgroup([0, 1, 2])
dist.destroy_process_group(ended)

if RANK == 0:

    class OfRankZero:
        pass


CASES = {
    # The same mistake on all ranks.
    "rank outside": lambda: comm.broadcast(1, src=7),
    "no rank": lambda: comm.gather(1, dst="0"),
    "unknown op": lambda: comm.all_reduce(1, "average"),
    "whole mean": lambda: comm.all_reduce(torch.ones(2, dtype=torch.int64), "mean"),
    "bits of floats": lambda: comm.all_reduce({"a": torch.ones(2)}, "bor"),
    "words": lambda: comm.all_reduce({"name": "x"}),
    "to itself": lambda: comm.send(1, RANK),
    "tag": lambda: comm.send(1, (RANK + 1) % SIZE, tag=-1),
    "not divisible": lambda: comm.reduce_scatter(torch.ones(4, 2)),
    "uniform word": lambda: comm.all_gather("x", uniform=True),
    "concat of numbers": lambda: comm.all_gather({"n": 1}, concat=0),
    "concat by name": lambda: comm.all_gather(torch.ones(1), concat="0"),
    "concat of a scalar": lambda: comm.all_gather(torch.tensor(1.0), concat=0),
    "a group that is none": lambda: comm.barrier(group="world"),
    "an ended group": lambda: comm.barrier(group=ended),
    "meta": lambda: comm.all_reduce(torch.ones(2, device="meta")),
    # A mistake of one rank, of which the others hear.
    "structure": lambda: comm.all_reduce({"a": 1, "b": torch.ones(4 - ODD)}),
    "a key more": lambda: comm.all_reduce({"a": 1, **({"z": 2} if ODD else {})}),
    "type": lambda: comm.reduce([torch.ones(2, dtype=torch.float64 if ODD else torch.float32)]),
    "word on one": lambda: comm.all_reduce(["x"] if ODD else [1]),
    "other op": lambda: comm.all_reduce([1], "max" if ODD else "sum"),
    "other call": lambda: comm.gather(1) if ODD else comm.all_gather(1),
    "lock": lambda: comm.all_gather({"a": [threading.Lock()]} if ODD else {}),
    "lock from the root": lambda: comm.broadcast(threading.Lock() if ODD else None, src=1),
    "number of values": lambda: comm.scatter([1, 2] if ODD else None, src=1),
    "number of values to all": lambda: comm.all_to_all([1, 2] if ODD else [1, 2, 3]),
    "values are none": lambda: comm.scatter(None, src=1),
    "widths": lambda: comm.all_gather({"x": torch.ones(2, 3 + ODD)}, concat=0),
    "parts": lambda: comm.reduce_scatter([1, 2] if ODD else [1, 2, 3]),
    "message": lambda: comm.send(threading.Lock(), 0) if ODD else comm.recv(1) if RANK == 0 else None,
    "root of one": lambda: comm.gather(1, dst=7 if ODD else 0),
    "op of one": lambda: comm.all_reduce(1, "sun" if ODD else "sum"),
    "class": lambda: comm.broadcast(OfRankZero() if RANK == 0 else None),
    "gradients": lambda: unfollowed() if ODD else comm.all_gather(torch.ones(2, requires_grad=True)),
    "no member": lambda: comm.all_reduce(1, group=pair) and None,
    "root no member": lambda: RANK < 2 and comm.broadcast(1, src=2, group=pair),
}


def unfollowed():
    with torch.no_grad():
        return comm.all_gather(torch.ones(2))


for name, call in CASES.items():
    try:
        said = f"gave {call()}"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print(f"{name} | {said}", flush=True)
    assert comm.all_reduce(1) == SIZE, name
