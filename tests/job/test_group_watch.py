"""A group whose operations would wait for the dead is watched where ranks are replaced, and nowhere else.

How ranks are freed is tested in trainer/test_recovery.py. The backend "unending" treats a rank's death as NCCL does.
"""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[1] / "trainer" / "programs"
SCRIPT = f"""
import os, sys, threading, time
sys.path.insert(0, {str(PROGRAMS)!r})
import torch.distributed as dist
import unending_backend
import unisono
from unisono.job import group_watch

NAMES = {{"1": "teardown", "0": "survives", None: "torch's own"}}
unending_backend.register()

def say(backend, end):
    job = unisono.init(backend)
    made = NAMES[getattr(dist.group.WORLD, "settings", None)]
    later = NAMES[os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")]
    watched = [t.name for t in threading.enumerate() if t.name == "unisono group watch"]
    unisono.comm.barrier()
    end(job)
    left = [t.name for t in threading.enumerate() if t.name == "unisono group watch"]
    print(backend, made, later, len(watched), len(left), flush=True)
"""
ENDS = """
say("unending", lambda job: job.end())
say("gloo", lambda job: job.end())
"""
FAILS = """
group_watch._PATIENCE_S = 0.2
job = unisono.init("unending")
unisono.comm.barrier()
if job.rank == 1:
    dist.group.WORLD.error = "TIMEOUT"
time.sleep(60)
"""

TRAINS = """
import signal
import torch

unisono.init("unending")
model = torch.nn.Linear(4, 1)
options = {"virtual_ranks": 2, "engine": "collective", "progress": False}
trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
data = torch.utils.data.TensorDataset(torch.ones(8, 4))
for epoch in trainer.epochs(1):
    for batch in trainer.batches(data, batch_size=4):
        trainer.step(lambda model, x: model(x[0]).square().squeeze(1), batch)
        if trainer.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        total = torch.ones(3)
        dist.all_reduce(total)
        print("the total is", total.tolist(), flush=True)
"""

DECIDES = """
from unisono import recovery_link
from unisono.errors import PeerError
from unisono.job.current import confirm_group, guard_group
from unisono.recovery_link import Membership

class Link:
    is_new = False
    latest, known_to_all = Membership(3, (), 1), 3

    def membership(self):
        return self.latest

    def settled(self):
        return self.known_to_all

    def await_rank(self):
        pass

recovery_link.current = link = Link()
unisono.init("unending", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
guard_group(lambda: True)
confirm_group()
link.latest = Membership(4, (1,), 2)
time.sleep(0.2)
print("aborted before all can know:", group.is_aborted)
try:
    confirm_group()
except PeerError:
    print("not confirmed")
link.known_to_all = 4
while not group.is_aborted:
    time.sleep(0.01)
print("aborted")
"""


@pytest.mark.parametrize(
    ("flags", "made"), [([], ["survives", "1"]), (["--recover", "off"], ["teardown", "0"])], ids=["on", "off"]
)
def test_a_group_is_watched_until_its_job_ends(run_ranks, flags, made):
    job = run_ranks(2, SCRIPT + ENDS, flags=flags)
    settings, watches = made
    expected = [f"unending {settings} teardown {watches} 0", "gloo torch's own teardown 0 0"]
    assert job.lines(0) == job.lines(1) == expected


def test_a_rank_aborts_once_all_can_know_and_confirms_nothing_from_then_on(fork_ranks):
    job = fork_ranks(1, SCRIPT + DECIDES)
    assert job.lines() == ["aborted before all can know: False", "not confirmed", "aborted"]


def test_no_script_gets_a_result_of_its_own_collective_that_was_aborted(run_ranks):
    job = run_ranks(2, SCRIPT + TRAINS, code=None)
    assert job.code != 0
    assert "the total is" not in job.out
    assert "rank 0 ends, since its process group was aborted in a collective of the script" in job.said
    assert "no rank can be replaced alone: ranks call collectives of torch.distributed or unisono.comm" in job.said


def test_a_process_ends_when_its_group_fails_though_no_rank_has_died(run_ranks):
    job = run_ranks(2, SCRIPT + FAILS, code=None)
    assert job.code != 0
    assert "rank 1 ends, since its process group has failed (TIMEOUT), and no other rank has died" in job.said
