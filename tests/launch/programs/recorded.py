"""torchelastic's @record around a function that fails on one rank."""

import os

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    dist.init_process_group("gloo")
    dist.barrier()
    if os.environ["RANK"] == "1":
        raise ValueError("a bad batch")
    dist.barrier()


if __name__ == "__main__":
    main()
