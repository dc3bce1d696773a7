"""A language model whose matrices are divided by torch's own plan, on a mesh with ranks that divide the batch.

    python examples/tensor_parallel.py
    unisono run -n 4 examples/tensor_parallel.py --tensor 2    # 2 x 2: the batch in two parts, the matrices in two

Heads of attention and the first matrix of each MLP are divided by columns, the second by rows, and what lies between
blocks by positions of the sequence. The losses are those of one process, up to rounding (docs/shards.md says why).
"""

import argparse

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, parallel
from torch.nn import functional as F

import unisono.comm

WIDTH, HEAD, WORDS, BATCH = 64, 16, 50, 16


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):  # -1: as many heads as this rank has
        q, k, v = (each(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.Sequential(Block(), Block())

    def forward(self, tokens):
        return self.head(self.norm(self.layers(self.embedding(tokens))))


def divide(model, mesh):
    """Divide the matrices over the ranks of a mesh; between blocks, each rank has a part of the sequence."""
    positions = Shard(1)
    whole = parallel.PrepareModuleInput(input_layouts=(positions,), desired_input_layouts=(Replicate(),))
    plan = {
        "embedding": parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=positions),
        "norm": parallel.SequenceParallel(),
        "head": parallel.ColwiseParallel(input_layouts=positions, output_layouts=Replicate()),
        "layers.*.norm1": parallel.SequenceParallel(),
        "layers.*.norm2": parallel.SequenceParallel(),
        "layers.*.attention": whole,
        "layers.*.mlp": whole,
        "layers.*.attention.out": parallel.RowwiseParallel(output_layouts=positions),
        "layers.*.mlp.0": parallel.ColwiseParallel(),
        "layers.*.mlp.2": parallel.RowwiseParallel(output_layouts=positions),
    }
    plan |= {f"layers.*.attention.{each}": parallel.ColwiseParallel() for each in "qkv"}
    parallel.parallelize_module(model, mesh, plan)


parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--tensor", type=int, default=1, help="over how many ranks matrices are divided")
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()
job = unisono.init()
if options.tensor < 1 or job.world_size % options.tensor or WIDTH // HEAD % options.tensor:
    raise SystemExit(f"--tensor {options.tensor} must divide {job.world_size} ranks and {WIDTH // HEAD} heads")
if BATCH % (parts := job.world_size // options.tensor):
    raise SystemExit(f"{parts} parts cannot share a batch of {BATCH} evenly: start other ranks")
mesh = init_device_mesh("cpu", (parts, options.tensor), mesh_dim_names=("data", "tensor"))
torch.manual_seed(0)
model = Language()
divide(model, mesh["tensor"])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(options.steps):
    start = torch.randint(WORDS, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    tokens = (start + 3 * torch.arange(13)) % WORDS  # each word is the one before and 3
    own = tokens.chunk(parts)[mesh.get_local_rank("data")]  # ranks with parts of the same matrices have the same
    loss = F.cross_entropy(model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():  # the mean over the parts of the batch
        gradient = p.grad.to_local()
        gradient.copy_(unisono.comm.all_reduce(gradient, "mean", group=mesh.get_group("data")))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm over all parts
    optimizer.step()
unisono.print0(f"loss of the last batch: {unisono.comm.all_reduce(loss.detach(), 'mean'):.4f}")
