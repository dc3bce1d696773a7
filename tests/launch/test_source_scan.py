"""What is guessed about a program from its source."""

import pytest

from unisono.launch.launch_job import LaunchJob
from unisono.launch.source_scan import DYNAMO, TRAINER, modules_to_preload

SOURCE = b"import unisono\ntrainer = unisono.Trainer(model, optimizer, virtual_ranks=8)"


@pytest.mark.parametrize(
    ("source", "options", "names"),
    [
        (SOURCE, {}, (DYNAMO, TRAINER)),
        (b"import torch\noptimizer = torch.optim.SGD(model.parameters())", {}, (DYNAMO,)),
        (b"import unisono\nprint(unisono.rank())  # optimal", {}, ()),
        (b"Trainer(model).fit(data)", {}, ()),
        (SOURCE, {"preload": ("mine", DYNAMO)}, (TRAINER, "mine", DYNAMO)),
        (SOURCE, {"preload": ("mine",), "ranks": 1}, ("mine",)),
        (SOURCE, {"start_method": "spawn"}, ()),
    ],
)
def test_modules_that_all_ranks_would_import_are_preloaded(source, options, names):
    assert modules_to_preload(LaunchJob(**{"target": "train.py", "ranks": 2, **options}), source) == names
