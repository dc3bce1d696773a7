"""Models that tests cut over stages, and functions of them."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def mlp() -> nn.Module:
    layers = [(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3)) for _ in range(6)]
    return nn.Sequential(*itertools.chain(*layers))


class Residual(nn.Module):
    """Skips, dropout and a parameter between blocks; all blocks' outputs are used again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(6)
        )
        self.shift = nn.Parameter(torch.randn(4, 1, 1))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, kept = x + self.shift, []
        for number, block in enumerate(self.blocks):
            y = block(x)
            kept.append(y)
            x = F.relu(x + y) if number % 2 else F.dropout(torch.cat([x, y], 1)[:, :4] + x * y, 0.1, self.training)
            if x.shape[-1] > 3:
                x = x * 1.5
        return self.head((sum(kept) * x * self.shift).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def convolution(inputs: int, outputs: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
            )

        self.down = nn.ModuleList([convolution(2, 4), convolution(4, 8)])
        self.middle = convolution(8, 8)
        self.wider = nn.ModuleList([nn.ConvTranspose2d(8, 8, 2, 2), nn.ConvTranspose2d(4, 4, 2, 2)])
        self.up = nn.ModuleList([convolution(16, 4), convolution(8, 2)])

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for wider, up, skip in zip(self.wider, self.up, reversed(skips), strict=True):
            x = wider(x)
            if x.shape[-1] != skip.shape[-1]:
                x = F.pad(x, (0, skip.shape[-1] - x.shape[-1], 0, skip.shape[-2] - x.shape[-2]))
            x = up(torch.cat([x, skip], 1))
        return x


class LanguageModel(nn.Module):
    """Its embedding is its head, and positions are added before each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 12)
        self.positions = nn.Parameter(torch.randn(8, 12))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(12, 3, 24, batch_first=True, dropout=0.1) for _ in range(4)
        )
        self.norm = nn.LayerNorm(12)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True) + self.positions[: tokens.shape[1]]
        return F.linear(self.norm(x), self.embedding.weight)


class TwoOfEach(nn.Module):
    """Two inputs, nested outputs with None, keyword arguments, a block that is called twice, changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.both, self.recurrent = nn.Bilinear(4, 4, 4), nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor, y: Tensor, *, scale: float) -> tuple[Tensor, dict[str, Tensor | None]]:
        u, v = self.first(x) * 1, self.second(y)
        u += v
        w = self.first(self.both(u, v))
        output, hidden = self.recurrent(w[:, None])
        result = torch.zeros_like(w)
        result[:, :2] = output[:, 0, :2]
        result[:, 2:] += u[:, 2:] * scale
        return result, {"hidden": hidden, "none": None, "u": u}


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def of_both(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor | None]:
    result, more = model(x, y, scale=0.5)
    return {"loss": result.square().mean() + more["hidden"].sum(), "result": result, **more}


class Written(nn.Module):
    """A model whose forward is a function, for code between blocks."""

    def __init__(self, code) -> None:
        super().__init__()
        self.l = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("mean", torch.zeros(6))
        self.scale = torch.full((6,), 2.0)
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


def checkpointed(m, x):
    h = checkpoint(m.l[0], x, use_reentrant=False)
    h = checkpoint(lambda t: F.dropout(m.l[1](t).relu(), 0.5), h, use_reentrant=False)
    return m.l[3](checkpoint(m.l[2], h, use_reentrant=False))


def checkpointed_together(m, x):
    return m.l[3](checkpoint(lambda t: m.l[1](m.l[0](t)), x, use_reentrant=False))


def modified_in_place(m, x):
    h = m.l[0](x)
    h += m.l[1](h * 1)
    h.mul_(0.5)
    h += m.l[2](h * 1).relu_()
    k = h
    h = h + 1
    k += m.l[3](h * m.scale)
    return k + h


def sometimes_doubled(m, x):
    h = m.l[0](x)
    if x.sum() > 0:
        h = h * 2
    return m.l[2](h)
