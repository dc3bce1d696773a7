"""`Trainer.step` on one NVIDIA GPU against the loop that one would write by hand.

One process, the same micro-batches in pinned memory, copied to the GPU on the clock by both sides; fused AdamW; the
loss is read once a step, by the Trainer before the update, which it keeps back from a loss that is not finite. Steps
follow each other as in training: the clock stops when the GPU has finished some of them.
Convolutions are deterministic on both sides, as a Trainer needs them: what that costs is the row "cuDNN's own choice",
whose loop leaves the algorithm to cuDNN. Rows with 8 virtual ranks accumulate 8 micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.errors import CannotRun
from bench.measure import Effort, alternate
from bench.models import MLP_4M, MLP_66K, TINY, Subject, conv_net, transformer
from bench.rows import Row, summarise
from bench.sides import ByHand, OneMicroBatch, TrainerSide
from unisono.data.batch import Batch

__all__ = ["run"]


def run(effort: Effort) -> Iterator[Row]:
    """Measure steps of some models."""
    if not torch.cuda.is_available():
        raise CannotRun("there is no NVIDIA GPU, or torch was built without CUDA")
    large = transformer(width=512, layers=8, length=256)
    for subject in (TINY,) if effort.quick else (MLP_66K, MLP_4M, conv_net(), _deep_conv(), large):
        for virtual_ranks in (1, 8):
            yield _row(effort, subject, virtual_ranks=virtual_ranks)
    if not effort.quick:
        yield _row(effort, large, virtual_ranks=8, autocast="bf16")
        yield _row(effort, _deep_conv(), virtual_ranks=1, deterministic=False)


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
        return mean, time.perf_counter() - start


def _row(
    effort: Effort, subject: Subject, *, virtual_ranks: int, autocast: str | None = None, deterministic: bool = True
) -> Row:
    size = 8 * subject.batch_size
    options: dict[str, Any] = {"virtual_ranks": virtual_ranks, "shares": 8, "autocast": autocast, "device": "cuda"}
    ours, peer = TrainerSide(subject, **options), _GpuLoop(subject, autocast=autocast, deterministic=deterministic)
    block = 2 * subject.block

    def timed(step: Callable[[], object]) -> float:
        start = time.perf_counter()
        for _ in range(block):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / block

    def ours_in_turn() -> float:
        ours.take()
        return timed(ours.step)

    pairs = alternate(ours_in_turn, lambda: timed(lambda: peer.step(ours.batch)), rounds=effort.rounds(20)).scaled(1e3)
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
