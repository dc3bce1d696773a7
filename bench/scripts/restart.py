"""Join a group, sum, lose a rank; after the restart, sum again and write down when: what bench/start.py starts."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
now = time.monotonic()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if dist.get_rank() == 1:
        Path(sys.argv[1]).write_text(str(now))
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(total)
elif dist.get_rank() == 0:
    Path(sys.argv[2]).write_text(str(now))
dist.destroy_process_group()
