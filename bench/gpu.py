"""`Trainer.step` on one NVIDIA GPU against a loop written by hand, and shards on two ranks that share the GPU.

Steps: one process, the same micro-batches in pinned memory, copied to the GPU on the clock by both sides; fused AdamW;
the loss is read once a step. Convolutions are deterministic on both sides, as a Trainer needs them: what that costs is
the row "cuDNN's own choice", whose loop leaves the algorithm to cuDNN. Rows with 8 virtual ranks accumulate 8
micro-batches. Shards: two ranks over NCCL (they tell it that they are on separate hosts, and it uses sockets, so that
times say little about several GPUs), one virtual rank each; `Shard()` against torch's `fully_shard` on each block and
on the model. Memory is the peak of what tensors take on the GPU in a step, on rank 0.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from bench.errors import CannotRun
from bench.measure import Effort, alternate
from bench.models import MLP_4M, MLP_66K, TINY, Subject, conv_net, optimizer_of, transformer
from bench.ranks import run_ranks
from bench.rows import Row, summarise
from bench.shards import stack_of_blocks
from bench.sides import ByHand, OneMicroBatch, TrainerSide
from unisono.data.batch import Batch
from unisono.parallel import Shard

__all__ = ["run"]

_STEPS = 6
"""Steps before memory is looked at, and steps in which it is."""


def run(effort: Effort) -> Iterator[Row]:
    """Measure steps of some models, then shards."""
    if not torch.cuda.is_available():
        raise CannotRun("there is no NVIDIA GPU, or torch was built without CUDA")
    large = transformer(width=512, layers=8, length=256)
    for subject in (TINY,) if effort.quick else (MLP_66K, MLP_4M, conv_net(), _deep_conv(), large):
        for virtual_ranks in (1, 8):
            yield _row(effort, subject, virtual_ranks=virtual_ranks)
    if not effort.quick:
        yield _row(effort, large, virtual_ranks=8, autocast="bf16")
        yield _row(effort, _deep_conv(), virtual_ranks=1, deterministic=False)
    width, blocks = (32, 4) if effort.quick else (1024, 16)
    yield from run_ranks(_shards, 2, effort, width, blocks, backend="nccl")


class _GpuLoop(ByHand):
    """A plain step on the GPU, which reads the loss once."""

    def __init__(self, subject: Subject, *, autocast: str | None = None, deterministic: bool = True) -> None:
        super().__init__(subject, wrap=lambda module: module.to("cuda"))
        self._autocast, self._deterministic = autocast, deterministic

    def step(self, batch: Batch | OneMicroBatch) -> tuple[float, float]:
        micro_batches: list[list[Tensor]] = list(batch.micro_batches)
        samples = sum(len(y) for _, y in micro_batches)
        start = time.perf_counter()
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=self._deterministic):
            self._optimizer.zero_grad(set_to_none=True)
            losses = []
            for each in micro_batches:
                x, y = (tensor.to("cuda", non_blocking=True) for tensor in each)
                with torch.autocast("cuda", torch.bfloat16, enabled=self._autocast is not None):
                    loss = F.cross_entropy(self._model(x).flatten(0, -2), y.flatten())
                if len(micro_batches) > 1:
                    loss = loss * (len(y) / samples)
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
            self._optimizer.step()
            mean = torch.stack(losses).sum().item()
            torch.cuda.synchronize()
        return mean, time.perf_counter() - start


def _row(
    effort: Effort, subject: Subject, *, virtual_ranks: int, autocast: str | None = None, deterministic: bool = True
) -> Row:
    size = 8 * subject.batch_size
    options: dict[str, Any] = {"virtual_ranks": virtual_ranks, "shares": 8, "autocast": autocast, "device": "cuda"}
    ours, peer = TrainerSide(subject, **options), _GpuLoop(subject, autocast=autocast, deterministic=deterministic)
    block = 2 * subject.block

    def ours_in_turn() -> float:
        ours.take()
        seconds = 0.0
        for _ in range(block):
            start = time.perf_counter()
            ours.step()
            torch.cuda.synchronize()
            seconds += time.perf_counter() - start
        return seconds / block

    pairs = alternate(
        ours_in_turn, lambda: sum(peer.step(ours.batch)[1] for _ in range(block)) / block, rounds=effort.rounds(20)
    ).scaled(1e3)
    shares = f", {virtual_ranks} micro-batches" if virtual_ranks > 1 else ""
    more = (f", {autocast}" if autocast else "") + ("" if deterministic else ", cuDNN's own choice")
    return summarise(
        "gpu",
        f"{subject.name}, batch {size}{shares}{more}",
        **pairs._asdict(),
        peer_name="plain loop",
        unit="ms",
        model=subject.name,
        virtual_ranks=virtual_ranks,
        gpu=torch.cuda.get_device_name(),
    )


def _deep_conv() -> Subject:
    """A stack of 50 convolutions with BatchNorm, in which launching kernels takes as long as running them."""

    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for fan_in in (3, *[64] * 49):
            layers += [nn.Conv2d(fan_in, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    return Subject(
        name="50 convolutions, BatchNorm",
        build=build,
        inputs=lambda n: torch.rand(n, 3, 32, 32),
        targets=lambda n: torch.randint(10, (n,)),
        batch_size=8,
        block=1,
    )


def _shards(effort: Effort, width: int, blocks: int) -> list[Row]:
    """Measure memory and steps of shards, on a rank of two."""
    os.environ |= {"NCCL_HOSTID": str(dist.get_rank()), "NCCL_SOCKET_IFNAME": "lo"}
    torch.cuda.set_device(0)
    subject = stack_of_blocks(width, blocks)
    found = {}
    for name, make in (("ours", _trainer), ("whole", _replica), ("peer", _fully_sharded)):
        step = make(subject)
        for _ in range(_STEPS):
            step()
        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(effort.rounds(10)):
            dist.barrier()
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        found[name] = [torch.cuda.max_memory_allocated() / 1e6], times
        del step
        torch.cuda.empty_cache()
    rows = []
    for peer, peer_name in (("whole", "replica"), ("peer", "fully_shard")):
        for place, (what, unit) in enumerate((("memory of a rank", "MB"), ("step", "ms"))):
            rows.append(
                summarise(
                    "gpu",
                    f"{subject.name}, Shard() on 2 ranks, {what}, against {peer_name}",
                    ours=found["ours"][place],
                    peer=found[peer][place],
                    peer_name=peer_name,
                    unit=unit,
                    gpu=torch.cuda.get_device_name(),
                )
            )
    return rows


def _trainer(subject: Subject, **options: Any) -> Any:
    side = TrainerSide(subject, virtual_ranks=2, shares=2, device="cuda", **{"parallel": Shard(), **options})
    return side.step


def _replica(subject: Subject) -> Any:
    return _trainer(subject, parallel=None)


def _fully_sharded(subject: Subject) -> Any:
    torch.manual_seed(0)
    model: Any = subject.build().to("cuda")
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = optimizer_of(model)
    x, y = (tensor.to("cuda") for tensor in subject.dataset(subject.batch_size).tensors)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss.item()

    return step
