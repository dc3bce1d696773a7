"""Parts that models of random programs are made of: ordinary layers, and the odd ones that people write.

A stem takes (values [samples, 48], tokens [samples, 5]) and returns features [samples, width]; a part takes features
and returns features of the same shape. The names of `STEMS` and `PARTS` are what descriptions of programs say.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

VALUES, TOKENS, WORDS = 48, 5, 23


class Dense(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(VALUES, width)

    def forward(self, values: Tensor, tokens: Tensor) -> Tensor:
        return self.linear(values)


class Images(nn.Module):
    def __init__(self, width: int, *, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, width, 3, stride=2, groups=1, bias=False)
        self.memory_format = memory_format
        self.to(memory_format=memory_format)

    def forward(self, values: Tensor, tokens: Tensor) -> Tensor:
        images = values.view(-1, 3, 4, 4).contiguous(memory_format=self.memory_format)
        return self.second(self.norm(self.first(images)).relu()).mean((2, 3))


class Signals(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(4, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.second = nn.ConvTranspose1d(8, width, 3)

    def forward(self, values: Tensor, tokens: Tensor) -> Tensor:
        return self.second(self.norm(self.first(values.view(-1, 4, 12))).relu()).amax(2)


class Words(nn.Module):
    def __init__(self, width: int, *, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width, sparse=sparse, padding_idx=None if sparse else 0)

    def forward(self, values: Tensor, tokens: Tensor) -> Tensor:
        return self.table(tokens).mean(1)


class Bags(nn.Module):
    def __init__(self, width: int, *, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(WORDS, width, mode="sum", sparse=sparse)

    def forward(self, values: Tensor, tokens: Tensor) -> Tensor:
        return self.table(tokens)


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.cells = nn.Embedding(WORDS, 6), nn.GRU(6, width, batch_first=True)

    def forward(self, values: Tensor, tokens: Tensor) -> Tensor:
        return self.cells(self.table(tokens))[0][:, -1]


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width)
        self.heads = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)

    def forward(self, values: Tensor, tokens: Tensor) -> Tensor:
        words = self.table(tokens)
        return self.heads(words, words, words, need_weights=False)[0].mean(1)


class Residual(nn.Module):
    def __init__(self, width: int, *, recomputed: bool = False) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.recomputed = recomputed

    def forward(self, h: Tensor) -> Tensor:
        return h + (checkpoint(self.inner, h, use_reentrant=False) if self.recomputed else self.inner(h))


class Routed(nn.Module):
    """Uses one of two branches, by the data; a third one never."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, h: Tensor) -> Tensor:
        return self.branches[int(h[0, 0] > 0)](h)


