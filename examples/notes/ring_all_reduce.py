"""How gradients are summed: a ring, in which every rank talks to its neighbours only.

    unisono run -n 3 examples/notes/ring_all_reduce.py

W ranks cut their vector into W pieces. In W - 1 rounds each rank sends a piece to the next rank, which adds its
own: then every rank has the sum of one piece. In W - 1 more rounds the sums go round. That makes 2 (W - 1) pieces
of 1/W each, however many ranks there are.
"""

import torch
import torch.distributed as dist

import unisono
from unisono import comm

unisono.init(device="cpu")
rank, world_size = unisono.rank(), unisono.world_size()
sent = []


def pass_on(piece):
    """Send a piece to the next rank while receiving one from the rank before."""
    received = torch.empty_like(piece)
    sending = dist.isend(piece.clone(), (rank + 1) % world_size)
    dist.recv(received, (rank - 1) % world_size)
    sending.wait()
    sent.append(piece.numel())
    return received


def ring_all_reduce(vector):
    pieces = list(vector.clone().chunk(world_size))
    for turn in range(world_size - 1):  # sum
        received = pass_on(pieces[(rank - turn) % world_size])
        pieces[(rank - turn - 1) % world_size] += received
    for turn in range(world_size - 1):  # hand round
        pieces[(rank - turn) % world_size] = pass_on(pieces[(rank - turn + 1) % world_size])
    return torch.cat(pieces)


gradient = torch.arange(2.0 * world_size) + 10 * rank
total = ring_all_reduce(gradient) if world_size > 1 else gradient
print("sum over the ring:", total.tolist(), "- sent", sum(sent), "numbers for", gradient.numel())
print("as all_reduce says:", torch.equal(total, comm.all_reduce(gradient)))
