"""Two steps of a model on the ranks of a pipeline; prints this rank's part of everything, as JSON by name.

Arguments: the model, a schedule or "plain" for the model alone in one process, and the blocks that begin stages.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
import pipeline_models

from unisono.parallel.pipeline.runner import PipelineRunner
from unisono.state.digest import digest

name, schedule, *starts = sys.argv[1:]
torch.manual_seed(0)
torch.set_num_threads(1)
make, function, shape = {
    "mlp": (pipeline_models.mlp, pipeline_models.square, (16,)),
    "residual": (pipeline_models.Residual, pipeline_models.square, (4, 6, 6)),
    "u_net": (pipeline_models.UNet, pipeline_models.square, (2, 10, 10)),
    "language_model": (pipeline_models.LanguageModel, pipeline_models.next_token, None),
}[name]
model = make()
sizes = [4, 4, 3, 4, 3]  # each size is a plan of its own, and to make one takes longest
batches = [
    [(torch.randn(size, *shape) if shape else torch.randint(0, 30, (size, 8)),) for size in sizes] for _ in range(2)
]
losses = []


def begin(number):
    torch.manual_seed(100 + number)


class Passes:
    """Seeds the generators, keeps the losses and starts from them."""

    def __init__(self, last_stage):
        self.last_stage, self.results = last_stage, {}

    def turn_to(self, stage, *, backward):
        pass

    def begin_forward(self, stage, number):
        if stage == 0:
            begin(number)

    def end_forward(self, stage, number, result):
        if stage == self.last_stage:
            losses.append(result.detach())
            self.results[number] = result

    def begin_backward(self, stage, number):
        return [(self.results.pop(number), None)] if stage == self.last_stage else ()

    def begin_adding(self, stage, number):
        pass

    def end_backward(self, stage, number):
        pass


if schedule == "plain":
    for micro_batches in batches:
        for number, inputs in enumerate(micro_batches):
            begin(number)
            loss = function(model, *inputs)
            losses.append(loss.detach())
            loss.backward()
    rank, owner = 0, {}
else:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    runner = PipelineRunner(model, starts=starts, schedule=schedule, group=dist.group.WORLD)
    for micro_batches in batches:
        plans = [runner.plan(function, inputs) for inputs in micro_batches]
        runner.run(function, micro_batches, plans, Passes(len(starts)))
    plan = runner.plan(function, batches[0][0])
    owner = {name: stages[0] % ranks for name, stages in plan.parameter_stages.items()}
    for stage in plan.stages:
        for call in plan.program.calls[stage.begin : stage.end]:
            owner |= dict.fromkeys(call.written_buffers, stage.stage % ranks)
own = {f"loss {number}": loss for number, loss in enumerate(losses)}
own |= {name: value.grad for name, value in model.named_parameters() if owner.get(name, 0) == rank}
own |= {name: value for name, value in model.named_buffers() if owner.get(name, 0) == rank}
found = {key: None if value is None else digest({"": value}) for key, value in own.items()}
os.write(1, (json.dumps(found) + "\n").encode())
