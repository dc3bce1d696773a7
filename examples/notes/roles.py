"""Which process am I? The roles of a job: from unisono, and the environment variables that say the same.

    unisono run -n 2 examples/notes/roles.py
    torchrun --nproc-per-node 2 examples/notes/roles.py      # the same, without prefixes

A job runs on nodes (machines). Each process has a rank in the job and a local rank on its node, where it picks the
GPU. torchrun calls the number of a node "group rank". No script has to parse --local-rank.
"""

import os

import unisono

ROLES = [
    ("rank", unisono.rank, "RANK", "number of this process in the job; 0 is the main one"),
    ("world size", unisono.world_size, "WORLD_SIZE", "processes in the job"),
    ("local rank", unisono.local_rank, "LOCAL_RANK", "number of this process on its node"),
    ("local world size", unisono.local_world_size, "LOCAL_WORLD_SIZE", "processes on this node"),
    ("node rank", unisono.node_rank, "GROUP_RANK", "number of this node"),
]

with unisono.init() as job:
    for name, ask, variable, meaning in ROLES:
        assert str(ask()) == os.environ.get(variable, str(ask()))
        print(f"{name:18} {ask()}   {variable:18} {meaning}")
    print(f"master address and port: {'set' if 'MASTER_ADDR' in os.environ else 'not needed'}, backend: {job.backend}")
    if unisono.is_main():
        print("I am the main process")
