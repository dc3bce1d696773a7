"""Learn to balance a pole on a cart; equal weights on any number of ranks.

    unisono run -n 2 examples/cart_pole.py      # about 20 s on two cores

REINFORCE (Williams, 1992) on the pole of Barto, Sutton and Anderson (1983), written in torch. Each virtual rank plays
its own episodes, whichever rank computes it. The last line does not change with -n.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import unisono

parser = argparse.ArgumentParser(description="Learn to balance a pole on a cart.")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--episodes", type=int, default=4, help="episodes of each virtual rank in a step, side by side")
parser.add_argument("--directory", help="save the run here, and go on with it")
args = parser.parse_args()

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))


def push(state, action):
    """Push the cart to the left or to the right for a 50th of a second."""
    _, speed, angle, spin = state.unbind(1)
    force = (20.0 * action - 10.0 + 0.05 * spin**2 * angle.sin()) / 1.1
    turn = (9.8 * angle.sin() - angle.cos() * force) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
    pull = force - 0.05 * turn * angle.cos() / 1.1
    return state + 0.02 * torch.stack([speed, pull, spin, turn], 1)


def play(policy):
    """Play episodes until the pole falls, the cart has left, or 200 moves are done."""
    state, states, actions, alive = torch.empty(args.episodes, 4).uniform_(-0.05, 0.05), [], [], []
    up = torch.ones(args.episodes, dtype=torch.bool)
    while up.any() and len(states) < 200:
        action = torch.distributions.Categorical(logits=policy(state)).sample()
        states.append(state)
        actions.append(action)
        alive.append(up)
        state = push(state, action)
        up = up & (state[:, 0].abs() < 2.4) & (state[:, 2].abs() < 0.21)
    alive = torch.stack(alive)
    left = alive.flip(0).cumsum(0).flip(0).float()  # moves until the end of the episode
    return {"states": torch.stack(states)[alive], "actions": torch.stack(actions)[alive], "left": left[alive]}


def loss(policy, batch):
    advantage = (batch["left"] - batch["left"].mean()) / (batch["left"].std() + 1e-6)
    return advantage * F.cross_entropy(policy(batch["states"]), batch["actions"], reduction="none")


optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
# On the CPU, since a GPU would be waited for in each of 200 moves.
trainer = unisono.Trainer(policy, optimizer, virtual_ranks=4, device="cpu", directory=args.directory)
for _ in trainer.epochs(1):
    for batch in trainer.rollouts(play, steps=args.steps):
        trainer.step(loss, batch)

moves = trainer.collect(lambda policy: len(play(policy)["left"]) / args.episodes, name="test")
trainer.print(f"moves in an episode: {sum(moves) / len(moves):.1f}")
trainer.print(f"weights sha256: {trainer.digest()}")
