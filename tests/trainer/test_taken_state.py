"""The state that a rank takes from another one after a death."""

import pytest
import torch

import unisono
from unisono.trainer.recoverable_run import RecoverableRun


class Count:
    def __init__(self):
        self.steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


@pytest.mark.parametrize(("keeps", "expected"), [(True, 4), (False, 5)])
def test_a_rank_one_call_behind_keeps_the_objects_that_its_loop_changes(monkeypatch, keeps, expected):
    """The loop of the other rank has counted the step after the call that this one has not come out of."""
    count, model = Count(), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=2, stateful={"count": count}, progress=False)
    run = RecoverableRun(trainer._parts, trainer._loop, trainer._loader_cache, trainer._log)
    count.steps = 5
    torch.nn.init.ones_(model.weight)
    ahead = run._capture()
    taken = {key: {name: t.clone() for name, t in group.items()} for key, group in ahead[1].items()}
    monkeypatch.setattr(run, "_capture", lambda: (ahead[0], taken))
    count.steps = 4
    torch.nn.init.zeros_(model.weight)
    run.send_state(0, wanted=True, keeps_objects=keeps)
    assert count.steps == expected
    assert model.weight.tolist() == [[1.0, 1.0]]
