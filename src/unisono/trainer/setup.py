"""Choices and checks before the first step: devices, constants, and that all ranks agree."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from unisono.arguments import function
from unisono.collectives.world import World
from unisono.engine.description import plain
from unisono.engine.local_steps import LocalSGD
from unisono.engine.model_contents import named_buffers
from unisono.errors import RankMismatchError
from unisono.plan import rank_block
from unisono.state.digest import digest
from unisono.text import a_type
from unisono.trainer.closure import needs_closure
from unisono.trainer.hyperparameters import is_scheduler
from unisono.trainer.model_checks import unwrapped_optimizer
from unisono.trainer.snapshot import model_tensors, optimizer_state
from unisono.trainer.step_gradients import StepOptions

__all__ = [
    "MAPPED_NBYTES",
    "check_constants",
    "check_equal_values",
    "check_schedulers",
    "compile_each_size",
    "keep_freed_memory",
    "named_optimizers",
    "no_loss_function",
]

# Options of mallopt, from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

MAPPED_NBYTES = 32 << 20
"""Blocks from this size on are pages of their own, which go back to the system. It is the largest that glibc allows."""

_FOREIGN = (
    "was built with another optimizer than the one that Trainer was given, so it would change no learning rate here: "
    "build it from the same object."
)


def check_step_options(options: StepOptions, *, has_whole_model: bool) -> None:
    """Refuse what a step cannot do.

    Args:
        options: How the step differs from the plain one.
        has_whole_model: True if each rank has the whole model.

    Raises:
        TypeError: A function cannot be called.
        ValueError: `recompute` is given without `encode`, or the step needs the whole model and no rank has it.
    """
    given = next((name for name, value in options._asdict().items() if value), None)
    if not has_whole_model and given is not None:
        raise ValueError(
            f"step({given}=...) needs the whole model on each rank, and parallel= divides it over several: leave out "
            "one of the two"
        )
    for name in ("encode", "on_gradients"):
        if getattr(options, name) is not None:
            function(name, getattr(options, name))
    if options.recompute and options.encode is None:
        raise ValueError("recompute=True is for steps with encode=...: there is nothing to compute again without it")


def no_loss_function(given: object, *, call: str) -> str:
    """Return the message about a value that was passed as a loss function and cannot be called.

    Args:
        given: The object.
        call: How the call looks, for the message.
    """
    if isinstance(given, Tensor):
        return (
            f"loss_fn is a tensor: give {call} the function itself, not the loss that it returned. unisono calls it, "
            "with the model and each micro-batch"
        )
    return (
        f"loss_fn is {a_type(given)}, which cannot be called: {call} takes the function first. unisono calls "
        "it with the model and each micro-batch"
    )


def named_optimizers(optimizer: Optimizer | Mapping[str, Optimizer]) -> dict[str, Optimizer]:
    """Return the optimizers by name, "" for a single one.

    Raises:
        TypeError: An object is not an optimizer, or is wrapped by another library.
        ValueError: There is none.
    """
    optimizers = dict(optimizer) if isinstance(optimizer, Mapping) else {"": optimizer}
    for each in optimizers.values():
        if unwrapped_optimizer(each) is not None:
            raise TypeError(
                f"optimizer is {a_type(each)}, which decides itself when to step: give Trainer the one in it, "
                "optimizer.optimizer"
            )
        if not isinstance(each, Optimizer):
            raise TypeError(f"optimizer is {a_type(each)}; expected a torch.optim.Optimizer, or a dict of them")
    if not optimizers:
        raise ValueError("Trainer was given no optimizer")
    return optimizers


def check_schedulers(
    scheduler: Any, optimizers: Mapping[str, Optimizer], stateful: Mapping[str, Any]
) -> dict[str, LRScheduler]:
    """Return the schedulers by the names of their optimizers.

    Raises:
        TypeError: An object is not a scheduler, or is ReduceLROnPlateau.
        ValueError: A scheduler, also one among `stateful`, belongs to none of the optimizers or to another one.
    """
    schedulers = {} if scheduler is None else dict(scheduler) if isinstance(scheduler, Mapping) else {"": scheduler}
    for name, each in stateful.items():
        if is_scheduler(each) and not any(each.optimizer is optimizer for optimizer in optimizers.values()):
            raise ValueError(f"stateful[{name!r}], {a_type(each)}, {_FOREIGN}")
    for name, each in schedulers.items():
        if isinstance(each, ReduceLROnPlateau):
            raise TypeError(
                "ReduceLROnPlateau needs a metric: call its step(metric) in your loop after trainer.evaluate, and give "
                'it to Trainer as stateful={"scheduler": ...} so that it is saved.'
            )
        if not isinstance(each, LRScheduler):
            raise TypeError(f"scheduler is {a_type(each)}; expected one of torch.optim.lr_scheduler, or a dict of them")
        if name not in optimizers:
            raise ValueError(f"scheduler {name!r} belongs to none of the optimizers {', '.join(map(repr, optimizers))}")
        if getattr(each, "optimizer", optimizers[name]) is not optimizers[name]:
            which = f"scheduler {name!r}, a" if name else "the scheduler, a"
            raise ValueError(f"{which} {type(each).__name__}, {_FOREIGN}")
    return schedulers


def compile_each_size() -> None:
    """Make torch.compile build separate kernels for each size of micro-batch.

    By default it builds one kernel for all sizes from the second size on, which rounds differently. Which size comes
    second depends on a rank's virtual ranks, and so on the number of ranks. Optimizers have imported torch._dynamo.
    """
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is not None:
        config.automatic_dynamic_shapes = False


def keep_freed_memory() -> None:
    """Make the C library keep memory that tensors have freed, for the tensors of the next step.

    Every virtual rank's gradient is allocated and freed. glibc would return this memory to the kernel each time, which
    then must clear every page again: for 4M parameters and 8 virtual ranks on one rank that takes 18,000 page faults
    and a third of each step. With another C library than glibc this does nothing.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_M_MMAP_THRESHOLD, MAPPED_NBYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def check_constants(
    virtual_ranks: int,
    *,
    seed: int,
    replicas: int,
    facts: Mapping[str, Any] | None,
    directory: Path | None,
) -> None:
    """Check the constants of a run with some replicas of the model.

    Raises:
        ValueError: They are not those of the run that is resumed, or there are more replicas than virtual ranks.
    """
    if facts is not None:
        saved = facts["virtual_ranks"]
        if virtual_ranks != saved:
            raise ValueError(
                f"virtual_ranks={virtual_ranks}, but the run in {directory} has virtual_ranks={saved}, which it keeps "
                f"for life since it changes the result: give virtual_ranks={saved}, or start anew in another directory."
            )
        if seed != facts["seed"]:
            raise ValueError(
                f"seed={seed}, but the run in {directory} has seed={facts['seed']}: give that one, or start anew in "
                "another directory."
            )
    rank_block(0, world_size=replicas, virtual_ranks=virtual_ranks)


