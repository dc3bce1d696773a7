"""The list of benchmarks. A new one is a file beside this one and a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple

from bench import (
    checkpoint,
    collectives,
    comm,
    ddp,
    divided,
    embedding,
    events,
    exchange,
    gpu,
    host_checkpoint,
    hosts,
    kills,
    link,
    loading,
    membership,
    permutation,
    pipeline,
    planning,
    protect,
    recovery,
    remote,
    replicate,
    shards,
    shared,
    split,
    start,
    step,
    top,
)
from bench.measure import Effort
from bench.rows import Row

__all__ = ["BENCHMARKS", "Benchmark"]


class Benchmark(NamedTuple):
    """One benchmark."""

    name: str
    line: str
    """What it compares, in a line."""
    run: Callable[[Effort], Iterator[Row]]
    """Measures one row after the other. Raises: CannotRun where this machine or tree lacks what it needs."""
    notes: str
    """What a reader of the table should know: the text of the module."""


def _benchmark(module: ModuleType, line: str) -> Benchmark:
    return Benchmark(module.__name__.rpartition(".")[2], line, module.run, module.__doc__ or "")


BENCHMARKS: tuple[Benchmark, ...] = (
    _benchmark(permutation, "the order of an epoch against a shuffled list"),
    _benchmark(step, "Trainer.step against a hand-written loop, one process"),
    _benchmark(events, "what the events of steps cost, in turns with and without them"),
    _benchmark(top, "what `unisono top` costs a running job, in turns with it and with it stopped"),
    _benchmark(ddp, "Trainer.step against DistributedDataParallel over gloo"),
    _benchmark(replicate, "unisono.parallel.replicate against DistributedDataParallel, in a loop by hand"),
    _benchmark(remote, "unisono.parallel.remote against RemoteModule of torch RPC"),
    _benchmark(shared, "Trainer.step in shared memory against DDP, and against ranks that train alone"),
    _benchmark(protect, "Trainer.step in shared memory with and without protection against a death in the update"),
    _benchmark(planning, "unisono plan against the memory and the steps of runs"),
    _benchmark(shards, "parallel=Shard(...): memory against replicas, steps against torch's fully_shard"),
    _benchmark(pipeline, "parallel=Pipeline(...) against the schedule's ideal and torch.distributed.pipelining"),
    _benchmark(gpu, "Trainer.step on an NVIDIA GPU against a hand-written loop"),
    _benchmark(split, "the automatic split of a pipeline against the best split, found by brute force"),
    _benchmark(exchange, "the exact sum over ranks against gloo's all_reduce"),
    _benchmark(collectives, "process groups over shared memory against gloo"),
    _benchmark(comm, "unisono.comm against the raw calls of torch.distributed"),
    _benchmark(loading, "Trainer.batches against DataLoader + DistributedSampler"),
    _benchmark(embedding, "embedding tables against DDP and SparseAdam"),
    _benchmark(divided, "embedding tables divided over two hosts on a slow link, against DDP"),
    _benchmark(checkpoint, "Trainer.save against torch.save in the foreground"),
    _benchmark(host_checkpoint, "Trainer.save of two hosts that each write a part, against rank 0 alone"),
    _benchmark(recovery, "a killed rank: unisono run against torchrun --max-restarts and torchft"),
    _benchmark(kills, "many kills in each run: to the next new step, and the script's own way to its Trainer"),
    _benchmark(hosts, "a lost host: unisono run --nnodes 2:3 against torchrun --max-restarts"),
    _benchmark(
        membership, "a change of who the ranks are among up to 125 simulated hosts, beside torchrun's rendezvous"
    ),
    _benchmark(link, "Trainer.step over two hosts on a slow link against DistributedDataParallel over gloo"),
    _benchmark(start, "unisono run against torchrun, to the first all_reduce"),
)
