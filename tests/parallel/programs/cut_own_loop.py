"""Trains with `unisono.parallel.cut` in a loop of its own; prints losses, norms, results and a digest as JSON.

Arguments: the model, the stages joined by commas, or a number of stages after "n"; and the schedule.
"""

import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import pipeline_models

import unisono
from unisono.state.digest import digest

name, stages, schedule = sys.argv[1:]
torch.manual_seed(0)
torch.set_num_threads(1)
make, function, shape = {
    "mlp": (pipeline_models.mlp, pipeline_models.square, (16,)),
    "residual": (pipeline_models.Residual, pipeline_models.square, (4, 6, 6)),
    "language_model": (pipeline_models.LanguageModel, pipeline_models.next_token, None),
}[name]
device = os.environ.get("DEVICE", "cpu")
model = make().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
places = int(stages[1:]) if stages.startswith("n") else stages.split(",")
cut = unisono.parallel.cut(model, unisono.parallel.Pipeline(stages=places, schedule=schedule))
sizes = [4, 4, 3, 4, 3]
found = []
for step in range(3):
    micro_batches = [torch.randn(size, *shape) if shape else torch.randint(0, 30, (size, 8)) for size in sizes]
    micro_batches = [each.to(device) for each in micro_batches]
    found.append(cut.backward(lambda model, x: function(model, x) / len(sizes), micro_batches, seed=step))
    found.append(cut.clip_grad_norm_(0.1))
    optimizer.step()
    optimizer.zero_grad()
model.eval()
results = cut.forward(function, micro_batches[:2])  # of one size: each is a plan of its own
if cut.has_last_stage:
    found_results = [float(each) for each in results]
else:
    assert results is None
    found_results = None
cut.gather()
cut.gather()
os.write(1, (json.dumps([found, found_results, digest(dict(model.state_dict()))]) + "\n").encode())
