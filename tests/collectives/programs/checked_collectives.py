"""Ranks that diverge, in check mode: all of them print one error, and go on.

It is run as `unisono run --check -n 3 checked_collectives.py crossed`, and with "late" or "ended" for the last call
alone.
"""

import os
import sys
import time

import torch

import unisono
from unisono import comm

unisono.init("gloo")
RANK, SIZE = unisono.rank(), unisono.world_size()
ODD = RANK == 1
pair = unisono.subgroup([0, 1])


def crossed():
    if RANK == 0:
        comm.barrier(group=pair)
    else:
        comm.barrier()


def late():
    group = unisono.subgroup(range(SIZE))
    os.environ["UNISONO_CHECK_TIMEOUT"] = "2"  # it is read when the group is first used
    comm.barrier()
    if ODD:
        time.sleep(100)
    comm.barrier(group=group)


CASES = {
    "shape": lambda: comm.all_reduce(torch.ones(3 + ODD)),
    "type": lambda: comm.reduce_scatter(torch.ones(3, dtype=torch.float64 if ODD else torch.float32)),
    "gradient": lambda: comm.all_reduce(torch.ones(3, requires_grad=ODD)),
    "tensor or number": lambda: comm.all_reduce(torch.ones(()) if ODD else 1.0),
    "structure": lambda: comm.all_reduce({"a": torch.ones(2), "b": torch.ones(3 + ODD)}),
    "op": lambda: comm.all_reduce(torch.ones(2), "max" if ODD else "sum"),
    "root": lambda: comm.broadcast(1, src=int(ODD)),
    "call": lambda: comm.barrier() if ODD else comm.all_gather(1),
    "uniform": lambda: comm.all_gather(torch.ones(2 + ODD), uniform=True),
    "template": lambda: comm.broadcast(torch.ones(2 + ODD), uniform=True),
}
assert comm.all_reduce(torch.ones(2)).tolist() == [SIZE] * 2
assert comm.all_gather("x" * RANK) == ["x" * rank for rank in range(SIZE)]
assert comm.broadcast({"a": 1} if RANK == 0 else None) == {"a": 1}
for name, call in CASES.items() if sys.argv[1] == "crossed" else ():
    try:
        said = f"gave {call()}"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print(f"{name} | " + said.replace("\n", " / "), flush=True)
if sys.argv[1] == "crossed":
    crossed()
if sys.argv[1] == "late":
    late()
if sys.argv[1] == "ended" and not ODD:
    comm.barrier()
