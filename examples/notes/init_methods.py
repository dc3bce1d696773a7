"""How ranks find each other: tcp://, file:// and env://, each tried by two processes that no launcher helps.

    python examples/notes/init_methods.py

Under a launcher, unisono.init() needs no arguments: it finds everything in the environment. By hand, every rank
must be told its rank, the number of ranks and the place to meet. A port that is written into a script clashes with
the next job on the machine; here the system chooses free ones.
"""

import os
import socket
import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as mp

import unisono

WORLD_SIZE = 2


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def meet(rank, methods, port):
    for method in methods:
        if method == "env://":
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            job = unisono.init("gloo", method)
        else:
            job = unisono.init("gloo", method, rank=rank, world_size=WORLD_SIZE)
        with job:  # ends the group, so that the next one can begin
            total = unisono.comm.all_reduce(torch.tensor(rank + 1))
            unisono.print0(f"{method.partition('://')[0]}://: {job.world_size} ranks met, 1 + 2 = {total}", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        methods = [f"tcp://127.0.0.1:{free_port()}", f"file://{Path(folder) / 'meeting'}", "env://"]
        mp.spawn(meet, args=(methods, free_port()), nprocs=WORLD_SIZE)
