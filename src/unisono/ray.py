"""Functions on the ranks of a Ray cluster, called from a driver. Needs the package `ray`. Start reading at `run`."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from unisono.arguments import whole
from unisono.errors import LaunchError
from unisono.launch.ray.merged_output import MergedOutput
from unisono.launch.ray.node_shares import RayRequest
from unisono.launch.ray.ray_job import RayJob

__all__ = ["run"]


def run(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    *,
    num_workers: int,
    cpus_per_worker: int = 1,
    gpus_per_worker: int = 0,
    address: str | None = None,
) -> list[Any]:
    """Call a function on ranks that Ray places on its nodes, and return what it returns on each.

    Each rank is a process of `unisono run`, as under `unisono run --on ray`, with the environment of torchrun: a
    Trainer, `unisono.init()` and `torch.distributed.init_process_group()` find each other. What ranks print appears in
    this process's `sys.stdout` and `sys.stderr`. Results go through Ray's memory once. Waits until Ray has room.

    Args:
        fn: The function. Functions and classes of the script, a notebook or a prompt are sent by value.
        args: Its arguments.
        num_workers: The number of ranks.
        cpus_per_worker: The cores that Ray reserves for each.
        gpus_per_worker: The GPUs that Ray reserves for each.
        address: The cluster, as "HOST:PORT". None: that to which this process is connected; otherwise the one that
            RAY_ADDRESS names, or that runs on this machine.

    Returns:
        The results in the order of the ranks.

    Raises:
        TypeError, ValueError: An argument is of the wrong type or out of its range.
        LaunchError: There is no Ray or no cluster, a launcher could not be started, or a rank has failed: the report on
            it is in `sys.stderr`.
        Exception: `fn`, `args` or a result cannot be sent to another process; the exception is pickle's.
    """
    if not callable(fn):
        raise TypeError(f"fn is {fn!r}: give a function, which is called with the values of args")
    whole("num_workers", num_workers, least=1)
    whole("cpus_per_worker", cpus_per_worker, least=1)
    whole("gpus_per_worker", gpus_per_worker, least=0)
    request = RayRequest(
        command=("-m", "unisono.launch.ray.function_program", "CALL", "RESULTS"),
        workers=num_workers,
        cpus=cpus_per_worker,
        gpus=gpus_per_worker,
        address=address,
        folder=str(Path.cwd()),
    )
    call = cloudpickle.dumps((fn, tuple(args)))
    job = RayJob(request, MergedOutput(sys.stdout, sys.stderr), call=call)
    if code := job.run():
        raise LaunchError(f"the ranks were ended, with exit code {code}; the reason is above")
    if missing := sorted(set(range(num_workers)) - job.results.keys()):
        raise LaunchError(f"the results of {len(missing)} of {num_workers} ranks were lost with their nodes: {missing}")
    return [pickle.loads(job.results[rank]) for rank in range(num_workers)]
