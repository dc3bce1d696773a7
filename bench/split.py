"""The automatic split of `Pipeline(stages=...)` against the best of all splits, found by brute force.

Ours is the slowest stage of the division that `Pipeline` takes by its own measurement, which runs the whole model four
times. For the peer, each part of the model between two places at which a stage could begin is run as a stage of its
own, forward and backward, and measured anew; of all splits at these places, the one with the fastest slowest stage by
these times is taken. Then the stages of both splits are run, in turn, and the slowest stage of each counts: CPU time of
one micro-batch, one thread. The goal is a slowest stage within 5 %. Models are uneven: a ResNet-50, whose early blocks
take longer than its late ones, or the other way round, by the size of images; a U-Net; and a Transformer with a large
embedding and head.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.measure import Effort, in_turn
from bench.rows import Goal, Row, summarise
from unisono.parallel.pipeline.balance import ModelSegment
from unisono.parallel.pipeline.plan_cache import PlanCache
from unisono.parallel.pipeline.stage import Gradients, Stage, StagePass
from unisono.parallel.pipeline.stage_division import divide, measure_places
from unisono.trainer.setup import keep_freed_memory

__all__ = ["run"]

_GOAL = Goal(of="ratio", bound=0.952)  # a slowest stage of at most 1.05 times the best
_EXAMPLE = Path(__file__).parents[1] / "examples" / "resnet50_pipeline.py"


def run(effort: Effort) -> Iterator[Row]:
    """Measure each model in two and in four stages."""
    torch.set_num_threads(1)
    keep_freed_memory()
    for subject in _subjects(quick=effort.quick):
        for stages in (2, 4):
            yield _compare(effort, subject, stages)


class _Subject(NamedTuple):
    """A model to be split."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]


def _subjects(*, quick: bool) -> list[_Subject]:
    resnet = _resnet50()
    if quick:
        return [_Subject("U-Net c8", lambda: _UNet(8), lambda: torch.randn(1, 3, 32, 32))]
    return [
        _Subject("ResNet-50, 64 pixels", lambda: resnet(64, 8), lambda: torch.randn(4, 3, 64, 64)),
        _Subject("ResNet-50 w16, 128 pixels", lambda: resnet(16, 8), lambda: torch.randn(8, 3, 128, 128)),
        _Subject("U-Net c32, 64 pixels", lambda: _UNet(32), lambda: torch.randn(2, 3, 64, 64)),
        _Subject("Transformer d128, 20,000 tokens", _LanguageModel, lambda: torch.randint(20_000, (2, 64))),
    ]


