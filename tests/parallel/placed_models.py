"""Models for the tests of `place`, and whole copies of them to compare with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Toy(nn.Module):
    """Two layers with code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(6, 8)
        self.relu = nn.ReLU()
        self.drop = nn.Dropout(0.3)
        self.net2 = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(self.drop(self.relu(self.net1(x))))


class Skips(nn.Module):
    """Skips over layers, parameters and buffers of its own, keyword arguments, and nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.position = nn.Parameter(torch.randn(5, 8))
        self.register_buffer("scale", torch.rand(5, 8))
        self.inner = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
        self.head = nn.Linear(16, 16)

    def forward(self, tokens: Tensor, *, extra: dict[str, list[Tensor]] | None = None) -> dict[str, object]:
        start = self.embed(tokens) + self.position
        hidden = self.inner["b"](torch.relu(self.inner["a"](start)))
        hidden = hidden + start * self.scale
        if extra is not None:
            hidden += extra["more"][0]
        logits = self.head(torch.cat([hidden, start], -1))
        return {"logits": logits, "tied": F.linear(hidden, self.embed.weight), "others": (hidden, [start])}
