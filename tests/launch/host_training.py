"""A training run for jobs on several hosts, and what its launchers print.

The gradient is so large that the ranks of a host add it up in shared memory.
"""

import re
import subprocess
import time

from host_network import Hosts

TRAIN = """
import os, sys, time
import torch
import torch.nn.functional as F
import unisono
if os.environ["RANK"] == os.environ["WORLD_SIZE"]:
    open(f"spare.{os.uname().nodename}", "w").close()
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(6, 3000), torch.nn.Tanh(), torch.nn.Linear(3000, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))
if os.path.exists("hold"):
    open(f"came.{os.getpid()}", "w").close()
trainer = unisono.Trainer(model, optimizer, virtual_ranks=6, seed=5, progress=False)
steps, pause_s, wait = 0, float(sys.argv[1]), len(sys.argv) > 2
def loss(model, batch):
    while sys.argv[3:] and steps == 3 and not os.path.exists(f"spare.{sys.argv[3]}"):
        time.sleep(0.01)
    if wait and not trainer.recovered and steps == 3 and trainer.rank == int(sys.argv[2]):
        os.kill(os.getpid(), 9)
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")
for epoch in trainer.epochs(3):
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(loss, batch)
        steps += 1
        if steps == 2 and trainer.rank == trainer.world_size - 1:
            print("working", flush=True)
        time.sleep(pause_s)
        while steps >= 3 and os.path.exists("hold"):
            time.sleep(0.01)
trainer.print("weights sha256:", trainer.digest())
job = unisono.init()
print("place:", job.rank, job.world_size, job.num_nodes, job.local_world_size, flush=True)
"""


EARLY = ("--rdzv-conf", "last_call_timeout=0.5", "--nnodes")
"""A job begins soon after the least number of hosts, which follows, has come."""


LARGE_TRAIN = TRAIN.replace("3000", "1_000_000")
"""The same with a gradient of 40 MB, of which most deaths leave messages that are partly sent."""


def write(hosts: Hosts, script: str = TRAIN) -> str:
    (hosts.folder / "script.py").write_text(script)
    return "script.py"


def hold(hosts: Hosts) -> None:
    """Let the ranks wait after their third step or a later one, until `go_on`: new ones may take long to start."""
    for came in hosts.folder.glob("came.*"):
        came.unlink()
    (hosts.folder / "hold").touch()


def go_on(hosts: Hosts, *, new: int) -> None:
    """Let the ranks go on once so many new ones have come to their Trainer."""
    deadline_s = time.monotonic() + 60
    while len([*hosts.folder.glob("came.*")]) < new and time.monotonic() < deadline_s:
        time.sleep(0.01)
    (hosts.folder / "hold").unlink()


def sha_of(text: str) -> str:
    found = re.search(r"weights sha256: (\w+)", text)
    assert found is not None, text
    return found[1]


def await_line(job: subprocess.Popen[bytes], text: str, *, stream: str = "stderr") -> str:
    """Read what a launcher prints until a line has a text; return what was read."""
    lines = []
    for line in getattr(job, stream):
        lines.append(line.decode())
        if text in lines[-1]:
            break
    assert lines and text in lines[-1], lines
    return "".join(lines)
