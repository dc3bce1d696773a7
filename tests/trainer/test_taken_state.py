"""The state that a rank takes from another one after a death."""

import pytest
import torch

import unisono
from unisono.trainer.call_log import CallLog
from unisono.trainer.recoverable_run import RecoverableRun


class Count:
    def __init__(self):
        self.steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


@pytest.mark.parametrize(("is_late", "steps", "epoch", "rate"), [(True, 4, 0, 0.1), (False, 5, 1, 0.05)])
def test_a_rank_one_call_behind_keeps_what_its_loop_changes(monkeypatch, is_late, steps, epoch, rate):
    """The loop of the other rank has gone on since the call that this one has not come out of."""
    count, model = Count(), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=2, stateful={"count": count}, progress=False)
    run = RecoverableRun(trainer._parts, trainer._loop, trainer._loader_cache, trainer._log)
    run.note_call()
    position = run.position(CallLog(), "trainer.batches()", resizes=False)
    count.steps, run.cursor.epoch, optimizer.param_groups[0]["lr"] = 5, 1, 0.05
    torch.nn.init.ones_(model.weight)
    ahead = run._capture()
    taken = {key: {name: t.clone() for name, t in group.items()} for key, group in ahead[1].items()}
    monkeypatch.setattr(run, "_capture", lambda: (ahead[0], taken))
    count.steps, run.cursor.epoch, optimizer.param_groups[0]["lr"] = 4, 0, 0.2
    torch.nn.init.zeros_(model.weight)
    run.send_state(0, position, wanted=True, is_late=is_late)
    assert (count.steps, run.cursor.epoch, optimizer.param_groups[0]["lr"]) == (steps, epoch, rate)
    assert model.weight.tolist() == [[1.0, 1.0]]
