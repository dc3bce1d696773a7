"""Optimizers and learning-rate schedulers of random programs: all that torch has, found by looking into its modules."""

from __future__ import annotations

import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import lr_scheduler, swa_utils
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

OPTIMIZERS: dict[str, type[optim.Optimizer]] = {
    name: kind
    for name, kind in sorted(vars(optim).items())
    if inspect.isclass(kind) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
}
SCHEDULERS: dict[str, type[LRScheduler]] = {
    name: kind
    for module in (lr_scheduler, swa_utils)
    for name, kind in sorted(vars(module).items())
    if inspect.isclass(kind)
    and issubclass(kind, LRScheduler)
    and not name.startswith("_")
    and kind not in (LRScheduler, ReduceLROnPlateau)
}

_ANY = sorted(OPTIMIZERS.keys() - {"LBFGS", "Muon", "SparseAdam"})
"""Optimizers of all kinds of parameters that do a step with one gradient."""
_NUMBERS: dict[str, list[Any]] = {
    "lr": [0.01, 0.003],
    "weight_decay": [0.0, 0.1],
    "momentum": [0.0, 0.9],
    "dampening": [0.0, 0.1],
    "betas": [(0.9, 0.999), (0.5, 0.9)],
    "rho": [0.9, 0.5],
    "alpha": [0.9, 0.5],
    "t0": [1e6, 2.0],
    "lr_decay": [0.0, 0.1],
    "initial_accumulator_value": [0.0, 0.1],
    "beta2_decay": [-0.8, -0.5],
    "etas": [(0.5, 1.2), (0.4, 1.5)],
    "adjust_lr_fn": [None, "match_rms_adamw"],
}
_RARE = {"capturable": 0.03, "differentiable": 0.03, "foreach": 0.25, "fused": 0.5}
_SCHEDULES: dict[str, dict[str, list[Any]]] = {
    "ChainedScheduler": {},
    "ConstantLR": {"factor": [0.5], "total_iters": [2, 4]},
    "CosineAnnealingLR": {"T_max": [3, 8]},
    "CosineAnnealingWarmRestarts": {"T_0": [2, 3], "T_mult": [1, 2]},
    "CyclicLR": {"base_lr": [0.001], "max_lr": [0.02], "step_size_up": [2, 3], "mode": ["triangular2", "exp_range"]},
    "ExponentialLR": {"gamma": [0.9, 0.5]},
    "LambdaLR": {"lr_lambda": ["0.9 ** n"]},
    "LinearLR": {"start_factor": [0.1, 0.5], "total_iters": [2, 5]},
    "MultiStepLR": {"milestones": [(1, 3), (2,)]},
    "MultiplicativeLR": {"lr_lambda": ["0.9 ** n"]},
    "OneCycleLR": {"max_lr": [0.02], "total_steps": [60], "three_phase": [False, True]},
    "PolynomialLR": {"total_iters": [4, 9], "power": [1.0, 2.0]},
    "SWALR": {"swa_lr": [0.002], "anneal_epochs": [2, 4], "anneal_strategy": ["cos", "linear"]},
    "SequentialLR": {"milestones": [(2,), (3,)]},
    "StepLR": {"step_size": [1, 3]},
}


@dataclass(frozen=True)
class OptimizerOf:
    """An optimizer of some of a program's parameters."""

    model: int
    members: str
    """Which parameters of the model: "all", "tables", "dense", "matrices" or "others"."""
    kind: str
    options: dict[str, Any]
    groups: int
    """Parameters are dealt to so many parameter groups."""
    rate_in_tensor: bool
    schedule: tuple[str, dict[str, Any]] | None

    def build(self, parameters: Sequence[Tensor]) -> optim.Optimizer:
        options = dict(self.options)
        if self.rate_in_tensor:
            options["lr"] = torch.tensor(options["lr"])
        dealt = [parameters[i :: self.groups] for i in range(self.groups)]
        groups = [{"params": list(each)} for each in dealt if each]
        for group in groups[1:]:
            group["lr"] = options["lr"] / 2
        return OPTIMIZERS[self.kind](groups, **options)

    def build_schedule(self, optimizer: optim.Optimizer) -> LRScheduler | None:
        if self.schedule is None:
            return None
        name, options = self.schedule
        options = dict(options)
        if "lr_lambda" in options:
            options["lr_lambda"] = lambda n: 0.9**n
        if name in ("CyclicLR", "OneCycleLR"):
            options["cycle_momentum"] = bool({"momentum", "betas"} & optimizer.defaults.keys())
        if name in ("ChainedScheduler", "SequentialLR"):
            parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
            return SCHEDULERS[name](
                *([parts] if name == "ChainedScheduler" else [optimizer, parts, list(options["milestones"])])
            )
        return SCHEDULERS[name](optimizer, **options)


def draw_optimizer(
    rng: random.Random, *, model: int, members: str = "all", kinds: Sequence[str] | None = None
) -> OptimizerOf:
    """Draw an optimizer that torch lets one build, with its flags; some are refused when they are to do a step."""
    kind = rng.choice(kinds or _ANY)
    if kinds is None and rng.random() < 0.01:
        kind = "LBFGS"
    options: dict[str, Any] = {}
    rate_in_tensor = False
    for name, parameter in inspect.signature(OPTIMIZERS[kind]).parameters.items():
        if members in ("tables", "all with tables") and name not in ("lr", "betas", "maximize"):
            continue  # most of the others are refused for sparse gradients by torch itself
        if "bool" in str(parameter.annotation):
            if rng.random() < _RARE.get(name, 0.3):
                options[name] = True
        elif name in _NUMBERS:
            options[name] = rng.choice(_NUMBERS[name])
            if name == "lr" and "Tensor" in str(parameter.annotation):
                rate_in_tensor = rng.random() < 0.1
    options.pop("maximize", None) if members != "all" else None
    if options.get("fused") or options.get("foreach"):
        options.pop("differentiable", None)
    if options.get("fused") or rate_in_tensor:
        options.pop("foreach", None)
    if options.get("nesterov") and kind == "SGD":
        options |= {"momentum": 0.9, "dampening": 0.0}
    if options.get("maximize"):
        options["lr"] /= 100  # the loss grows, and should stay finite
    if kind == "Adadelta":
        options["lr"] = 1.0
    if kind == "LBFGS":
        options["max_iter"] = 4  # each is a pass over the whole batch
    return OptimizerOf(
        model=model,
        members=members,
        kind=kind,
        options=options,
        groups=rng.choice([1, 1, 1, 2, 3]) if kind != "LBFGS" else 1,
        rate_in_tensor=rate_in_tensor,
        schedule=_draw_schedule(rng) if rng.random() < 0.4 else None,
    )


def _draw_schedule(rng: random.Random) -> tuple[str, dict[str, Any]]:
    unknown = SCHEDULERS.keys() - _SCHEDULES.keys()
    assert not unknown, f"torch has schedulers whose arguments are not known here: {sorted(unknown)}; add them"
    name = rng.choice(sorted(SCHEDULERS))
    return name, {option: rng.choice(values) for option, values in _SCHEDULES[name].items()}
