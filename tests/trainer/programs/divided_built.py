"""Builds models in parts, trains and saves them; prints hashes of what comes out, and of the random state.

Arguments: the directory; "parts" and the settings of Shard, or "whole"; and options. max_steps=N ends early; load loads
the first checkpoint before the first step; apart=R lets rank R see no files of checkpoints; llama is a model of
transformers; by_numpy looks at the memory of a parameter.
"""

import hashlib
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import unisono
from unisono.state.open_checkpoint import OpenCheckpoint
from unisono.state.part_writing import PartWriter

folder, how, *rest = sys.argv[1:]
options = dict(each.partition("=")[::2] for each in rest)
SHARDS = {
    "block": {"unit_bytes": 1},
    "size": {"by": "size", "unit_bytes": 1500},
    "replicas": {"replicas": 2},
    "zero1": {"zero": 1},
    "offload": {"offload": True},
}
parallel = unisono.parallel.Shard(**SHARDS[how]) if how != "whole" else None


class Odd(nn.Module):
    """Parameters that are tied, drawn twice, read, scaled, cast, turned, small, frozen and without dimensions."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(300, 192, padding_idx=7)
        self.layers = nn.ModuleList(nn.Linear(192, 320) for _ in range(3))
        self.back = nn.Linear(320, 192)
        self.head = nn.Linear(192, 300, bias=False)
        self.head.weight = self.embedding.weight
        self.low = nn.Linear(100, 40).bfloat16()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(9), requires_grad=False)
        self.turned = nn.Parameter((torch.randn(157, 1237) / 30).t())
        self.norm, self.dropout = nn.BatchNorm1d(192), nn.Dropout(0.1)
        self.register_buffer("bounds", torch.arange(192.0))
        self.apply(self._draw)
        for number, layer in enumerate(self.layers):
            layer.weight.data *= 1 / (1 + number)  # was used long before
        self.register_buffer("norms", torch.stack([p.detach().float().norm() for p in self.parameters()]))
        self.embedding.weight.data[11] = self.layers[0].weight.data[:, 3].mean()

    def _draw(self, module):
        if isinstance(module, nn.Linear) and module.weight.dtype == torch.float32:
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.constant_(module.bias, 0.01)
        if module is self.back:
            nn.init.orthogonal_(module.weight)

    def forward(self, numbers):
        x = self.norm(self.embedding(numbers)) * self.scale
        for layer in self.layers:
            x = x + self.back(self.dropout(layer(x)).relu())
        return self.head(x) + self.low.weight.float().mean() + self.turned.mean()


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300, hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=4,
            tie_word_embeddings=True,
        )
    )  # fmt: skip


def loss(model, batch):
    out = model(input_ids=batch[0][:, None]).logits[:, 0] if "llama" in options else model(batch[0])
    return F.cross_entropy(out, batch[0], reduction="none")


def make():
    model = llama() if "llama" in options else Odd()
    if "by_numpy" in options:
        seen = model.layers[1].bias.detach().numpy()
        more = [nn.Linear(2048, 2048) for _ in range(2)]
        seen += 1.0
        assert more
    return model


if os.environ.get("RANK") == options.get("apart", "none"):
    for each in (PartWriter, OpenCheckpoint):
        begin = each.__init__
        each.__init__ = lambda self, path, *more, begin=begin: begin(self, path / "of another host", *more)
torch.manual_seed(0)
model = make() if parallel is None else unisono.parallel.build(make, parallel=parallel)
state = torch.get_rng_state()
data = torch.utils.data.TensorDataset(torch.randint(0, 300, (16,)))
if parallel is not None and os.environ.get("WORLD_SIZE", "1") != "1" and how != "zero1":
    assert all(not p.numel() or p.untyped_storage().nbytes() <= 8 for p in model.parameters())
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
trainer = unisono.Trainer(
    model, optimizer, virtual_ranks=4, directory=folder, ema_decay=0.9, progress=False, clip_grad_norm=1.0,
    parallel=parallel,
    checkpoints=unisono.Checkpoints(every_steps=2, keep=9),
)  # fmt: skip
begun = trainer.steps_done
trainer.save("start")
if "load" in options:
    trainer.load(Path(folder) / "checkpoints" / "tag-given")
found = [trainer.evaluate(loss, data, batch_size=8)]
for _ in trainer.epochs(2, max_steps=int(options.get("max_steps", 3))):
    for batch in trainer.batches(data, batch_size=8):
        found.append(float(trainer.step(loss, batch)))
found += [trainer.evaluate(loss, data, batch_size=8, ema=ema) for ema in (False, True)]
trainer.export(Path(folder) / "weights.safetensors")
files = sorted(
    file
    for tag in ("start", "*")
    for file in (Path(folder) / "checkpoints").glob(f"*{tag}/*")
    if file.name != "manifest.json" and (tag == "*") == (file.parent.name == f"step-{trainer.steps_done:09d}")
)
files.append(Path(folder) / "weights.safetensors")
hashes = [f"{file.parent.name}/{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files]
print(f"from {begun} to {trainer.steps_done}: {found}")
print(
    hashlib.sha256(state.numpy().tobytes() + repr(model.norms if "llama" not in options else "").encode()).hexdigest()
)
print(*(hashes), sep="\n")
