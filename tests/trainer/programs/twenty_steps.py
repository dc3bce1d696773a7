"""Trains for 20 steps in one of many layouts; prints a digest of all results for each case.

Arguments: a layout (a key of LAYOUTS), then optionally names of cases. Each case has tied embeddings, dropout, sizes
that nothing divides, clipping, accumulation, and but for Llama two optimizers, of which some steps update one.
"""

import hashlib
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

layout, *chosen = sys.argv[1:]
STEPS, BATCH = 20, 5
torch.manual_seed(1)
TOKENS = TensorDataset(torch.randint(0, 31, (25, 7)))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(31, 15)
        self.positions = nn.Parameter(torch.randn(7, 15))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(15, 3, 23, batch_first=True, dropout=0.1) for _ in range(3)
        )
        self.norm = nn.LayerNorm(15)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return F.linear(self.norm(x), self.embedding.weight)


def next_token(model, batch):
    scores = model(batch[0][:, :-1])
    loss = F.cross_entropy(scores.flatten(0, 1), batch[0][:, 1:].flatten(), reduction="none")
    return unisono.Sum(loss.sum(), loss.numel())


def llama():
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=20, intermediate_size=27, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, attention_dropout=0.1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def labelled(model, batch):
    return model(input_ids=batch[0], labels=batch[0])


def two_optimizers(model):
    layers = [*model.layers.parameters()]
    of_layers = {id(p) for p in layers}
    return {
        "layers": torch.optim.AdamW(layers, lr=1e-2, fused=True),
        "rest": torch.optim.SGD([p for p in model.parameters() if id(p) not in of_layers], lr=0.05, momentum=0.9),
    }


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


CASES = {
    "float32": (Language, next_token, two_optimizers, "layers", None),
    "bf16": (Language, next_token, two_optimizers, "layers", "bf16"),
    "fp16": (Language, next_token, two_optimizers, "layers", "fp16"),
    "llama": (llama, labelled, adam, "model.layers", None),
}
LAYOUTS = {
    "whole": lambda layers: None,
    "block": lambda layers: unisono.parallel.Shard(unit_bytes=1),
    "joined": lambda layers: unisono.parallel.Shard(unit_bytes=20_000),
    "default": lambda layers: unisono.parallel.Shard(),
    "size": lambda layers: unisono.parallel.Shard(by="size", unit_bytes=3000),
    "zero1": lambda layers: unisono.parallel.Shard(zero=1),
    "replicas": lambda layers: unisono.parallel.Shard(replicas=2),
    "stages2": lambda layers: unisono.parallel.Pipeline(stages=[f"{layers}.1"]),
    "stages2_zero1": lambda layers: unisono.parallel.Pipeline(stages=[f"{layers}.1"], zero=1),
    "interleaved_zero1": lambda layers: unisono.parallel.Pipeline(
        stages=[f"{layers}.0", f"{layers}.1", f"{layers}.2"], schedule="interleaved", replicas=2, zero=1
    ),
    "stages2_zero3": lambda layers: unisono.parallel.Pipeline(stages=[f"{layers}.1"], zero=3),
    "stages4_zero3": lambda layers: unisono.parallel.Pipeline(
        stages=[f"{layers}.0", f"{layers}.1", f"{layers}.2"], replicas=2, zero=3
    ),
    "stages3": lambda layers: unisono.parallel.Pipeline(stages=[f"{layers}.1", f"{layers}.2"]),
}

DIVIDED = {
    "block": 1,
    "joined": 1,
    "default": 1,
    "size": 1,
    "zero1": 1,
    "replicas": 1,
    "stages2_zero1": 2,
    "interleaved_zero1": 2,
    "stages2_zero3": 2,
    "stages4_zero3": 2,
}
"""The number of ranks above which optimizers have no state of whole parameters."""


def train(name):
    make, loss, make_optimizer, layers, autocast = CASES[name]
    torch.manual_seed(0)
    model = make()
    optimizer = make_optimizer(model)
    trainer = unisono.Trainer(
        model,
        optimizer,
        virtual_ranks=4,
        seed=3,
        clip_grad_norm=0.5,
        autocast=autocast,
        progress=False,
        parallel=LAYOUTS[layout](layers),
    )
    found = []
    for _ in trainer.epochs(STEPS * BATCH // len(TOKENS)):
        for batch in trainer.batches(TOKENS, batch_size=BATCH, micro_batch_size=1):
            only = "rest" if isinstance(optimizer, dict) and batch.step == 2 else None
            result = trainer.step(loss, batch, optimizer=only)
            found.append((float(result), result.grad_norm))
            if layout in DIVIDED and unisono.world_size() > DIVIDED[layout]:
                several = optimizer.values() if isinstance(optimizer, dict) else [optimizer]
                assert not any(each.state for each in several), "some rank has state that is not in parts"
    assert len(found) == STEPS
    found.append(trainer.digest())
    print(f"{name}: {hashlib.sha256(repr(found).encode()).hexdigest()}")


for name in chosen or CASES:
    train(name)