def check_workers(
    sync: LocalSGD,
    modules: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    given: Mapping[str, Optimizer],
) -> Optimizer:
    """Return the one optimizer that workers with weights of their own can have.

    Args:
        sync: How workers train.
        modules: The models.
        optimizers: All optimizers, with those of tables.
        given: The user's.

    Raises:
        ValueError: There are several, or tables or sparse gradients, or it needs a closure.
    """
    name = type(sync).__name__
    if len(optimizers) != 1 or [*optimizers.values()] != [*given.values()]:
        tables = ", those of tables of unisono.embedding included" if len(optimizers) > len(given) else ""
        raise ValueError(
            f"sync={name}(...) is for one optimizer of dense parameters, and this run has {len(optimizers)}{tables}: "
            "leave sync out, or train with a single optimizer"
        )
    for prefix, root in modules.items():
        for path, module in root.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise ValueError(
                    f"sync={name}(...) is for dense gradients, and {prefix + path!r} has {module.num_embeddings} rows "
                    "with sparse=True: make it with sparse=False, or leave sync out"
                )
    (single,) = optimizers.values()
    if needs_closure(single):
        raise ValueError(
            f"sync={name}(...) cannot be together with {type(single).__name__}, which computes the loss of all workers "
            "at other weights within a step: leave sync out, or take another optimizer"
        )
    return single


def check_equal_values(
    world: World,
    modules: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    *,
    compared: Collection[str] = (),
) -> None:
    """Compare the values of models and of their optimizers' state by hashes. Every rank must call it.

    Args:
        world: The ranks.
        modules: The models by the prefix of their names.
        optimizers: The optimizers by name.
        compared: The names of tensors that have been compared before.

    Raises:
        RankMismatchError: On all ranks, naming a tensor that differs.
    """
    if world.group is None:
        return
    tensors = _all_tensors(modules)
    hashes = {name: digest({"": tensor}) for name, tensor in tensors.items() if name not in compared}
    for key, optimizer in optimizers.items():
        of = f"optimizer {key!r}" if key else "the optimizer"
        for name, state in optimizer_state(modules, optimizer).items():
            hashes[f"{name} in the state of {of}"] = digest({"": repr(plain(state))})
    everyone = world.gather(hashes, "Trainer comparing models")
    for rank, theirs in enumerate(everyone):
        differing = [name for name, value in everyone[0].items() if theirs.get(name) != value]
        differing += [name for name in theirs if name not in everyone[0]]
        if differing:
            raise RankMismatchError(
                f"the model differs between ranks: {differing[0]!r} of rank {rank} is not that of rank 0 "
                f"({len(differing)} of {len(everyone[0])} tensors differ). Every rank must build the same model: call "
                "torch.manual_seed with the same number on every rank before building it, or load the same file."
            )


def _all_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return all tensors of the models that a checkpoint holds, and the buffers that it does not hold, by name."""
    return named_buffers(modules) | model_tensors(modules)
