"""What ranks that compute on GPUs have there and in memory of the CPU, with shards. Pure functions.

Start reading at `memory_on_devices`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from unisono.estimate.costs import Workload
from unisono.estimate.layouts import share_of
from unisono.estimate.memory_trace import HOST, MemoryTrace
from unisono.estimate.model_profile import ModelProfile
from unisono.estimate.step_memory import with_divided_state, with_shards

__all__ = ["DeviceMemory", "memory_on_devices"]


class DeviceMemory(NamedTuple):
    """The most that a rank has in its steps, in bytes: tensors, without what a process or CUDA takes."""

    name: str
    code: str
    """The argument of the Trainer."""
    device_nbytes: int
    host_nbytes: int


def memory_on_devices(profile: ModelProfile, workload: Workload) -> Iterator[DeviceMemory]:
    """Yield what each layout with shards has on a GPU, with and without `offload`."""
    share, ranks = share_of(profile, workload, workload.ranks), workload.ranks
    for offloads in (False, True) if ranks > 1 else (True,):
        given, name = ("offload=True", ", offload") if offloads else ("", "")
        pieces = [
            (f"{ranks} ranks, zero=1", ["zero=1"], with_divided_state(share, offloads=offloads)),
            (f"{ranks} shards", [], with_shards(share, by="block", replicas=1, offloads=offloads)),
        ]
        for of, arguments, trace in pieces:
            inside = ", ".join([*([given] if given else []), *arguments])
            device, host = _most(trace)
            yield DeviceMemory(f"{of}{name}", f"parallel=unisono.parallel.Shard({inside})", device, host)


def _most(trace: MemoryTrace) -> tuple[int, int]:
    """Return the most bytes on the device and in memory of the CPU, after the model was divided."""
    used: Counter[bool] = Counter()
    blocks: dict[int, tuple[bool, int]] = {}
    most = {True: 0, False: 0}
    for what, number, nbytes, kind in trace.operations:
        if what == "trim":  # the model has been divided
            most = {is_host: used[is_host] for is_host in most}
        elif what == "give":
            is_host, size = blocks.pop(number)
            used[is_host] -= size
        elif what != "step":
            is_host = kind == HOST
            blocks[number] = is_host, nbytes
            used[is_host] += nbytes
            most[is_host] = max(most[is_host], used[is_host])
    return most[False], most[True]
