"""A rank is freed from operations of gloo that would never end, once the launcher has made another decision.

How deaths in the midst of messages end is tested in trainer/test_recovery.py and launch/test_host_kills.py.
"""

from __future__ import annotations

import pytest

SCRIPT = """
import sys, threading, time
import torch
import torch.distributed as dist
import unisono
from unisono.collectives.freed_wait import run_collective, wait_for_message
from unisono.errors import PeerError
from unisono.job import connection_watch, message_abort
from unisono.job.current import active_job

CASE = sys.argv[1]
job = unisono.init("gloo")
watch, numbers = active_job().watch, torch.zeros(1 << 24)

class Link:
    \"\"\"That of a launcher that decides something after a while.\"\"\"
    def __init__(self):
        self.begun_s, self.link = time.monotonic(), watch._link
    def membership(self):
        found = self.link.membership()
        return found._replace(number=found.number + (time.monotonic() > self.begun_s + 0.3))
    def job_failed(self):
        return False

def wait():
    if CASE == "send":
        wait_for_message(dist.isend(numbers, 1))
    elif CASE in ("receive", "old torch"):
        wait_for_message(dist.irecv(numbers, 1))
    elif CASE == "collective":
        run_collective(dist.all_reduce, numbers)
    else:
        unisono.comm.all_gather(numbers)

if job.rank == 0:
    connection_watch.close_connections = lambda _: None  # as if that did not end the operation
    watch._link = Link()
    if CASE == "old torch":
        connection_watch._PATIENCE_S = 0.2
        message_abort._functions = dict
    try:
        wait()
    except PeerError as error:
        print("freed:", error, flush=True)
    try:
        wait()
    except PeerError as error:
        print("again:", error, flush=True)
else:
    time.sleep(1.5)
"""


@pytest.mark.parametrize("case", ["send", "receive", "collective", "comm"])
def test_a_rank_is_freed_from_an_operation_that_never_ends(run_ranks, tmp_path, case):
    (tmp_path / "script.py").write_text(SCRIPT)
    job = run_ranks(2, tmp_path / "script.py", case, code=None)
    freed, again = job.lines(0)
    assert freed == "freed: the connections of the process group were broken, since the launcher replaces or ends ranks"
    assert again == freed.replace("freed", "again")


def test_a_rank_that_cannot_be_freed_ends(run_ranks, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    job = run_ranks(2, tmp_path / "script.py", "old torch", code=None)
    assert "this rank ends: it waits for a message that can never end, since another rank was lost" in job.err
    assert "SIGABRT" in job.err
