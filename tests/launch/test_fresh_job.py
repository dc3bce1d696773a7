"""A job as a user starts it, of interpreters that have imported nothing: what only such a one can show.

Most other tests of this folder fork the processes of a job from one that has imported torch; see launch_host.py. In the
long suite several of them start a fresh job as well.
"""

import subprocess
import sys

from launcher import Launcher
from unisono.machine import usable_cores

SCRIPT = """
    import json, os, sys
    modules = [name in sys.modules for name in ("torch._dynamo", "unisono.trainer")]  # unisono.Trainer is named here
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(24, 8))
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    for (batch,) in DataLoader(data, batch_size=4, sampler=DistributedSampler(data), num_workers=2):
        model(batch).square().mean().backward()
    total = torch.ones(1)
    dist.all_reduce(total)
    print(json.dumps([modules, torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], total.item()]))
    dist.destroy_process_group()
"""


def test_a_fresh_job_is_quiet_and_imports_once_what_it_needs_and_its_agent_next_to_nothing(fresh_launcher):
    fresh_launcher.write("script.py", SCRIPT)
    command = [sys.executable, "-X", "importtime", "-m", "unisono", "run", "-n", "2", "-m", "script"]
    result = subprocess.run(
        command, cwd=fresh_launcher.folder, env=fresh_launcher.environment, capture_output=True, text=True, check=False
    )
    imported, said = set(), []
    for line in result.stderr.splitlines():
        if line.startswith("import time:"):
            imported.add(line.rpartition("|")[2].strip().partition(".")[0])
        else:
            said.append(line)
    assert (said, result.returncode) == ([], 0)
    assert "unisono" in imported
    assert not imported & {"torch", "rich", "numpy"}
    # torch reads the number of threads when it is imported.
    threads = max(1, usable_cores() // 2)
    assert Launcher.values(result) == {rank: [[True, True], threads, str(threads), 2.0] for rank in range(2)}
