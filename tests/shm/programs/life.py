"""The life of groups on shared memory: made in every way, used by threads, forked, destroyed, made again."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from unisono.comm.shm import Options

warnings.simplefilter("ignore")
dist.init_process_group("shm")
RANK, SIZE = dist.get_rank(), dist.get_world_size()


def total(group: dist.ProcessGroup | None = None, numel: int = 3) -> float:
    tensor = torch.full((numel,), float(RANK + 1))
    dist.all_reduce(tensor, group=group)
    assert (tensor == tensor[0]).all()
    return float(tensor[0])


EVERYBODY = SIZE * (SIZE + 1) / 2


def what_it_is() -> None:
    group = dist.group.WORLD
    assert group.name() == "shm"
    assert dist.get_backend() == "shm"
    assert group._device_types == [torch.device("cpu")]
    assert dist.distributed_c10d._get_default_timeout("shm")
    with pytest.raises(RuntimeError, match=r"shm shares memory of the CPU.*meta.*nccl"):
        dist.all_reduce(torch.ones(3, device="meta"))
    with pytest.raises(RuntimeError, match="No backend type associated with device type cuda"):
        group._get_backend(torch.device("cuda"))
    assert group._get_backend(torch.device("cpu")) is group


def threads_with_groups_of_their_own() -> None:
    groups = [dist.new_group() for _ in range(4)]
    failed: list[BaseException] = []

    def use(group: dist.ProcessGroup) -> None:
        try:
            for i in range(40):
                assert total(group, 1 + 100 * (i % 5)) == EVERYBODY
        except BaseException as error:
            failed.append(error)

    users = [threading.Thread(target=use, args=(group,)) for group in groups]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert not failed, failed
    for group in groups:
        dist.destroy_process_group(group)


def many_small_ones_in_flight() -> None:
    tensors = [torch.full((5,), float(i)) for i in range(300)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    callbacks: list[int] = []
    futures = [w.get_future().then(lambda _, i=i: callbacks.append(i)) for i, w in enumerate(works)]
    torch.futures.wait_all(futures)
    assert sorted(callbacks) == list(range(300))
    for i, tensor in enumerate(tensors):
        assert (tensor == i * SIZE).all()


def groups_in_different_orders() -> None:
    """Asynchronous calls of two groups do not have to be made in one order on all ranks."""
    one, other = dist.new_group(), dist.new_group()
    order = [one, other] if RANK else [other, one]
    for _ in range(20):
        tensors = [torch.ones(3) for _ in order]
        works = [dist.all_reduce(t, group=g, async_op=True) for t, g in zip(tensors, order, strict=True)]
        for work in works:
            work.wait()
        assert all((tensor == SIZE).all() for tensor in tensors)


def collectives_in_callbacks() -> None:
    """As PowerSGD's hook for DDP does: a callback calls a collective and waits for it."""
    for late in (0, 1):
        if late == RANK:
            time.sleep(0.2)  # the other's call goes on in the group's thread
        first, second = torch.ones(3), torch.full((3,), 2.0)

        def again(done: torch.futures.Future[list[torch.Tensor]], second: torch.Tensor = second) -> torch.Tensor:
            assert done.value()[0][0] == SIZE
            assert not torch.is_inference_mode_enabled()
            return dist.all_reduce(second, async_op=True).get_future().wait()[0]

        future = dist.all_reduce(first, async_op=True).get_future().then(again)
        assert (future.wait() == 2 * SIZE).all()


def callbacks_keep_their_order() -> None:
    """What a callback calls comes right after its work, whether that ended at once or was late: for PowerSGD on DDP."""
    for late in range(SIZE):
        if late == RANK:
            time.sleep(0.1)  # the others have called everything by now, this rank calls one after the other
        futures = []
        for i in range(4):

            def again(_: object, numel: int = 10 + i) -> float:
                tensor = torch.ones(numel)
                dist.all_reduce(tensor, async_op=True).get_future().wait()
                return float(tensor[0])

            future = dist.all_reduce(torch.ones(1 + i), async_op=True).get_future()
            futures.append(future.then(again).then(lambda done, numel=20 + i: done.value() + total(numel=numel)))
        assert [future.wait() for future in futures] == [SIZE + EVERYBODY] * 4


def callbacks_that_wait_for_others() -> None:
    """A callback may wait for what was asked for after its own work."""
    if RANK == 0:
        time.sleep(0.1)
    tensor = torch.ones(3)
    first, second = (dist.all_reduce(t, async_op=True) for t in (torch.ones(2), tensor))
    future = first.get_future().then(lambda _: second.wait(timedelta(seconds=20)) and float(tensor[0]))
    assert future.wait() == SIZE


