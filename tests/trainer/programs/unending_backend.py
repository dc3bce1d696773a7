"""A backend for the CPU that treats a rank whose peer has died as NCCL does; for programs of tests.

An operation that cannot end waits in silence until the group is aborted, on this rank or on another one. Then it
returns without an error, and leaves what has been in its tensors. Operations that are begun after an abort on this rank
are refused. All else is the backend shm.
"""

import os
import threading
import time
from pathlib import Path

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from unisono.job.group_watch import declare_unending
from unisono.shm.process_group import ProcessGroupShm
from unisono.shm.runtime import GroupRuntime
from unisono.shm.segment_layout import Options
from unisono.shm.work import Work

NAME = "unending"


class Unending(dist.Work):
    """An operation that has been begun."""

    def __init__(self, group, work):
        super().__init__()
        self._group, self._work = group, work

    def is_completed(self):
        return self._work is not None and self._work.is_completed() and self._work.is_success()

    def is_success(self):
        return self.is_completed()

    def wait(self, timeout=None):
        if self._work is not None:
            try:
                return self._work.wait()
            except dist.DistBackendError as error:
                if "was left by rank" in str(error):
                    return True
        while not self._group.is_aborted:
            time.sleep(0.001)
        self._group.note("freed")
        return True


def unending(name):
    method = getattr(ProcessGroupShm, name)

    def call(self, *args, **options):
        if self.is_aborted:
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self.rank()}.")
        try:
            work = method(self, *args, **options)
        except dist.DistBackendError as error:
            work = Work() if "was left by rank" in str(error) else None
            if work is not None:
                work.finish()
        return Unending(self, work)

    return call


class ProcessGroupUnending(ProcessGroupShm):
    """See above. The folder UNENDING_FOLDER gets a file for each operation that is freed, and each abort by a watch."""

    is_aborted = False
    error = "SUCCESS"
    hangs = False
    """True if it cannot be aborted."""
    settings = ""

    for _name in (
        "allreduce", "allgather", "_allgather_base", "all_gather_single", "broadcast", "gather", "scatter", "reduce",
        "send", "recv", "barrier",
    ):  # fmt: skip
        locals()[_name] = unending(_name)

    def note(self, what):
        if folder := os.environ.get("UNENDING_FOLDER"):
            number = len(list(Path(folder).glob(f"{what}.{os.getpid()}.*")))
            (Path(folder) / f"{what}.{os.getpid()}.{number}").touch()

    def abort(self):
        if not self.is_aborted and threading.current_thread() is not threading.main_thread():
            self.note("aborted")
        if self.hangs:
            time.sleep(60)
        self.is_aborted = True
        super().abort()

    def get_error(self):
        return getattr(c10d.ErrorType, self.error)

    def name(self):
        return NAME


def make_group(asked, pg_options):
    runtime = GroupRuntime(
        asked.store,
        asked.group_rank,
        asked.group_size,
        timeout=asked.timeout,
        ranks=asked.global_ranks_in_group,
        name=asked.group_id,
        options=Options.choose(pg_options, os.environ),
    )
    group = ProcessGroupUnending(runtime)
    group.settings = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    return group


def register():
    """Register the backend in this process, as one whose operations wait for the dead."""
    dist.Backend.register_backend(NAME, make_group, extended_api=True, devices=["cpu"])
    declare_unending(NAME)
