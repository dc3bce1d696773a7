"""Fine-tune a model of transformers; equal weights on any number of ranks.

    unisono run -n 2 examples/fine_tuning.py      # about 30 s on two cores; needs transformers

A small BERT learns from which module of Python's standard library a line of code is. Its weights are random, since
nothing is downloaded here: take `from_pretrained(...)` instead, and the rest stays. The model is used as it is, with
its own loss, attention masks and dropout. The last line does not change with -n.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import unisono

parser = argparse.ArgumentParser(description="Fine-tune a model of transformers.")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch-size", type=int, default=64, help="lines of all ranks together")
parser.add_argument("--steps", type=int, help="stop after so many steps in all")
args = parser.parse_args()

# 1. Data: lines as bytes, padded; the attention mask says which are there.
LENGTH, MODULES = 48, ["_pydecimal.py", "socket.py", "unittest/case.py"]
pairs = [
    (line.strip().encode()[:LENGTH], label)
    for label, name in enumerate(MODULES)
    for line in (Path(sysconfig.get_path("stdlib")) / name).read_text().splitlines()[:800]
    if len(line.strip()) > 12
]
ids = torch.tensor([[*text.ljust(LENGTH, b"\0")] for text, _ in pairs])
mask = (ids != 0).long()
labels = torch.tensor([label for _, label in pairs])
kept = torch.arange(len(pairs)) % 5 > 0
train, test = (TensorDataset(ids[part], mask[part], labels[part]) for part in (kept, ~kept))

# 2. Model, optimizer and schedule, as any script of transformers has them.
torch.manual_seed(0)
model = BertForSequenceClassification(
    BertConfig(vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
               max_position_embeddings=LENGTH, num_labels=len(MODULES), classifier_dropout=0.1)
)  # fmt: skip
model.train()
decayed = [p for name, p in model.named_parameters() if p.dim() > 1]
others = [p for name, p in model.named_parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], lr=3e-3
)
steps = args.epochs * -(-len(train) // args.batch_size)
schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=steps // 10, num_training_steps=steps)


def loss(model, batch):
    """The output of the model has the loss, the mean over the micro-batch."""
    return model(input_ids=batch[0], attention_mask=batch[1], labels=batch[2])


def correct(model, batch):
    return model(input_ids=batch[0], attention_mask=batch[1]).logits.argmax(1) == batch[2]


# 3. Loop.
trainer = unisono.Trainer(model, optimizer, virtual_ranks=8, scheduler=schedule, clip_grad_norm=1.0)
for _epoch in trainer.epochs(args.epochs, max_steps=args.steps):
    for batch in trainer.batches(train, batch_size=args.batch_size):
        trainer.step(loss, batch)
trainer.print("lines recognised:", trainer.evaluate(correct, test, name="recognised"))
trainer.print("weights sha256:", trainer.digest())
