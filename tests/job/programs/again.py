"""Jobs one after another at one address, whose store rank 0 holds. Arguments: how, and how many jobs or which seed.

"late": rank 0 closes the old store some time after the others have come again, or not at all. "busy": rank 0 does
nothing between two jobs, and the machine is busy.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time

import torch
import torch.distributed as dist

import unisono

# Torch asks for the names of addresses; where the name server does not answer, each asking takes 5 s.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"

RANK, N = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PLACES = ("env://", f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}")


def one_job(number: int) -> unisono.Job:
    with unisono.init(init_method=PLACES[number % 2], rank=RANK, world_size=N, timeout=40) as job:
        own = torch.tensor([number * 100 + RANK])
        dist.all_reduce(own)
        assert own.item() == sum(number * 100 + rank for rank in range(N))
        kept.append(job.store("kept"))  # on rank 0 it keeps the store open
    return job


kept: list[object] = []
if sys.argv[1] == "busy":
    for number in range(int(sys.argv[2])):
        one_job(number)
        kept.clear()
else:
    draw = random.Random(int(sys.argv[2]))
    for number, closes in enumerate((True, False, True)):
        one_job(number)
        pause_s = draw.uniform(0.05, 0.2)
        if RANK == 0:
            if closes:
                closing = threading.Timer(pause_s, kept.clear)
                closing.start()
                closing.join()
            time.sleep(pause_s)
        else:
            kept.clear()
print("ok")
