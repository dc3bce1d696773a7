"""What ranks on shared memory say when something goes wrong. Prints one JSON object: scenario, rank, what it said.

    faults.py [SCENARIO ...]

Each scenario runs on ranks that are forked from this process, which has imported torch but has no group.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from unisono.comm.shm import Options

torch.set_num_threads(1)
LIMIT_S = 100
TOGETHER = 5
SCENARIOS: dict[str, tuple[int, Callable[[int], object]]] = {}


def scenario(ranks: int):
    def register(function):
        SCENARIOS[function.__name__] = ranks, function
        return function

    return register


def said(call: Callable[[], object]) -> str:
    """What a call raised."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


MEET = Path()
"""A folder that the ranks of a scenario share."""


def tell(rank: int) -> None:
    """Let ranks that wait for this one go on."""
    (MEET / f"told{rank}").touch()


def wait_for(*ranks: int) -> None:
    """Wait until other ranks have told: this one is late, or still there, whoever is faster."""
    while not all((MEET / f"told{rank}").exists() for rank in ranks):
        time.sleep(0.01)


def vanish() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LIMIT_S)


def both(rank: int, first: Callable[[], object], second: Callable[[], object]) -> list[str]:
    """Rank 0 makes the first call, others the second; then all try another one."""
    return [said(first if rank == 0 else second), said(dist.barrier)]


@scenario(3)
def other_size(rank):
    return both(rank, lambda: dist.all_reduce(torch.ones(4)), lambda: dist.all_reduce(torch.ones(5)))


@scenario(2)
def other_type(rank):
    return both(rank, lambda: dist.all_reduce(torch.ones(4)), lambda: dist.all_reduce(torch.ones(4).double()))


@scenario(2)
def other_reduction(rank):
    return both(rank, lambda: dist.all_reduce(torch.ones(4)), lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX))


@scenario(2)
def other_collective(rank):
    return both(rank, lambda: dist.all_reduce(torch.ones(400_000)), lambda: dist.broadcast(torch.ones(7), 0))


@scenario(2)
def other_root(rank):
    return both(rank, lambda: dist.broadcast(torch.ones(4), 0), lambda: dist.broadcast(torch.ones(4), 1))


@scenario(2)
def other_splits(rank):
    x, y = torch.ones(4), torch.ones(4)
    splits = ([1, 3], [1, 3]) if rank == 0 else ([2, 2], [2, 2])
    return said(lambda: dist.all_to_all_single(y, x, *splits))


@scenario(2)
def uneven_gather(rank):
    outputs = [torch.ones(3), torch.ones(4)] if rank == 0 else [torch.ones(2), torch.ones(5)]
    return said(lambda: dist.all_gather(outputs, torch.ones(3 if rank == 0 else 5)))


@scenario(3)
def late_rank(rank):
    group = dist.new_group(timeout=timedelta(seconds=3))
    if rank == 1:
        wait_for(0, 2)
    said_first = said(lambda: dist.all_reduce(torch.ones(4), group=group))
    tell(rank)
    return [said_first, said(lambda: dist.barrier(group))]


@scenario(2)
def late_for_one_call(rank):
    group = dist.group.WORLD
    if rank == 1:
        wait_for(0)
    found = said(lambda: group.monitored_barrier(timedelta(seconds=0.5)))
    tell(rank)
    return found


@scenario(2)
def impatient_wait(rank):
    tensor = torch.ones(4)
    if rank == 1:
        wait_for(0)
    work = dist.all_reduce(tensor, async_op=True)
    impatient = said(lambda: work.wait(timedelta(seconds=0.2))) if rank == 0 else "nothing"
    tell(rank)
    work.wait()
    dist.all_reduce(tensor)
    return [impatient, tensor.tolist()]


@scenario(3)
def killed_before(rank):
    if rank == 1:
        vanish()
    return [said(lambda: dist.all_reduce(torch.ones(4))), said(dist.barrier)]


@scenario(3)
def killed_in_the_middle(rank):
    tensor = torch.ones(5_000_000)
    if rank == 2:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        os.kill(os.getpid(), 0)
        child = os.fork()
        if not child:
            time.sleep(0.03)
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)

    def many():
        while True:
            dist.all_reduce(tensor)

    return said(many)


