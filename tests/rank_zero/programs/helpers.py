"""Rank-zero helpers on four ranks of two pretended nodes. Prints what the test compares."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import unisono
from unisono.errors import PeerError

RANK = unisono.rank()
FOLDER = Path(sys.argv[1])


def printing() -> None:
    unisono.print0("once", RANK, sep="=")
    unisono.print0("per node", RANK, local=True)
    log = unisono.get_logger("a")
    log.info("quiet from %d", RANK)
    log.warning("loud from %d", RANK)
    assert unisono.get_logger("a") is log
    assert len(log.handlers) == 1
    unisono.get_logger("b", level="ERROR", others="DEBUG").debug("debug from %d", RANK)


def turns() -> None:
    """The first one writes what the others read, though they come earlier."""
    file = FOLDER / "cache"
    with unisono.main_first():
        if RANK == 0:
            time.sleep(0.3)
            file.write_text("data")
        assert file.read_text() == "data"
    of_node = FOLDER / f"cache-{unisono.node_rank()}"
    with unisono.main_first(local=True):
        assert of_node.exists() == (unisono.local_rank() != 0)
        of_node.touch()

    @unisono.main_first()
    def prepared() -> int:
        return RANK

    assert [prepared(), prepared()] == [RANK, RANK]


def turns_that_fail() -> None:
    seen: list[int] = []
    try:
        with unisono.main_first():
            seen.append(RANK)
            raise OSError("disk full")
    except OSError:
        assert RANK == 0
        assert seen == [0]
    except PeerError as error:
        assert RANK != 0
        assert not seen
        assert "rank 0 failed in its block of main_first" in str(error)
        assert "OSError: disk full" in str(error)
        assert "helpers.py:" in str(error)
    given_up = FOLDER / "given-up"
    try:
        with unisono.main_first(local=True, timeout_s=0.2 if RANK == 3 else None):
            while RANK == 2 and not given_up.exists():
                time.sleep(0.01)
    except PeerError as error:
        assert RANK == 3
        assert "the first rank of node 1 was not done" in str(error)
        assert "0.2 s" in str(error)
        given_up.touch()
    else:
        assert RANK != 3


def turns_within_turns() -> None:
    """Whoever fails around an inner block, and where: the next block is the same one on all ranks."""
    for number, (failing, where) in enumerate([(0, "after"), (1, "before"), (0, "before"), (2, "after")]):
        try:
            with unisono.main_first():
                if failing == RANK and where == "before":
                    raise OSError("before the inner block")
                with unisono.main_first():
                    pass
                if failing == RANK:
                    raise OSError("after the inner block")
        except OSError:
            assert failing == RANK
        except PeerError as error:
            assert failing == 0 != RANK
            assert f"OSError: {where} the inner block" in str(error)
        file = FOLDER / f"after-{number}"
        with unisono.main_first():
            if RANK == 0:
                time.sleep(0.1)
                file.touch()
            assert file.exists()
    try:
        with unisono.main_first(timeout_s=-1 if RANK == 0 else None):
            pass
    except ValueError as error:
        assert RANK == 0
        assert "timeout_s=-1 must be a positive number of seconds" in str(error)
    except PeerError as error:
        assert RANK != 0
        assert "rank 0 failed" in str(error)


class Draws(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """What a worker draws from every generator."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> list[float]:
        return [torch.rand(()).item(), random.random(), float(np.random.rand())]


def seeds() -> None:
    def draw() -> list[float]:
        return [torch.rand(()).item(), random.random(), float(np.random.rand())]

    def workers(generator: torch.Generator, worker_init_fn: object, *, epochs: int = 1) -> list[list[float]]:
        loader = DataLoader(Draws(), num_workers=2, generator=generator, worker_init_fn=worker_init_fn)  # type: ignore[arg-type]
        return [[float(value) for value in batch] for _ in range(epochs) for batch in loader]

    own = unisono.seed_everything(7)
    first, of_workers = draw(), workers(*own, epochs=2)
    again = unisono.seed_everything(7)
    assert draw() == first
    if RANK in {0, 3}:
        assert workers(*again) == of_workers[:4]
    unisono.seed_everything(8)
    assert draw() != first
    same = unisono.seed_everything(7, same=True)
    common = draw()
    if RANK in {1, 2}:
        assert workers(*same) == of_workers[:4]  # workers of different ranks never draw the same
    flat = [value for drawn in of_workers for value in drawn]
    print(f"seeds {' '.join(map(repr, first + flat))}")
    print(f"common {' '.join(map(repr, common))}")


def bars() -> None:
    bar = unisono.progress(range(5 + RANK), name="uneven")
    dist.barrier()
    for number in bar:
        if RANK == 0 and number == 4:
            dist.barrier()  # the others are at their end
    if RANK != 0:
        dist.barrier()

    bar = unisono.progress(range(5), name="early")
    dist.barrier()
    for number in bar:
        if RANK != 0 and number == 3:
            dist.barrier()  # rank 0 has ended, and did not wait for this
    if RANK == 0:
        dist.barrier()

    with unisono.progress(total=10, unit="files", name="files") as files:
        for _ in range(5):
            files.update(2)
            files.show(loss=torch.tensor(0.25))
        if RANK != 0:
            files.close()
        dist.barrier()
    if RANK == 0:
        list(unisono.progress([1, 2], name="own"))


if __name__ == "__main__":
    os.environ |= {"LOCAL_RANK": str(RANK % 2), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": str(RANK // 2)}
    assert unisono.init().backend == "gloo"  # by --cpu-backend, though all ranks are on one host
    printing()
    turns()
    turns_that_fail()
    turns_within_turns()
    seeds()
    bars()
    print("ok")
