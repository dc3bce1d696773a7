"""Take steps of all forms and print a digest of each: one line `name = sha` each.

`steps.py ENGINE [FOLDER STEPS [NAME ...]]`: with a folder, the runs are kept there, go on from there, and end after so
many steps unless that is 0.
"""

import hashlib
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

ENGINE, *KEPT = sys.argv[1:]
FOLDER, LAST = (Path(KEPT[0]), int(KEPT[1]) or None) if KEPT else (None, None)
NAMES = KEPT[2:]
N = 45


class Said(list):
    """What the steps of a run came to, kept with the run."""

    def state_dict(self):
        return {"said": [*self]}

    def load_state_dict(self, state):
        self[:] = state["said"]


class Net(nn.Module):
    """A body with all that a forward pass changes, a head, a temperature and parameters that are not used."""

    def __init__(self, *, sparse=False):
        super().__init__()
        self.table = nn.Embedding(20, 6, sparse=sparse)
        self.body = nn.Sequential(nn.Linear(6, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Dropout(0.2), nn.Linear(300, 8))
        self.head = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Parameter(torch.zeros(3))

    def embed(self, batch):
        return self.body(batch[0] + self.table(batch[1]))

    def forward(self, batch):
        return self.head(self.embed(batch))


class SAM(torch.optim.Optimizer):
    """Foret et al., "Sharpness-Aware Minimization", 2021; as its implementations for torch are written."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure):
        members = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in members]).norm()
        kept = [p.clone() for p in members]
        for p in members:
            p.add_(p.grad, alpha=0.05 / norm.item())
        with torch.enable_grad():
            closure()
        for p, old in zip(members, kept, strict=True):
            p.copy_(old)
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


def data():
    g = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(N, 6, generator=g), torch.randint(0, 20, (N,), generator=g), torch.randint(0, 3, (N,), generator=g)
    )


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch), batch[2], reduction="none")


def large(model, batch):
    """Losses whose scaled gradient overflows float16 in the first steps, until the scale is smaller."""
    return 50 * cross_entropy(model, batch)


def with_values(model, batch):
    scores = model(batch)
    losses = F.cross_entropy(scores, batch[2], reduction="none")
    kept = batch[2] > 0
    return {
        "loss": unisono.Sum(losses[kept].sum(), kept.sum()),
        "accuracy": scores.argmax(1) == batch[2],
        "margin": unisono.Sum(scores.max(1).values[kept].sum(), kept.sum()),
    }


def encode(model, batch):
    return {"z": model.embed(batch), "labels": (batch[2], batch[0].double())}


def contrast(model, encodings):
    """Pull samples of a class together; the labels have come with the encodings."""
    z, labels = F.normalize(encodings["z"]), encodings["labels"][0]
    scores = z @ z.t() * model.scale.exp() - 1e9 * torch.eye(len(z))
    positive = (labels[:, None] == labels).float() - torch.eye(len(z))
    losses = -(F.log_softmax(scores, 1) * positive).sum(1) / positive.sum(1).clamp(min=1)
    return {"loss": losses, "best": scores.max(1).values.detach()}


def large_contrast(model, encodings):
    return 30 * contrast(model, encodings)["loss"]


def noise(model):
    """Change gradients in place, drop one, and give one to a parameter that has none."""
    for p in model.parameters():
        if p.grad is not None and not p.grad.is_sparse:
            p.grad += 0.01 * torch.randn(p.grad.shape)
        elif p.grad is not None:
            p.grad = p.grad * 0.5
    nn.utils.clip_grad_value_([model.body[0].weight], 0.01)
    model.head.bias.grad = None
    model.unused.grad = torch.ones(3)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def several(first):
    def make(model):
        rest = [p for p in model.parameters() if p is not model.table.weight and p.dim() != 2]
        matrices = [p for p in model.parameters() if p is not model.table.weight and p.dim() == 2]
        if first == "SparseAdam":
            tables = torch.optim.SparseAdam([model.table.weight], lr=0.05)
            return {"tables": tables, "rest": torch.optim.AdamW([*matrices, *rest], lr=0.01)}
        return {
            "matrices": torch.optim.Muon(matrices, lr=0.02),
            "rest": torch.optim.AdamW([model.table.weight, *rest], lr=0.01),
        }

    return make


def run(name, loss=cross_entropy, make=adamw, *, sparse=False, alternate=False, micro=None, options=(), **step):
    torch.manual_seed(1)
    model = Net(sparse=sparse)
    optimizer = make(model)
    parts = optimizer if isinstance(optimizer, dict) else {None: optimizer}
    schedulers = {name: torch.optim.lr_scheduler.StepLR(each, 3, 0.5) for name, each in parts.items()}
    said = Said()
    options = {
        "scheduler": schedulers if isinstance(optimizer, dict) else schedulers[None],
        "engine": ENGINE,
        "directory": FOLDER and FOLDER / name,
        "stateful": {"said": said},
        "autocast": None,
        **dict(options),
    }
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, progress=False, **options)
    for _ in trainer.epochs(2, max_steps=LAST):
        for batch in trainer.batches(data(), batch_size=20, micro_batch_size=micro):
            names = parts if alternate and batch.step % 2 else [None]
            for part in names:
                result = trainer.step(loss, batch, optimizer=part, **step)
                values = {key: (value.total, value.count) for key, value in result.values.items()}
                skipped = "skipped" if result.skipped else "taken"
                said.append(repr((result.loss, result.grad_norm, result.learning_rates, skipped, values)))
    if options["autocast"] == "fp16" and LAST is None:
        assert 2 < sum("skipped" in line for line in said) < len(said), said
    return hashlib.sha256(f"{trainer.digest()} {said}".encode()).hexdigest()


CLIP = (("clip_grad_norm", 0.5),)
FP16 = (("autocast", "fp16"),)
STEPS = {
    "values": partial(run, loss=with_values),
    "values of micro-batches": partial(run, loss=with_values, micro=2),
    "changed gradients": partial(run, on_gradients=noise),
    "changed gradients, clipped": partial(run, on_gradients=noise, options=CLIP),
    "changed gradients of a table": partial(run, make=several("SparseAdam"), sparse=True, on_gradients=noise),
    "encoded": partial(run, loss=contrast, encode=encode, options=CLIP),
    "encoded again": partial(run, loss=contrast, encode=encode, recompute=True, options=CLIP),
    "encoded by micro-batches": partial(run, loss=contrast, encode=encode, micro=3),
    "encoded again by micro-batches": partial(run, loss=contrast, encode=encode, recompute=True, micro=3),
    "encoded in low precision": partial(run, loss=contrast, encode=encode, options=(("autocast", "bf16"),)),
    "SparseAdam and AdamW": partial(run, make=several("SparseAdam"), sparse=True, options=CLIP),
    "Muon and AdamW": partial(run, make=several("Muon")),
    "together and in turn": partial(run, make=several("SparseAdam"), sparse=True, alternate=True),
    "SparseAdam and AdamW in fp16": partial(run, loss=large, make=several("SparseAdam"), sparse=True, options=FP16),
    "Muon and AdamW in fp16, clipped": partial(run, loss=large, make=several("Muon"), options=FP16 + CLIP),
    "changed gradients in fp16": partial(run, loss=large, on_gradients=noise, options=FP16),
    "encoded again in fp16": partial(run, loss=large_contrast, encode=encode, recompute=True, options=FP16),
}
ALONE = (("engine", "collective"),) if ENGINE == "shared" else ()
WITHOUT_SHARING = {
    "LBFGS": partial(run, make=lambda m: torch.optim.LBFGS(m.parameters(), lr=0.3, max_iter=4), options=ALONE),
    "SAM": partial(run, make=lambda m: SAM(m.parameters(), lr=0.1), closure=True, options=CLIP + ALONE),
}
for name, steps in {**STEPS, **({} if ENGINE == "shared" and FOLDER is None else WITHOUT_SHARING)}.items():
    if not NAMES or name in NAMES:
        unisono.print0(f"{name} = {steps(name)}")
