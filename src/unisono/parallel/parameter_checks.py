"""Parameters of replicas that ranks do not have alike: frozen on some of them, or put into a model later.

All that is checked here would make a mean over ranks wrong without an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch.distributed as dist
from torch import nn

from unisono.errors import RankMismatchError, UnisonoError
from unisono.mismatch import tell_differences
from unisono.parallel.gradient_bucket import Parameter
from unisono.parallel.gradient_transport import GradientTransport

__all__ = ["name_parameters", "refuse_added", "refuse_frozen"]


def refuse_frozen(
    parameters: Sequence[Parameter], gradient_transport: GradientTransport, active: Sequence[int]
) -> NoReturn:
    """Raise an error that says which parameters are frozen on some ranks alone. Every rank must call it.

    Args:
        parameters: Those of the model.
        gradient_transport: The ranks.
        active: The ranks of the group that had a batch.

    Raises:
        RankMismatchError: Always.
    """
    own = {f"requires_grad of {p.name!r}": p.tensor.requires_grad for p in parameters}
    everyone = gradient_transport.gather(own, "a backward of replicas")
    ranks = dist.get_process_group_ranks(gradient_transport.group)
    differences = tell_differences([everyone[r] for r in active], [ranks[r] for r in active])
    raise RankMismatchError(
        f"{differences}, so the mean over ranks would count it as zero where it is frozen. Freeze and unfreeze "
        "parameters on every rank, between the same backward passes"
    )


def refuse_added(model: nn.Module, parameters: Sequence[Parameter]) -> None:
    """Find parameters that were added to the model later, whose gradients would not be reduced.

    Raises:
        UnisonoError: There is such a parameter.
    """
    known = {id(p.tensor) for p in parameters}
    for name, tensor in model.named_parameters():
        if id(tensor) not in known and tensor.requires_grad and tensor.is_floating_point():
            raise UnisonoError(
                f"parameter {name!r} was put into the model after replicate(), so its gradient is not reduced: "
                "call replicas.update() on every rank after changing a model"
            )


def name_parameters(parameters: Sequence[Parameter], indices: Iterable[int]) -> str:
    """Return the names of the parameters with these indices, up to four of them, for a message."""
    names = [repr(parameters[i].name) for i in sorted(indices)]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
