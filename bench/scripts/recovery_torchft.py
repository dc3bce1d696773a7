"""Train as one replica group of torchft: `recovery_torchft.py FOLDER STEPS`.

It follows torchft's example of DDP. Samples follow from the number of the step, so that only the part of a group that
is away is dropped, and a group that comes back gets the state from another one.
"""

import os
import sys
from datetime import timedelta
from typing import Any

import torch
from torch.nn import functional as F
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from bench.scripts.recovery_task import BATCH, Diary, make_data, make_model, own_samples

folder, steps = sys.argv[1], int(sys.argv[2])
group, groups = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
torch.set_num_threads(1)
x, y = make_data()
module = make_model()


def load_state(state: dict[str, Any]) -> None:
    """Take over the state of another group."""
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def get_state() -> dict[str, Any]:
    """Return the state for another group."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
    min_replica_size=1,
    load_state_dict=load_state,
    state_dict=get_state,
    replica_id=f"group_{group}",
    timeout=timedelta(seconds=30),
    hostname="localhost",
)
model = DistributedDataParallel(manager, module)
optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters()))
diary = Diary(folder, group)
while (done := manager.current_step()) < steps:
    own = own_samples(done, group, groups)
    optimizer.zero_grad()
    F.cross_entropy(model(x[own]), y[own]).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    if manager.current_step() > done:
        diary.step(manager.current_step(), BATCH // groups * manager.num_participants())
diary.end(module)
manager.shutdown(wait=False)
