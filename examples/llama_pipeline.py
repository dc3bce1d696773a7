"""Train a Llama of transformers that is cut over ranks; equal weights on any number of ranks and stages.

    unisono run -n 2 examples/llama_pipeline.py                # about 40 s on two cores; needs transformers:
    unisono run -n 3 examples/llama_pipeline.py --stages 3     # pip install -c constraints.txt ".[compat]"

A small Llama learns to write Python, byte by byte, from the standard library. It has random weights, since nothing is
downloaded here, and is used as it is, with rotary embeddings that all layers share, and a head that shares its weights
with the embedding, which is on another rank. The last line does not change with -n or --stages.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import unisono

parser = argparse.ArgumentParser(description="Train a Llama of transformers that is cut over ranks.")
parser.add_argument("--stages", type=int, default=2, choices=range(2, 5))
parser.add_argument("--schedule", default="1f1b", choices=["auto", "1f1b", "gpipe", "interleaved", "zero-bubble"])
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--steps", type=int, help="stop after so many steps in all")
parser.add_argument("--kib", type=int, default=768, help="how much text to read")
parser.add_argument("--batch-size", type=int, default=64, help="sequences of all ranks together")
parser.add_argument("--virtual-ranks", type=int, default=8, help="fixed shares of a batch: the micro-batches")
parser.add_argument("--width", type=int, default=96)
parser.add_argument("--layers", type=int, default=4)
args = parser.parse_args()

# 1. Data: sequences of 128 bytes and the bytes that follow them. Every tenth sequence is kept for the test.
LENGTH = 128
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)[: 1024 * args.kib]), dtype=torch.uint8).long()
blocks = text.unfold(0, LENGTH + 1, LENGTH)
held_out = torch.arange(len(blocks)) % 10 == 9
train = TensorDataset(blocks[~held_out][:, :-1], blocks[~held_out][:, 1:])
test = TensorDataset(blocks[held_out][:, :-1], blocks[held_out][:, 1:])

# 2. Model and optimizer, as any script of transformers has them.
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=256, hidden_size=args.width, intermediate_size=3 * args.width, num_hidden_layers=args.layers,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH, tie_word_embeddings=True,
                attention_dropout=0.1, use_cache=False)
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)


def loss(model, batch):
    """The sum over bytes and their number: the mean is taken over all bytes of the global batch."""
    logits = model(input_ids=batch[0]).logits
    return unisono.Sum(F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel())


# 3. Stages: each has equally many layers. The first one also has the embedding, the last one the head.
starts = [f"model.layers.{stage * args.layers // args.stages}" for stage in range(1, args.stages)]
parallel = unisono.parallel.Pipeline(stages=starts, schedule=args.schedule)

# 4. Loop.
trainer = unisono.Trainer(model, optimizer, virtual_ranks=args.virtual_ranks, clip_grad_norm=1.0, parallel=parallel)
for _epoch in trainer.epochs(args.epochs, max_steps=args.steps):
    for batch in trainer.batches(train, batch_size=args.batch_size):
        trainer.step(loss, batch)
trainer.print("test loss:", trainer.evaluate(loss, test, name="loss", batch_size=4 * args.batch_size))
trainer.print("weights sha256:", trainer.digest())