def _resnet50() -> Callable[[int, int], nn.Module]:
    """Return the model of the example, which is a script: its classes without the rest."""
    tree = ast.parse(_EXAMPLE.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    namespace: dict[str, Any] = {"nn": nn, "F": F}
    exec(compile(tree, str(_EXAMPLE), "exec"), namespace)
    made: Callable[[int, int], nn.Module] = namespace["ResNet50"]
    return made


class _UNet(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        sizes = [channels << depth for depth in range(4)]
        self.down = nn.ModuleList(_convolutions(*each) for each in itertools.pairwise([3, *sizes]))
        self.wider = nn.ModuleList(nn.ConvTranspose2d(2 * each, each, 2, 2) for each in sizes[-2::-1])
        self.up = nn.ModuleList(_convolutions(2 * each, each) for each in sizes[-2::-1])
        self.head = nn.Conv2d(channels, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for down in self.down:
            x = down(F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        for wider, up, skip in zip(self.wider, self.up, skips[-2::-1], strict=True):
            x = up(torch.cat([wider(x), skip], 1))
        result: Tensor = self.head(x)
        return result


def _convolutions(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class _LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20_000, 128)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(128, 4, 512, batch_first=True) for _ in range(12))
        self.head = nn.Linear(128, 20_000)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result


def _loss(model: nn.Module, inputs: Tensor) -> Tensor:
    result: Tensor = model(inputs)
    return result.square().mean()


class _Pipeline:
    """All stages of a split, in one process: a step has the times of each."""

    def __init__(self, model: nn.Module, inputs: Tensor, starts: Sequence[str]) -> None:
        self._model, self._inputs = model, inputs
        plan = PlanCache(model, starts=starts).plan_for(_loss, (inputs,))
        self._stages = [Stage(plan, number, model, starts=starts) for number in range(len(starts) + 1)]

    def step(self) -> list[float]:
        """Run one micro-batch; return the CPU time of both passes of each stage."""
        self._model.zero_grad(set_to_none=True)
        seconds = [0.0] * len(self._stages)
        passes: list[StagePass] = []
        sent: dict[int, Tensor] = {}
        for number, stage in enumerate(self._stages):
            received = {one.value: sent[one.value].detach() for one in stage.plan.received}
            since_s = time.thread_time()
            done = stage.forward(_loss, (self._inputs,), received)
            seconds[number] += time.thread_time() - since_s
            sent.update(done.sent)
            passes.append(done)
        boxes = [Gradients() for _ in self._stages]
        for number in reversed(range(len(self._stages))):
            stage, done = self._stages[number], passes.pop()
            losses = [(done.result, None)] if number == len(self._stages) - 1 else []
            since_s = time.thread_time()
            given = stage.backward(done, boxes[number], losses=losses)
            seconds[number] += time.thread_time() - since_s
            for transfer in stage.plan.received:
                if transfer.value in given.values:
                    target = boxes[transfer.gradient_target(number)]
                    target.values[transfer.value] = given.values[transfer.value]
        return seconds


def _compare(effort: Effort, subject: _Subject, stages: int) -> Row:
    torch.manual_seed(0)
    model, inputs = subject.build(), subject.inputs()
    measured = measure_places(model, _loss, (inputs,), stages=stages, loss_of=lambda loss: loss)
    ours = divide(measured, stages=stages, schedules=["1f1b"], ranks=stages, micro_batches=8, limit_nbytes=None).starts
    places = [ModelSegment(*each).name for each in json.loads(measured)][1:]
    pieces = _Pipeline(model, inputs, places)
    runs = [pieces.step() for _ in range(effort.rounds(20))]
    best = _by_brute_force([statistics.median(times) for times in zip(*runs, strict=True)], places, stages)
    splits = [_Pipeline(model, inputs, starts) for starts in (ours, best)]
    found: list[list[list[float]]] = [[], []]

    def side(number: int) -> Callable[[], float]:
        def measure() -> float:
            found[number].append(splits[number].step())
            return 0.0

        return measure

    rounds = effort.rounds(40)
    in_turn([side(0), side(1)], rounds=rounds)
    # The stage that is the slowest by its median, not the slowest of each round, which would be a matter of noise.
    ours_ms, best_ms = ([1e3 * each for each in _slowest(steps[-rounds:])] for steps in found)
    return summarise(
        "split",
        f"{subject.name}, {stages} stages",
        ours=ours_ms,
        peer=best_ms,
        peer_name=f"the best of {math.comb(len(places), stages - 1)} splits",
        unit="ms",
        goal=_GOAL,
        stages=stages,
        ours_begins=", ".join(ours),
        best_begins=", ".join(best),
    )


def _by_brute_force(seconds: Sequence[float], places: Sequence[str], stages: int) -> tuple[str, ...]:
    count = len(seconds)
    before = [0.0, *itertools.accumulate(seconds)]

    def slowest(cuts: tuple[int, ...]) -> float:
        return max(before[end] - before[begin] for begin, end in itertools.pairwise((0, *cuts, count)))

    best = min(itertools.combinations(range(1, count), stages - 1), key=slowest)
    return tuple(places[cut - 1] for cut in best)


def _slowest(steps: Sequence[Sequence[float]]) -> Sequence[float]:
    """Return the times of the slowest stage in each step."""
    return max(zip(*steps, strict=True), key=statistics.median)