def views_and_versions() -> None:
    """A view that shows its memory negated is summed as it is; no version is counted, as with torch's backends."""
    view = torch.full((1,), 1j * (RANK + 1)).conj().imag
    assert view.is_neg()
    dist.all_reduce(view)
    assert view.item() == -EVERYBODY
    with pytest.raises(RuntimeError, match="negated or conjugated cannot travel"):
        dist.isend(view, (RANK + 1) % SIZE)
    tensor = torch.ones(2, 3)
    for each in (tensor, tensor.t()):
        dist.all_reduce(each)
    assert (tensor == SIZE**2).all()
    assert tensor._version == 0


def forked_children() -> None:
    child = os.fork()
    if not child:
        try:
            dist.all_reduce(torch.ones(2))
        except RuntimeError as error:
            os._exit(0 if "forked process is no rank" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert total() == EVERYBODY
    batches = list(DataLoader(TensorDataset(torch.arange(8)), num_workers=2, batch_size=4))
    assert len(batches) == 2
    assert total() == EVERYBODY
    child = os.fork()
    if not child:
        dist.destroy_process_group()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dist.barrier()
    assert total() == EVERYBODY


def subgroups() -> None:
    assert total(dist.new_group(list(range(SIZE)))) == EVERYBODY
    alone = [dist.new_group([r]) for r in range(SIZE)]
    assert total(alone[RANK]) == RANK + 1
    tail = dist.new_group(list(range(1, SIZE)))
    if RANK:
        assert total(tail) == EVERYBODY - 1
        tensor = torch.zeros(2) if RANK != SIZE - 1 else torch.ones(2)
        dist.broadcast(tensor, SIZE - 1, group=tail)
        assert tensor.tolist() == [1, 1]
    halves = dist.group.WORLD.split_group([0] if RANK == 0 else list(range(1, SIZE)))
    tensor = torch.ones(2)
    halves.allreduce([tensor]).wait()
    assert tensor[0] == (1 if RANK == 0 else SIZE - 1)
    halves.shutdown()
    assert dist.group.WORLD.split_group([0, 1]) is None or RANK < 2
    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
    assert total(mesh.get_group()) == EVERYBODY
    local, _ = dist.new_subgroups(1)
    assert total(local) == RANK + 1


def sizes() -> None:
    small = dist.new_group(pg_options=Options(mib=2))
    for group in (small, dist.group.WORLD):
        for numel in (0, 1, 100_000, 3_000_001):
            assert total(group, numel) == EVERYBODY if numel else True
    os.environ["UNISONO_SHM_MIB"] = "3"
    assert total(dist.new_group()) == EVERYBODY
    del os.environ["UNISONO_SHM_MIB"]


def leaves_nothing() -> None:
    def made() -> tuple[int, int, int]:
        group = dist.new_group()
        for _ in range(3):
            work = dist.all_reduce(torch.ones(100), group=group, async_op=True)
        work.wait()
        dist.destroy_process_group(group)
        del group
        maps = Path("/proc/self/maps").read_text().count("memfd:unisono")
        links = [fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
        segments = [fd for fd in links if str(fd.readlink()).startswith("/memfd:unisono (")]
        assert {fd.stat().st_mode & 0o777 for fd in segments} == {0o600}, "others may open a segment"
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), maps

    gc.collect()  # groups of the steps before, which are in circles
    first = [made() for _ in range(3)][-1]
    dist.barrier()
    last = [made() for _ in range(5)][-1]
    assert last == first, f"descriptors, threads, segments: {first}, then {last}"
    assert "/dev/shm/" not in Path("/proc/self/maps").read_text(), "a name that a killed process would leave"


def made_again() -> None:
    group = dist.group.WORLD
    for _ in range(3):
        dist.destroy_process_group()
        dist.init_process_group("shm")
        assert total() == EVERYBODY
    with pytest.raises(RuntimeError, match="has been destroyed"):
        group.allreduce([torch.ones(2)]).wait()
    # A file and a store of one's own; the path is agreed on through the group.
    folder = [tempfile.mkdtemp()] if RANK == 0 else [None]
    dist.broadcast_object_list(folder, 0)
    dist.destroy_process_group()
    limit = timedelta(seconds=30)
    dist.init_process_group("shm", init_method=f"file://{folder[0]}/a", rank=RANK, world_size=SIZE, timeout=limit)
    assert total() == EVERYBODY
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder[0]}/b", SIZE)
    for _ in range(2):
        dist.init_process_group("shm", store=store, rank=RANK, world_size=SIZE, timeout=limit)
        assert total() == EVERYBODY
        dist.destroy_process_group()
    dist.init_process_group("cpu:shm")
    assert total() == EVERYBODY


STEPS = [
    what_it_is, threads_with_groups_of_their_own, many_small_ones_in_flight, groups_in_different_orders,
    collectives_in_callbacks, callbacks_keep_their_order, callbacks_that_wait_for_others, views_and_versions,
    forked_children, subgroups, sizes, leaves_nothing, made_again,
]  # fmt: skip
for step in STEPS:
    step()
    print(step.__name__, flush=True)
dist.destroy_process_group()
