"""A module that lives on one rank and is called by all: `remote`, and the module that it returns.

Its parameters, buffers and optimizer state are on its owner alone. The messages are in `parallel.remote_calls`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from unisono.arguments import flag
from unisono.arguments import text as text_argument
from unisono.collectives.argument_checks import GroupArgument
from unisono.collectives.construction import construct_on_all
from unisono.collectives.group import group_of
from unisono.errors import RankMismatchError
from unisono.mismatch import by_value
from unisono.parallel.remote_calls import RemoteCalls
from unisono.parallel.wrappers import wrapper_of
from unisono.text import a_type

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["RemoteModule", "refuse_remote", "remote"]

OptimizerType = TypeVar("OptimizerType", bound=torch.optim.Optimizer)


def remote(
    module: nn.Module | Callable[[], nn.Module],
    on: int,
    *,
    average: bool = True,
    name: str | None = None,
    group: GroupArgument = None,
) -> RemoteModule:
    """Return a module that lives on one rank and that all ranks call. Every rank must call `remote`, in the same order.

    A call sends this rank's arguments to the owner and returns the outputs for them; backward sends gradients back and
    adds those of parameters on the owner, in the order of ranks. Outputs, gradients and random numbers are those of the
    module called on this rank, bit for bit, whichever rank is the owner.

    Args:
        module: The module, of which only the owner's is kept; or a function that makes it, which is called on the owner
            alone, so that other ranks need no memory for it. Random numbers that the function draws are put back.
        on: The rank that owns it.
        average: True to divide gradients of parameters by the number of ranks that called the module with inputs, as
            `replicate` does for those of a replicated model; False for their sum.
        name: Its name in messages. None: the name of its class.
        group: The ranks that call it; None is the whole job.

    Returns:
        The module, for use in a model on every rank. It has no parameters itself, also on the owner.

    Raises:
        GroupError: The process group does not exist yet or has ended, or this rank is not in it.
        RankMismatchError: The arguments differ between ranks. Raised on all ranks.
        TypeError: An argument has the wrong type, or the module is wrapped by another library.
        ValueError: The owner is not in the group, or the module has a remote module in it.
        PeerError: Another rank has raised an error, such as that of the function.
    """
    members = group_of(group)

    def make() -> tuple[nn.Module | None, dict[str, Any]]:
        flag("average", average)
        if name is not None:
            text_argument("name", name)
        is_owner = members.rank == members.index_of(on, "on")
        own = _local(module) if is_owner else None
        if not is_owner and not callable(module):
            raise TypeError(f"module is {a_type(module)}: {_MODULE}")
        told = None if own is None else (name or type(own).__name__, secrets.token_hex(8), own.training)
        return own, {"given": f"on={on}, average={average}, name={name!r}", "told": told}

    (own, _), everyone = construct_on_all(members, "remote", make, lambda made: made[1], errors=(Exception,))
    given = {rank: each["given"] for rank, each in zip(members.ranks, everyone, strict=True)}
    if len({*given.values()}) > 1:
        raise RankMismatchError(
            f"remote() got other arguments on some ranks: {by_value(given)}. Give all ranks the same"
        )
    called, token, training = everyone[members.index_of(on, "on")]["told"]
    calls = RemoteCalls(name=called, token=token, owner=on, module=own, average=average, group=group)
    return RemoteModule(own, calls, owner=on, average=average, training=training)


class RemoteModule(nn.Module):
    """A module that lives on one rank, made by `remote`.

    What is done to it is done to the module on its owner, and to nothing elsewhere: `train`, `eval`, `to`, `apply`,
    `zero_grad`, `requires_grad_`. Its `state_dict` has the module's entries on the owner, and none elsewhere; loading
    ignores them there.
    """

    def __init__(
        self, module: nn.Module | None, calls: RemoteCalls, *, owner: int, average: bool, training: bool
    ) -> None:
        super().__init__()
        self.training = training
        # In a tuple, since a part of this module would show its parameters on the owner alone.
        self._own, self._calls = (module,), calls
        self.owner, self.average = owner, average

    @property
    def module(self) -> nn.Module | None:
        """The module on its owner, such as for clipping and reading its parameters; None elsewhere."""
        self._calls.is_updated = True  # by the caller, as far as is known here
        return self._own[0]

    @_disable_dynamo
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs for these arguments. Every rank of the group must call it, or `serve`.

        The owner computes for one rank after the other. Arguments and outputs are any picklable values; gradients go
        through tensors in tuples, lists, dicts and dataclasses.

        Traffic: as a `gather` of arguments and a `scatter` of outputs, and the same in backward. 5 KiB more to the
        owner for the state of the CPU's random generator, and back if the module draws from it. Memory: the owner keeps
        the graphs of all ranks until backward.

        Raises:
            PeerError: The module has failed on its owner, with its traceback there; or another rank has failed.
            RankMismatchError: Ranks are in different calls or modes.
            TypeError: An argument cannot be sent.
        """
        return self._calls.call((args, kwargs), training=self.training)

    @_disable_dynamo
    def serve(self) -> Tensor:
        """Take part in a call of the others without arguments, such as on a rank whose data has ended.

        Returns:
            A zero, without dimensions. Where outputs require a gradient it does, too: call `backward` on it, or add it
            to the loss, since every rank takes part in backward.

        Raises:
            PeerError, RankMismatchError: As `forward`.
        """
        zero: Tensor = self._calls.call(None, training=self.training)
        return zero

    def optimizer(self, kind: type[OptimizerType], /, **options: Any) -> OptimizerType:
        """Make an optimizer of the module's parameters, on every rank.

        The owner's has the parameters and the state. Those of other ranks are of the same class and options, so that
        schedulers work there, and have no parameters: their `step` and `zero_grad` do nothing.

        Args:
            kind: The class of the optimizer, such as torch.optim.Adam.
            options: Its options, such as lr.

        Raises:
            TypeError: `kind` is no class of optimizers, or its `step` needs a closure.
        """
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            raise TypeError(f"optimizer() got {kind!r}: give a class of optimizers, such as torch.optim.Adam, uncalled")
        if issubclass(kind, torch.optim.LBFGS):
            raise TypeError(
                f"{kind.__name__} evaluates the loss within its step, on the owner alone, where the other ranks would "
                "wait: give an optimizer that uses the gradients of backward"
            )
        own = self.module
        return kind([{"params": [] if own is None else list(own.parameters())}], **options)

    def train(self, mode: bool = True) -> Self:
        """Set train or eval mode."""
        super().train(mode)
        if self._own[0] is not None:
            self._own[0].train(mode)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze the parameters, or not."""
        if self._own[0] is not None:
            self._own[0].requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the parameters."""
        if self._own[0] is not None:
            self._own[0].zero_grad(set_to_none)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Apply a function to the module and its parts."""
        if self._own[0] is not None:
            self._own[0].apply(fn)
        return self

    def extra_repr(self) -> str:
        """Return where the module is."""
        return f"on rank {self.owner}" + ("" if self._own[0] is None else f": {self._own[0]}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if self._own[0] is not None:
            self._own[0]._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self._own[0] is not None:
            self._own[0].state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def _load_from_state_dict(  # noqa: PLR0917  torch's signature
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if self._own[0] is None:
            return
        parts = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        assign = local_metadata.get("assign_to_params_buffers", False)
        try:
            found = self._own[0].load_state_dict(parts, strict=False, assign=assign)
        except RuntimeError as error:  # of shapes that differ; torch raises it with those of the whole model
            error_msgs.append(str(error))
            return
        missing_keys += [prefix + key for key in found.missing_keys]
        unexpected_keys += [prefix + key for key in found.unexpected_keys]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a remote module cannot be copied or pickled: it is a place on rank {self.owner}. Copy or save its "
            "state_dict() there"
        )


_MODULE = "give a torch.nn.Module, or a function that makes one, on all ranks"


def _local(given: Any) -> nn.Module:
    """Return the owner's module from the argument of `remote`."""
    made: nn.Module
    if isinstance(given, nn.Module):
        made = given
    elif callable(given):
        with torch.random.fork_rng(devices=[]):
            made = given()
        if not isinstance(made, nn.Module):
            raise TypeError(f"the function for remote() has returned {a_type(made)}: {_MODULE}")
    else:
        raise TypeError(f"module is {a_type(given)}: {_MODULE}")
    for path, part in made.named_modules():
        where = repr(path) if path else "the module"
        if isinstance(part, RemoteModule):
            raise ValueError(  # noqa: TRY004  it is a module, in the wrong place
                f"{where} is a remote module itself, which all ranks would have to call: give remote() the parts that "
                "are on the same rank"
            )
        wrapper = wrapper_of(part, path or "module")
        if wrapper is not None:
            raise TypeError(f"{where} is wrapped in {wrapper[0]}, which calls other ranks: give remote() {wrapper[1]}")
    for path, parameter in made.named_parameters():
        if not nn.parameter.is_lazy(parameter) and parameter.is_meta:
            raise ValueError(f"parameter {path!r} is on the meta device: give it values before remote()")
    return made


def refuse_remote(model: nn.Module, call: str, remedy: str) -> None:
    """Raise ValueError if a part of a model is a remote module.

    Args:
        model: The model.
        call: What it was given to.
        remedy: What to do instead.
    """
    for path, part in model.named_modules():
        if isinstance(part, RemoteModule):
            where = repr(path) if path else "the model"
            raise ValueError(  # noqa: TRY004  it is a module, in the wrong place
                f"{where} is on rank {part.owner}, by unisono.parallel.remote, and all ranks must call it together, "
                f"which {call} does not: {remedy}"
            )
