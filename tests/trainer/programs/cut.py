"""Trains models that are cut over ranks; prints a digest of all results for each.

Arguments: the schedule, or "zero3" for two replicas that divide stages, and the number of stages ("1" leaves models
whole, "auto4" lets unisono find 4), then optionally names of cases.
"""

import contextlib
import hashlib
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2] / "parallel"))
import pipeline_models

import unisono

schedule, stages, *chosen = sys.argv[1:]
is_automatic, stages = stages.startswith("auto"), int(stages.removeprefix("auto"))


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again, with dropout, and a first one that is called twice."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2)) for _ in range(5))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x = self.blocks[0](x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) + x
        return self.head(x)


def vectors(model, batch):
    return (model(batch[0]) - batch[1]).square().mean(1)


def classes(model, batch):
    out = model(batch[0]).flatten(1)[:, :3]
    loss = F.cross_entropy(out, batch[1], reduction="none")
    return {"loss": loss, "accuracy": (out.argmax(1) == batch[1]).float()}


def images(model, batch):
    return (model(batch[0]) - batch[0]).square().mean((1, 2, 3))


def tokens(model, batch):
    loss = F.cross_entropy(model(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].flatten(), reduction="none")
    return unisono.Sum(loss.sum(), loss.numel())


def two_optimizers(model):
    split = len(parameters := [*model.parameters()]) // 2
    return {
        "early": torch.optim.SGD(parameters[:split], lr=0.05, momentum=0.9),
        "late": torch.optim.AdamW(parameters[split:], lr=1e-2),
    }


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


torch.manual_seed(1)
X = torch.randn(17, 16)
VECTORS = TensorDataset(X, X.flip(1))
CLASSES = TensorDataset(torch.randn(17, 4, 6, 6), torch.randint(0, 3, (17,)))
IMAGES = TensorDataset(torch.randn(20, 2, 10, 10))
TOKENS = TensorDataset(torch.randint(0, 30, (13, 8)))
FLAT = TensorDataset(X, torch.randint(0, 3, (17,)))
MLP = ["5", "9", "16"]
CASES = {
    "mlp": (pipeline_models.mlp, vectors, VECTORS, MLP, adam, {"clip_grad_norm": 0.5, "ema_decay": 0.9}, 1),
    "fp16": (pipeline_models.mlp, vectors, VECTORS, MLP, adam, {"autocast": "fp16", "clip_grad_norm": 0.5}, None),
    "residual": (
        pipeline_models.Residual, classes, CLASSES, ["blocks.1", "blocks.3", "head"], two_optimizers, {}, None,
    ),
    "bf16": (
        pipeline_models.Residual, classes, CLASSES, ["blocks.1", "blocks.4", "blocks.5"], adam, {"autocast": "bf16"}, 1,
    ),
    "u_net": (pipeline_models.UNet, images, IMAGES, ["down.1", "middle", "wider.1"], adam, {"ema_decay": 0.5}, None),
    "language_model": (
        pipeline_models.LanguageModel, tokens, TOKENS, ["layers.1", "layers.2", "norm"], adam, {"clip_grad_norm": 1}, 1,
    ),
    "checkpointed": (Checkpointed, classes, FLAT, ["blocks.2", "blocks.3", "head"], adam, {}, 1),
}  # fmt: skip


def train(name):
    make, loss, data, starts, make_optimizer, options, micro_batch_size = CASES[name]
    torch.manual_seed(0)
    model = make()
    optimizer = make_optimizer(model)
    parallel = None
    if stages > 1:
        names = stages if is_automatic else {2: starts[1:2], 3: starts[:2], 4: starts}[stages]
        how = {"zero": 3, "replicas": 2} if schedule == "zero3" else {"schedule": schedule}
        parallel = unisono.parallel.Pipeline(stages=names, **how)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=5, parallel=parallel, progress=False, seed=3, **options)
    several = isinstance(optimizer, dict)
    size = {} if name == "mlp" else {"micro_batch_size": 1}
    found = []
    # Each size of a micro-batch and each mode is a plan of its own, and to make one takes longer than all else here.
    for epoch in trainer.epochs(2):
        for batch in trainer.batches(data, batch_size=10, micro_batch_size=micro_batch_size):
            names = [None, "late"] if several and batch.step == 1 else ["early" if several and epoch else None]
            for each in names:
                result = trainer.step(loss, batch, optimizer=each)
                found.append((float(result), result.grad_norm, {k: float(v) for k, v in result.values.items()}))
        averaged = epoch > 0 and "ema_decay" in options
        if averaged or not epoch:
            found.append(trainer.evaluate(loss, data, batch_size=10, ema=averaged, **size))
    if micro_batch_size and name != "language_model":
        outputs = trainer.predict(lambda model, batch: model(batch[0]), data, batch_size=10, to="all", **size)
        found.append(hashlib.sha256(outputs.cpu().contiguous().numpy().tobytes()).hexdigest())
    found.append(trainer.digest())
    found += [
        (n, hashlib.sha256(p.detach().cpu().contiguous().numpy().tobytes()).hexdigest())
        for n, p in model.named_buffers()
    ]
    print(f"{name}: {hashlib.sha256(repr(found).encode()).hexdigest()}")


with contextlib.suppress(ImportError):
    import numpy  # noqa: F401  seeds are set for it, too
for name in chosen or CASES:
    train(name)
