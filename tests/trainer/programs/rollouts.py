"""REINFORCE, and Q-learning from a replay buffer, on a corridor of seven fields.

Arguments: the engine, a folder for checkpoints, and the number of steps after which to stop.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn import functional as F

import unisono


def play(models):
    """Play one episode from the middle to either end."""
    place, states, actions = 3, [], []
    while 0 < place < 6:
        state = F.one_hot(torch.tensor(place), 7).float()
        action = torch.distributions.Categorical(logits=models["policy"](state)).sample()
        states.append(state)
        actions.append(action)
        place += 2 * int(action) - 1
    won = float(place == 6)
    return {"states": torch.stack(states), "actions": torch.stack(actions), "won": torch.full((len(states),), won)}


def reinforce(models, batch):
    chosen = F.cross_entropy(models["policy"](batch["states"]), batch["actions"], reduction="none")
    return {"loss": chosen * (batch["won"] - 0.5), "won": batch["won"]}


class Replay:
    """The newest transitions: place, action, next place, reward."""

    def __init__(self):
        self.rows = torch.zeros(0, 4)

    def add(self, found):
        self.rows = torch.cat([self.rows, *found])[-500:]

    def draw(self, models):
        return self.rows[torch.randint(len(self.rows), (6,))]

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows = state["rows"]


replay, walker = Replay(), unisono.Carried(lambda: 3)


def explore(models):
    """Go on for some steps from where the virtual rank's walker stands."""
    rows = []
    for _ in range(5):
        place = walker.value
        scores = models["values"](F.one_hot(torch.tensor(place), 7).float())
        action = int(scores.argmax()) if torch.rand(()) > 0.3 else int(torch.randint(2, ()))
        following = place + 2 * action - 1
        rows.append(torch.tensor([place, action, following, float(following == 6)]))
        walker.value = following if 0 < following < 6 else 3
    return torch.stack(rows)


def q_loss(models, rows):
    place, action, following, reward = rows.T
    score = models["values"](F.one_hot(place.long(), 7).float()).gather(1, action.long()[:, None])[:, 0]
    with torch.no_grad():
        best = models["values"](F.one_hot(following.long(), 7).float()).amax(1)
    goes_on = (following > 0) & (following < 6)
    return (score - (reward + 0.9 * best * goes_on)) ** 2


def main() -> None:
    torch.manual_seed(0)
    models = {"policy": nn.Linear(7, 2), "values": nn.Linear(7, 2)}
    trainer = unisono.Trainer(
        models,
        {name: torch.optim.Adam(model.parameters(), lr=0.05) for name, model in models.items()},
        virtual_ranks=4,
        engine=sys.argv[1],
        directory=sys.argv[2] if len(sys.argv) > 2 else None,
        stateful={"replay": replay, "walker": walker},
        progress=False,
    )
    if not len(replay.rows):
        replay.add(trainer.collect(explore))
    for epoch in trainer.epochs(3, max_steps=int(sys.argv[3]) if len(sys.argv) > 3 else None):
        if epoch == 1:
            for batch in trainer.rollouts(replay.draw, steps=7):
                trainer.step(q_loss, batch, optimizer="values")
                replay.add(trainer.collect(explore))
        else:
            for batch in trainer.rollouts(play, steps=5, micro_batch_size=7):
                result = trainer.step(reinforce, batch, optimizer="policy")
                trainer.step(reinforce, batch, optimizer="policy")
                trainer.print(batch.size, result, result.values["won"])
    drawn = [torch.rand((), generator=trainer.generator("end", v)).item() for v in range(4)]
    trainer.print("won:", trainer.collect(lambda models: int(play(models)["won"][0]), name="test"), drawn)
    trainer.print("weights sha256:", trainer.digest())


if __name__ == "__main__":
    main()
