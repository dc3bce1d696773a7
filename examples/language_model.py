"""Learn to write Python, byte by byte; equal weights on any number of ranks.

    unisono run -n 2 examples/language_model.py --epochs 1      # about 40 s on two cores

Trains a small Transformer on the source files of Python's own standard library, which every machine has: on the first
768 KiB of its modules in alphabetical order. The last line it prints does not change with -n.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

parser = argparse.ArgumentParser(description="Learn to write Python, byte by byte.")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=64, help="sequences of all ranks together")
parser.add_argument("--virtual-ranks", type=int, default=8, help="fixed shares of a batch, at least one a rank")
parser.add_argument("--directory", help="keep checkpoints and events here, and continue from here")
parser.add_argument("--checkpoint-every", type=int, metavar="STEPS", help="also save every so many steps")
parser.add_argument("--workers", type=int, default=0, help="processes that read data, for each rank")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, help="stop after so many steps in all")
parser.add_argument("--kib", type=int, default=768, help="how much text to read")
args = parser.parse_args()

# 1. Data: sequences of 128 bytes and the bytes that follow them. Every tenth sequence is kept for the test.
LENGTH = 128
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)[: 1024 * args.kib]), dtype=torch.uint8).long()
blocks = text.unfold(0, LENGTH + 1, LENGTH)
held_out = torch.arange(len(blocks)) % 10 == 9
train = TensorDataset(blocks[~held_out][:, :-1], blocks[~held_out][:, 1:])
test = TensorDataset(blocks[held_out][:, :-1], blocks[held_out][:, 1:])


# 2. Model.
class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self, width=128, heads=4, layers=2):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, x):
        return self.head(self.blocks(self.bytes(x) + self.places.weight))


def loss(model, batch):
    """The sum over bytes and their number: the mean is taken over all bytes of the global batch."""
    total = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")
    return unisono.Sum(total, batch[1].numel())


# 3. Loop.
torch.manual_seed(args.seed)
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
trainer = unisono.Trainer(
    model,
    optimizer,
    seed=args.seed,
    virtual_ranks=args.virtual_ranks,
    clip_grad_norm=1.0,
    directory=args.directory,
    checkpoints=unisono.Checkpoints(every_steps=args.checkpoint_every),
)
for _epoch in trainer.epochs(args.epochs, max_steps=args.steps):
    for batch in trainer.batches(train, batch_size=args.batch_size, workers=args.workers):
        trainer.step(loss, batch)
test_loss = trainer.evaluate(loss, test, name="loss")
trainer.print("test loss:", test_loss)
trainer.print("weights sha256:", trainer.digest())
