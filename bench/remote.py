"""A module on another rank: `unisono.parallel.remote` against torch RPC's RemoteModule with distributed autograd.

Two ranks call a small network on rank 1 with a batch each, and run backward from the mean; no optimizer. Ranks begin at
the same time, and the slower one counts. Over shm and over gloo; RPC uses TensorPipe over loopback. RemoteModule serves
callers on threads, at once and in any order, so it can be faster where the owner has cores for that; its sums are not
the same each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.nn.api.remote_module import RemoteModule

from bench.measure import Effort, Pairs, alternate
from bench.ranks import run_ranks, slowest, start_together
from bench.rows import Row, summarise
from unisono.parallel import remote

__all__ = ["run"]

_CALLS = 10


def run(effort: Effort) -> Iterator[Row]:
    """Measure calls of small and of larger batches, over both backends."""
    for backend in ("shm", "gloo"):
        for samples, width in [(8, 16)] if effort.quick else [(8, 16), (256, 256)]:
            yield from run_ranks(_calls, 2, effort, backend, samples, width)


class _Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values of the last layer."""
        values: torch.Tensor = self.layers(x)
        return values


def _calls(effort: Effort, backend: str, samples: int, width: int) -> list[Row]:
    rank = dist.get_rank()
    group = dist.new_group(backend=backend)
    ours = remote(lambda: _Net(width), on=1, group=group)
    ours.optimizer(torch.optim.SGD, lr=0.1)
    with TemporaryDirectory() as folder:
        meeting = [str(Path(folder, "rpc"))]
        dist.broadcast_object_list(meeting)
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting[0]}")
        rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)  # type: ignore[no-untyped-call]
        pairs = _pairs(effort, ours, samples, width)
        rpc.shutdown()
        dist.barrier()  # the meeting place is rank 0's
    return [
        summarise(
            "remote",
            f"{samples} samples x {width} on 2 ranks, {backend}",
            **pairs._asdict(),
            peer_name="RemoteModule",
            unit="ms",
            samples=samples,
        )
    ]


def _pairs(effort: Effort, ours: nn.Module, samples: int, width: int) -> Pairs:
    x = torch.randn(samples, width, requires_grad=True)
    theirs = RemoteModule("rank1/cpu", _Net, args=(width,))

    def by_rpc() -> None:
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [theirs(x).mean()])  # type: ignore[attr-defined]

    def side(call: Callable[[], object]) -> Callable[[], float]:
        def measure() -> float:
            start_together()
            start = perf_counter()
            for _ in range(_CALLS):
                call()
            return (perf_counter() - start) / _CALLS * 1e3

        return measure

    mine = side(lambda: ours(x).mean().backward())
    return slowest(alternate(mine, side(by_rpc), rounds=effort.rounds(41), seed=effort.seed))
