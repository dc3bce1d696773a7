"""Training mode and evaluation mode of models that are trained: dropout that does nothing in a model under training.

`from_pretrained` returns models in evaluation mode, and they also stay in it after a validation loop that calls only
`eval()`. BatchNorm is often kept in evaluation mode on purpose, together with its weights, so it is not checked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from unisono.engine.model_contents import plain_name

__all__ = ["begin_training", "idle_dropout"]

_RATES = ("drop_prob", "drop_rate", "drop_path_rate", "layerdrop")
_SHOWN = 3


def begin_training(modules: Mapping[str, nn.Module], trained: Collection[int]) -> None:
    """Put models into training mode that are in evaluation mode as a whole and have parameters to train.

    In a model in training mode, modules that the user has put into evaluation mode, such as frozen BatchNorm, stay so.

    Args:
        modules: The models.
        trained: The ids of the parameters to train.
    """
    for root in modules.values():
        if not root.training and any(id(p) in trained for p in root.parameters()):
            root.train()


def idle_dropout(modules: Mapping[str, nn.Module], trained: Collection[int]) -> str | None:
    """Return a warning if there is dropout in evaluation mode beside parameters that are trained; None otherwise.

    Dropout belongs to the smallest module around it that has parameters: that of a frozen backbone may be inactive.

    Args:
        modules: The models, by the prefix of their names.
        trained: The ids of the parameters that are trained.
    """
    found: list[str] = []
    for prefix, root in modules.items():
        beside: dict[str, bool] = {}
        for name, module in root.named_modules():
            parameters = list(module.parameters())
            # A module without parameters belongs to the one around it, which has come before it.
            outside = beside.get(name.rpartition(".")[0], False)
            beside[name] = any(id(p) in trained for p in parameters) if parameters else outside
            if beside[name] and not module.training and _drops(module):
                found.append((prefix + name).removesuffix(".") or type(module).__name__)
    if not found:
        return None
    names = ", ".join(repr(plain_name(name)) for name in found[:_SHOWN])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    are = "are" if len(found) > 1 else "is"
    return (
        f"{names}{more} {are} in evaluation mode, so the model is trained without dropout: call model.train() before "
        "training, and after each model.eval() of your own (from_pretrained returns models in evaluation mode). To "
        "train without dropout, set its rate to 0."
    )


def _drops(module: nn.Module) -> bool:
    """Return True if a module drops values in training, by its class or by a rate attribute, as attention and RNNs."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    attributes = vars(module)
    if "drop" in type(module).__name__.lower() and _is_rate(attributes.get("p")):  # such as StochasticDepth, DropPath
        return True
    return any(_is_rate(value) for key, value in attributes.items() if "dropout" in key or key in _RATES)


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
