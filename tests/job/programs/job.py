"""`unisono.init` on several ranks under `unisono run`: what it finds, refuses and ends. Prints "ok" per check.

Argument: a folder.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import unisono
from unisono.errors import GroupError, LaunchError, PeerError, RankMismatchError
from unisono.job.current import require_group


def expect(kind: type[Exception], *words: str, call: Callable[[], Any]) -> None:
    """Check that a call raises, and what it says."""
    try:
        call()
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in {error}"
    else:
        raise AssertionError(f"no {kind.__name__}")


def sum_of_ranks() -> int:
    """All-reduce by torch's own function."""
    own = torch.tensor([unisono.rank() + 1])
    dist.all_reduce(own)
    return int(own)


def before() -> None:
    assert not dist.is_initialized()
    assert unisono.world_size() == unisono.local_world_size() == N
    assert unisono.rank() == unisono.local_rank()
    assert unisono.node_rank() == 0
    expect(GroupError, f"rank {RANK} of {N}", "call unisono.init()", call=require_group)
    expect(GroupError, "call unisono.init()", call=lambda: unisono.subgroup([0]))


def ranks_that_differ() -> None:
    expect(RankMismatchError, "rank 0: 'gloo', rank 1: 'shm'", call=lambda: unisono.init("shm" if RANK else "gloo"))
    wrong = lambda: unisono.init(device="cuda:7" if RANK == 1 else None)  # noqa: E731
    if RANK == 1:
        expect(LaunchError, "'cuda:7'", call=wrong)
    else:
        expect(PeerError, "rank 1 could not join", "'cuda:7'", call=wrong)
    late = lambda: unisono.init(timeout=2)  # noqa: E731
    if RANK == 1:
        while not all((FOLDER / f"given-up-{rank}").exists() for rank in (0, 2)):
            time.sleep(0.01)
        expect(PeerError, "did not join", call=late)
    else:
        expect(PeerError, "rank 1 did not join the 3 ranks", "within 2 s", call=late)
        (FOLDER / f"given-up-{RANK}").touch()


def one_job() -> None:
    job = unisono.init(timeout=60)
    assert (job.rank, job.world_size, job.backend, job.device) == (RANK, N, "shm", torch.device("cpu"))
    assert dist.get_backend() == "shm"
    assert sum_of_ranks() == N * (N + 1) // 2
    assert unisono.init() == job
    assert unisono.init("auto", None, rank=RANK, world_size=N, timeout=60, device="cpu") == job
    with unisono.init():  # did not begin it, so does not end it
        pass
    assert require_group() is dist.group.WORLD is job.group
    expect(ValueError, "backend=mpi", "has shm", call=lambda: unisono.init("mpi"))
    expect(ValueError, "timeout=0:00:05", "has 0:01:00", call=lambda: unisono.init(timeout=5))
    expect(ValueError, "rank=7", f"has {RANK}", call=lambda: unisono.init(rank=7, world_size=9))
    expect(ValueError, "init_method=tcp://a:1", call=lambda: unisono.init(init_method="tcp://a:1"))
    expect(ValueError, "a store is given", call=lambda: unisono.init(store=dist.HashStore()))
    expect(TypeError, "group=7", call=lambda: require_group(7))
    job.end()
    job.end()
    assert not dist.is_initialized()
    assert unisono.rank() == RANK
    expect(GroupError, f"the job of {N} ranks has ended", call=require_group)
    expect(GroupError, "has ended", call=lambda: job.group)
    expect(GroupError, "has ended", call=lambda: job.store("a"))


def again() -> None:
    for _ in range(2):
        with unisono.init("gloo") as job:
            assert sum_of_ranks() == N * (N + 1) // 2
            assert job.exchange("a", RANK, doing="come") == list(range(N))
            assert job.exchange("a", -RANK, doing="come") == [-rank for rank in range(N)]
        assert not dist.is_initialized()


def groups_of_the_script() -> None:
    dist.init_process_group("gloo")
    assert unisono.world_size() == N
    expect(ValueError, "backend='shm'", "'gloo'", call=lambda: unisono.init("shm"))
    with unisono.init() as job:
        assert (job.backend, job.group) == ("gloo", dist.group.WORLD)
        assert unisono.split(RANK).size() == 1
    assert dist.is_initialized()  # it is the script's
    dist.destroy_process_group()
    expect(GroupError, call=lambda: job.group)
    with unisono.init():
        assert sum_of_ranks() == N * (N + 1) // 2


def trainers() -> None:
    """A Trainer uses the job that is there, and one that it begins is found by init."""

    def train() -> str:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=6, progress=False)
        data = torch.utils.data.TensorDataset(torch.arange(36.0).view(12, 3) / 36)
        for batch in trainer.batches(data, batch_size=6):
            trainer.step(lambda m, b: m(b[0]).square().sum(1), batch)
        return trainer.digest()

    with unisono.init() as job:
        first = train()
        assert unisono.init() == job
    second = train()
    job = unisono.init()
    assert job.backend == "shm"
    assert first == second
    assert sum_of_ranks() == N * (N + 1) // 2


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    RANK, N = unisono.rank(), unisono.world_size()
    for check in (before, ranks_that_differ, one_job, again, groups_of_the_script, trainers):
        check()
        print(f"ok {check.__name__}")
    # The last job is left to the exit.