@scenario(3)
def killed_after(rank):
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    if rank == 0:
        vanish()
    time.sleep(0.3)
    return [tensor.tolist(), said(dist.barrier)]


@scenario(3)
def killed_with_async_under_way(rank):
    if rank == 0:
        time.sleep(0.2)
        vanish()
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(3)]
    failed = [said(work.wait) for work in works]
    future = said(works[0].get_future().wait)
    return [*failed, future]


@scenario(2)
def root_died_after_its_broadcast(rank):
    tensor = torch.full((1000,), float(rank))
    if rank == 0:
        dist.broadcast(tensor, 0)
        vanish()
    time.sleep(0.3)
    dist.broadcast(tensor, 0)
    return tensor.unique().tolist()


@scenario(3)
def left_the_group(rank):
    if rank == 1:
        dist.destroy_process_group()
        wait_for(0, 2)
        return "left"
    found = said(lambda: dist.all_reduce(torch.ones(4)))
    tell(rank)
    return found


@scenario(3)
def error_of_one_rank(rank):
    """A rank that fails before a call does not break the group."""
    wrong = said(lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.BAND)) if rank == 1 else ""
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    return [wrong, tensor.tolist()]


@scenario(2)
def interrupted(rank):
    if rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            dist.barrier()
        except KeyboardInterrupt:
            tell(rank)
            return said(dist.barrier)
    wait_for(0)
    return said(dist.barrier)


@scenario(2)
def subgroup_breaks_alone(rank):
    group = dist.new_group()
    broken = said(lambda: dist.all_reduce(torch.ones(4 + rank), group=group))
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    return [broken, tensor.tolist()]


@scenario(8)
def too_little_memory(rank):
    started = said(lambda: dist.new_group(pg_options=Options(mib=1) if rank == 0 else None))
    dist.barrier()
    return started


@scenario(2)
def limits_of_the_process(rank):
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
    refused = said(dist.new_group)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    else:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**20, resource.RLIM_INFINITY))
    dist.barrier()
    unmapped = said(dist.new_group)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return [refused, unmapped]


@scenario(2)
def nobody_comes_to_a_new_group(rank):
    if rank == 1:
        wait_for(0)
        return "elsewhere"
    found = said(lambda: dist.new_group(timeout=timedelta(seconds=0.5)))
    tell(rank)
    return found


@scenario(3)
def aborted(rank):
    if rank == 1:
        dist.distributed_c10d._abort_process_group()
        wait_for(0, 2)
        return "aborted"
    found = said(lambda: dist.all_reduce(torch.ones(4)))
    tell(rank)
    return found


def run(name: str) -> list[object]:
    size, function = SCENARIOS[name]
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(size):
            pid = os.fork()
            if not pid:
                os._exit(_be(rank, size, function, Path(folder)))
            pids.append(pid)
        end_s = time.monotonic() + LIMIT_S
        codes = {}
        while len(codes) < size and time.monotonic() < end_s:
            for pid in set(pids) - set(codes):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        for pid in set(pids) - set(codes):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        results: list[object] = []
        for rank, pid in enumerate(pids):
            path = Path(folder) / f"said{rank}"
            results.append(json.loads(path.read_text()) if path.exists() else f"exit code {codes.get(pid, 'none')}")
        return results


def _be(rank: int, size: int, function: Callable[[int], object], folder: Path) -> int:
    global MEET  # noqa: PLW0603  this process is one rank of one scenario
    MEET = folder
    try:
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group("shm", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        found = function(rank)
        (folder / f"tmp{rank}").write_text(json.dumps(found))
        (folder / f"tmp{rank}").rename(folder / f"said{rank}")
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def run_all(names: list[str]) -> dict[str, object]:
    """Run scenarios, a few at a time, each from a process of its own: most of them sleep most of the time."""
    with tempfile.TemporaryDirectory() as folder:
        waiting, running = list(names), {}
        while waiting or running:
            while waiting and len(running) < TOGETHER:
                name = waiting.pop(0)
                pid = os.fork()
                if not pid:
                    (Path(folder) / name).write_text(json.dumps(run(name)))
                    os._exit(0)
                running[pid] = name
            ended, _ = os.wait()
            del running[ended]
        return {name: json.loads((Path(folder) / name).read_text()) for name in names}


if __name__ == "__main__":
    print(json.dumps(run_all(sys.argv[1:] or list(SCENARIOS)), indent=1))
