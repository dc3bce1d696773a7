"""The models and data that several benchmarks train, and the plain loop's side of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

__all__ = [
    "MLP_4M",
    "MLP_25M",
    "MLP_66K",
    "MLP_66K_SHORT",
    "TINY",
    "Subject",
    "classify",
    "conv_net",
    "optimizer_of",
    "transformer",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A model to train, and data for it."""

    name: str
    build: Callable[[], nn.Module]
    """Builds the model; the same weights after the same torch.manual_seed."""
    inputs: Callable[[int], Tensor]
    """Draws so many inputs."""
    targets: Callable[[int], Tensor]
    """Draws so many targets: classes, of any shape after the first dimension."""
    batch_size: int
    """Samples of one rank's batch."""
    block: int
    """Steps that are timed together, so that a measurement takes some milliseconds."""
    is_random: bool = False
    """Whether the model draws random numbers in training, so that two sides cannot have equal losses."""

    def dataset(self, samples: int) -> TensorDataset:
        """Draw a dataset."""
        return TensorDataset(self.inputs(samples), self.targets(samples))


def classify(model: Any, batch: Any) -> Tensor:
    """The loss for Trainer, as its documentation recommends: one per sample (the mean over a sample's tokens)."""
    logits, targets = model(batch[0]), batch[1]
    if targets.dim() == 1:
        return F.cross_entropy(logits, targets, reduction="none")
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).mean(1)


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """AdamW, fused: the fastest on a CPU, so that what a loop adds to it shows most."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _mlp(name: str, *widths: int, batch_size: int, block: int) -> Subject:
    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    return Subject(
        name=name,
        build=build,
        inputs=lambda n: torch.randn(n, widths[0]),
        targets=lambda n: torch.randint(widths[-1], (n,)),
        batch_size=batch_size,
        block=block,
    )


TINY = _mlp("MLP 1k", 16, 32, 10, batch_size=16, block=2)
"""For runs that only see that everything works."""
MLP_66K = _mlp("MLP 66k", 64, 256, 184, 10, batch_size=128, block=20)
MLP_66K_SHORT = replace(MLP_66K, batch_size=32, block=50)
"""The same with less to compute in a step."""
MLP_4M = _mlp("MLP 4M", 1024, 1024, 1024, 1024, 1024, 10, batch_size=64, block=3)
MLP_25M = _mlp("MLP 25M", *[2048] * 7, 10, batch_size=32, block=1)


class _LanguageModel(nn.Module):
    def __init__(self, *, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(self.tokens(x) + self.places.weight, mask=self.mask, is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits


def transformer(*, width: int = 256, layers: int = 4, length: int = 128) -> Subject:
    """A causal Transformer over bytes; 3 million parameters."""
    return Subject(
        name=f"Transformer d{width} x{layers}, {length} tokens",
        build=lambda: _LanguageModel(width=width, layers=layers, length=length),
        inputs=lambda n: torch.randint(256, (n, length)),
        targets=lambda n: torch.randint(256, (n, length)),
        batch_size=4,
        block=1,
    )


def conv_net() -> Subject:
    """The network of examples/digits.py: convolutions, BatchNorm and Dropout."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(0.25), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    return Subject(
        name="digits CNN, BatchNorm",
        build=build,
        inputs=lambda n: torch.rand(n, 1, 8, 8),
        targets=lambda n: torch.randint(10, (n,)),
        batch_size=64,
        block=5,
        is_random=True,
    )