class Tied(nn.Module):
    """Two layers of one weight: one parameter, or two whose values lie at one place."""

    def __init__(self, width: int, *, through_data: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        if through_data:
            self.second.weight.data = self.first.weight.data
        else:
            self.second.weight = self.first.weight

    def forward(self, h: Tensor) -> Tensor:
        return self.second(self.first(h).tanh())


class Shared(nn.Module):
    """One module under two names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Linear(width, width)
        self.other = self.one

    def forward(self, h: Tensor) -> Tensor:
        return self.other(self.one(h).relu())


class Scaled(nn.Module):
    """Multiplies by an odd parameter, brought to the shape [width]."""

    def __init__(self, parameter: Tensor, *, requires_grad: bool = True) -> None:
        super().__init__()
        self.parameter = nn.Parameter(parameter, requires_grad=requires_grad)

    def forward(self, h: Tensor) -> Tensor:
        p = self.parameter.abs() if self.parameter.is_complex() else self.parameter
        return h * (1 + 0.1 * (p.flatten()[: h.shape[1]] if p.dim() else p)).to(h.dtype)


class Empty(nn.Module):
    """A parameter without elements, which is added up, and a buffer without any."""

    def __init__(self, width: int, *, used: bool) -> None:
        super().__init__()
        self.nothing, self.used = nn.Parameter(torch.empty(0, width)), used
        self.register_buffer("none_yet", torch.empty(0))

    def forward(self, h: Tensor) -> Tensor:
        return h + self.nothing.sum() if self.used else h


class Cast(nn.Module):
    """A layer of another type."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.dtype = layer.to(dtype), dtype

    def forward(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.layer(h.to(self.dtype)).to(h.dtype)


class Centred(nn.Module):
    """Subtracts a running mean: a parameter without gradient, a buffer, or a buffer that is not saved."""

    def __init__(self, width: int, *, held: str) -> None:
        super().__init__()
        mean = torch.zeros(width)
        if held == "parameter":
            self.mean = nn.Parameter(mean, requires_grad=False)
        else:
            self.register_buffer("mean", mean, persistent=held != "unsaved buffer")
        self.held = held

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                mean = h.detach().float().mean(0).to(self.mean.dtype)
                if self.held == "replaced buffer":
                    self.mean = self.mean * 0.9 + 0.1 * mean
                else:
                    self.mean.lerp_(mean, 0.1)
        return h - self.mean.to(h.dtype)


class Counting(nn.Module):
    """Counts in whole numbers, those beyond float64 too, and remembers truth values; one buffer is None."""

    def __init__(self, width: int, *, start: int = 0) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(start))
        self.register_buffer("small", torch.zeros(3, dtype=torch.uint8))
        self.register_buffer("seen", torch.zeros(width, dtype=torch.bool))
        self.register_buffer("absent", None)
        self.register_parameter("missing", None)

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.small += 7
            self.seen |= h.detach()[0] > 0.5
        return h


class Hooked(nn.Module):
    """The gradient of the weight is changed on its way."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.linear.weight.register_hook(lambda gradient: gradient * 0.5)

    def forward(self, h: Tensor) -> Tensor:
        return self.linear(h)


class Noisy(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h + 0.1 * torch.randn_like(h) if self.training else h


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def half_frozen(layer: nn.Linear) -> nn.Module:
    layer.bias.requires_grad_(False)
    return layer


STEMS: dict[str, Callable[[int], nn.Module]] = {
    "Linear": Dense,
    "Conv2d": Images,
    "Conv2d, channels last": lambda width: Images(width, memory_format=torch.channels_last),
    "Conv1d": Signals,
    "Embedding": Words,
    "sparse Embedding": lambda width: Words(width, sparse=True),
    "EmbeddingBag": Bags,
    "sparse EmbeddingBag": lambda width: Bags(width, sparse=True),
    "GRU": Recurrent,
    "MultiheadAttention": Attention,
}

ORDINARY: dict[str, Callable[[int], nn.Module]] = {
    "Linear": lambda width: nn.Linear(width, width),
    "ReLU": lambda width: nn.ReLU(),
    "Dropout": lambda width: nn.Dropout(0.3),
    "BatchNorm1d": nn.BatchNorm1d,
    "BatchNorm1d, average of all": lambda width: nn.BatchNorm1d(width, momentum=None),
    "LayerNorm": nn.LayerNorm,
    "GroupNorm": lambda width: nn.GroupNorm(2, width),
    "PReLU": lambda width: nn.PReLU(),
    "Residual": Residual,
}

ODD: dict[str, Callable[[int], nn.Module]] = {
    "recomputed": lambda width: Residual(width, recomputed=True),
    "routed by the data": Routed,
    "tied": Tied,
    "tied through .data": lambda width: Tied(width, through_data=True),
    "one module, two names": Shared,
    "0-d parameter": lambda width: Scaled(torch.tensor(0.5)),
    "transposed parameter": lambda width: Scaled(torch.randn(width, 3).t()),
    "strided parameter": lambda width: Scaled(torch.randn(2 * width)[::2]),
    "expanded parameter": lambda width: Scaled(torch.zeros(1).expand(width)),
    "complex parameter": lambda width: Scaled(torch.randn(width, dtype=torch.complex64)),
    "float64 parameter": lambda width: Scaled(torch.randn(width, dtype=torch.float64)),
    "bfloat16 parameter": lambda width: Scaled(torch.randn(width).bfloat16()),
    "empty parameter": lambda width: Empty(width, used=True),
    "empty parameter, unused": lambda width: Empty(width, used=False),
    "bfloat16 layer": lambda width: Cast(nn.Linear(width, width), torch.bfloat16),
    "float64 layer": lambda width: Cast(nn.Linear(width, width), torch.float64),
    "mean in a buffer": lambda width: Centred(width, held="buffer"),
    "mean in a replaced buffer": lambda width: Centred(width, held="replaced buffer"),
    "mean in an unsaved buffer": lambda width: Centred(width, held="unsaved buffer"),
    "mean in a parameter": lambda width: Centred(width, held="parameter"),
    "counter": Counting,
    "large counter": lambda width: Counting(width, start=2**53 + 1),
    "spectral norm": lambda width: parametrizations.spectral_norm(nn.Linear(width, width)),
    "weight norm": lambda width: parametrizations.weight_norm(nn.Linear(width, width)),
    "hooked gradient": Hooked,
    "noise": lambda width: Noisy(),
    "frozen": lambda width: frozen(nn.Linear(width, width)),
    "frozen bias": lambda width: half_frozen(nn.Linear(width, width)),
    "BatchNorm1d, no statistics": lambda width: nn.BatchNorm1d(width, track_running_stats=False),
    "frozen BatchNorm1d": lambda width: frozen(nn.BatchNorm1d(width)),
}

PARTS = ORDINARY | ODD
