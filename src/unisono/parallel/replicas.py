"""Data parallel training without a wrapper around the model: `replicate` and the handle it returns.

Hooks on the model's parameters reduce gradients while backward runs (`parallel.reducer`), so a loop for one process
works for many. The loader (`unisono.data`) decides which samples a rank gets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn

from unisono.arguments import flag
from unisono.collectives.construction import construct_on_all
from unisono.collectives.group import group_of
from unisono.data import RankLoader
from unisono.engine.gradient_hooks import watchers_of
from unisono.errors import UnisonoError
from unisono.job.current import require_group
from unisono.parallel.batch_weights import check_loader
from unisono.parallel.buffer_sync import BufferMode
from unisono.parallel.comm_hooks import CommHook, hook_and_state
from unisono.parallel.gradient_bucket import Parameter, bytes_of_mb
from unisono.parallel.gradient_transport import GradientTransport
from unisono.parallel.model_agreement import broadcast_values, check_given, check_same_model, check_same_values
from unisono.parallel.model_handle import ModelHandle
from unisono.parallel.reducer import Reducer, ReducerSettings
from unisono.parallel.remote_module import RemoteModule
from unisono.parallel.replicated_models import Models, named_models, parameters_of, tensors_of_model
from unisono.parallel.uneven_passes import follow_others, take_longest
from unisono.state.stateful import Stateful
from unisono.text import a_type

__all__ = ["Replicas", "replicate"]


def replicate(
    models: Models,
    group: dist.ProcessGroup | None = None,
    *,
    loader: RankLoader | None = None,
    bucket_mb: float = 25.0,
    first_bucket_mb: float = 1.0,
    average: bool = True,
    buffers: BufferMode | None = "broadcast",
    check: bool = True,
    static_graph: bool = False,
    comm_hook: CommHook | tuple[Any, CommHook] | None = None,
    overlap: bool = True,
    timeout: timedelta | float | None = None,
) -> Replicas:
    """Average the gradients of models over all ranks in each backward(). Every rank must call it, with the same models.

    The models are not wrapped. Their parameters and buffers are set to rank 0's values now. After each loss.backward(),
    p.grad of a parameter that got a gradient on any rank is the mean over all ranks; a rank on which it got none counts
    as zero. A parameter without a gradient on any rank keeps its p.grad. With one process, nothing is done.

    Memory: one copy of the gradients, which is p.grad itself; two where gradients are kept from step to step.

    Args:
        models: A module, or a list or dict of modules, such as the two networks of a GAN. A parameter that several
            models share belongs to the first.
        group: The ranks that train together; None means all ranks of the job.
        loader: The loader that `unisono.data.loader` returned for the same ranks. The gradients of each backward are
            multiplied by the loader's weight of the current batch, so that with a loss that is the mean over this
            rank's batch, p.grad is the mean over the samples of the global batch, also if ranks have unequal shares of
            it. None if they have equal shares, or if the loss is multiplied by the weight.
        bucket_mb: The size of the messages in which gradients are sent, in MiB.
        first_bucket_mb: The size of the first message of a backward: smaller, so that the transfer starts early.
        average: False for the sum over ranks instead of the mean.
        buffers: The treatment, at the end of backward, of buffers that a forward pass changed. "broadcast" sets them to
            those of the first rank that has a batch, "mean" to their mean (integers: as with "broadcast"); None leaves
            them unchanged.
        check: True to compare the models' names, shapes and types over ranks.
        static_graph: True to promise that the same parameters get gradients in every backward; a breach is an error on
            all ranks. On GPUs, this saves ranks with unused parameters a wait.
        comm_hook: A communication hook for torch's DDP, such as fp16_compress_hook, or a pair (state, hook). It must
            divide by the number of ranks, as torch's hooks do.
        overlap: False to send all gradients at the end of backward.
        timeout: How long to wait for other ranks, for tensors on the CPU: seconds or a timedelta. None means the
            group's timeout.

    Returns:
        A handle with all other operations, such as `no_sync`, `join` and `update`.

    Raises:
        GroupError: The process group does not exist yet or has ended, or this rank is not in it.
        RankMismatchError: The models or the arguments differ between ranks. Raised on all ranks.
        TypeError: An argument has the wrong type, or a model is wrapped by another library.
        ValueError: An argument or a parameter is not usable, or another `replicate` already watches a parameter.
        PeerError: Another rank raised a TypeError or ValueError.
    """
    joined = require_group(group)

    def make() -> Replicas:
        if isinstance(models, Replicas):
            raise TypeError("models is the handle that replicate() returned: give the model itself, and once")
        named = named_models(models)
        _check_remote(named, average=average)
        settings = ReducerSettings(
            bucket_nbytes=bytes_of_mb(bucket_mb, "bucket_mb"),
            first_nbytes=bytes_of_mb(first_bucket_mb, "first_bucket_mb"),
            average=average,
            overlap=overlap,
            static_graph=static_graph,
            comm_hook=comm_hook,
            buffers=buffers,
            loader=loader,
        )
        for name, value in (
            ("average", average),
            ("check", check),
            ("static_graph", static_graph),
            ("overlap", overlap),
        ):
            flag(name, value)
        if buffers not in ("broadcast", "mean", None):
            raise ValueError(f'buffers={buffers!r} must be "broadcast", "mean" or None')
        if comm_hook is not None:
            hook_and_state(comm_hook, None)
            if not average:
                raise ValueError("average=False and a comm_hook contradict each other: a hook gives means")
        if loader is not None:
            rank, ranks = (0, 1) if joined is None else (joined.rank(), joined.size())
            check_loader(loader, rank=rank, ranks=ranks)
            if not average:
                raise ValueError(
                    "average=False and a loader contradict each other: its weights are for means over ranks. Leave one "
                    "of them out; for sums over samples, sum in the loss"
                )
        return Replicas(named, joined, settings, check=check, timeout=_timeout(timeout))

    if joined is None or joined.size() == 1:
        replicas = make()
    else:
        replicas, _ = construct_on_all(group_of(joined), "replicate", make, lambda _: None)
    replicas.update()
    return replicas


class Replicas(ModelHandle):
    """The handle of the models of one `replicate` call.

    After `close`, methods that work on the models raise a `UnisonoError`.
    """

    _made_by = "replicas = replicate(model)"

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        group: dist.ProcessGroup | None,
        settings: ReducerSettings,
        *,
        check: bool,
        timeout: timedelta | None,
    ) -> None:
        self._models, self._settings, self._check, self._timeout = dict(models), settings, check, timeout
        self._group = None if group is None or group.size() == 1 else group
        self._reducers: list[Reducer] = []
        self._paused = 0
        self._closed = False

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models by name; a single model is called "model", those of a list "model 0", "model 1" and so on."""
        return dict(self._models)

    @property
    def world_size(self) -> int:
        """The number of ranks that train together."""
        return 1 if self._group is None else self._group.size()

    def update(self) -> None:
        """Inspect the models again after parameters were added, replaced or changed in type. Every rank must call it.

        Parameters and buffers are set to the values of the first rank. Gradients do not change.

        Raises:
            RankMismatchError: The models or the arguments differ between ranks. Raised on all ranks.
            ValueError: A parameter is lazy or on the meta device, or another `replicate` already watches it.
            PeerError: Another rank raised a ValueError.
        """
        self._refuse_closed()
        if self._group is None:
            self._entries()
            return
        self._unwatch()
        entries, everyone = construct_on_all(group_of(self._group), "replicate", self._entries, lambda _: self._given())
        check_given(everyone, dist.get_process_group_ranks(self._group))
        for name, model in self._models.items():
            gradient_transport = GradientTransport.open(
                self._group, [p.tensor.device for p in entries[name]], timeout=self._timeout
            )
            tensors = tensors_of_model(model)
            try:
                if self._check:
                    check_same_model(tensors, gradient_transport)
                broadcast_values(tensors.values(), gradient_transport)
            except BaseException:
                gradient_transport.close()
                raise
            alone = len(self._models) == 1
            self._reducers.append(Reducer(model, entries[name], gradient_transport, self._settings, alone=alone))
        self._set_paused(self._paused)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients on this rank in the backward passes inside, for gradient accumulation.

        They add up in p.grad as in one process. The next backward outside reduces all of them.
        """
        self._refuse_closed()
        self._set_paused(self._paused + 1)
        try:
            yield
        finally:
            self._set_paused(self._paused - 1)

    def synchronize(self) -> None:
        """Reduce the gradients that are in p.grad now. Every rank must call it.

        For gradients that did not come from backward(), such as those of torch.autograd.grad, and for those left over
        from `no_sync`. With a loader, both are multiplied by weights as in backward().
        """
        self._refuse_closed()
        for reducer in self._reducers:
            reducer.reduce_now()

    @contextmanager
    def join(self, *stateful: Stateful) -> Iterator[None]:
        """Allow ranks to run different numbers of backward passes inside, also none. Every rank must enter it.

        A rank that reaches the end takes part in the reductions of the others, without counting in the mean, until all
        have reached it. Then all get the models of the first rank among those that ran the most passes, and the states
        of `stateful`: those of ranks that stopped earlier would differ from then on. A rank at the end does not take
        part in collectives other than those of replicas.

        Args:
            *stateful: Objects with a state that changes with the passes, such as the optimizer.

        Raises:
            TypeError: An object has no state_dict() or load_state_dict().
            ValueError: `replicate` was given a loader, which has equally many batches on all ranks.
        """
        self._refuse_closed()
        if self._settings.loader is not None:
            raise ValueError(
                "join() is for ranks with unequal numbers of batches, and the loader that replicate() was given has "
                "equally many on all: leave out join(). For other data, leave out loader= in replicate()"
            )
        for thing in stateful:
            if not hasattr(thing, "state_dict") or not hasattr(thing, "load_state_dict"):
                raise TypeError(
                    f"join() was given {a_type(thing)}, and takes what has state_dict() and "
                    "load_state_dict(), such as the optimizer"
                )
        rounds = [reducer.rounds for reducer in self._reducers]
        for reducer in self._reducers:
            reducer.joining = True
        try:
            yield
            mine = sum(reducer.rounds for reducer in self._reducers) - sum(rounds)
            follow_others(self._reducers)
        finally:
            for reducer in self._reducers:
                reducer.joining = False
        if self._reducers:
            take_longest(self._reducers, mine, stateful)

    def check(self) -> None:
        """Check that parameters and buffers have the same bits on all ranks. Every rank must call it.

        Raises:
            RankMismatchError: Some differ; the message has their names. Raised on all ranks.
        """
        self._refuse_closed()
        for reducer in self._reducers:
            check_same_values(tensors_of_model(reducer.model), reducer.gradient_transport)

    def close(self) -> None:
        """Stop reducing the models' gradients: they remain on each rank from now on. Every rank must call it."""
        self._unwatch()
        self._closed = True

    def _entries(self) -> dict[str, list[Parameter]]:
        """Return the parameters of each model; a parameter that several models share belongs to the first of them.

        Raises:
            ValueError: A parameter is lazy or on the meta device, or another `replicate` already watches it.
        """
        taken: set[int] = set()
        entries: dict[str, list[Parameter]] = {}
        for name, model in self._models.items():
            entries[name] = [p for p in parameters_of(model, name) if id(p.tensor) not in taken]
            taken.update(id(p.tensor) for p in entries[name])
            for p in entries[name]:
                _refuse_watched(p)
        return entries

    def _given(self) -> dict[str, Any]:
        """Return the arguments that must be the same on all ranks, by name."""
        settings = self._settings
        hook = settings.comm_hook[1] if isinstance(settings.comm_hook, tuple) else settings.comm_hook
        return {
            "models": list(self._models),
            "bucket_mb": settings.bucket_nbytes / 2**20,
            "first_bucket_mb": settings.first_nbytes / 2**20,
            "average": settings.average,
            "buffers": settings.buffers,
            "check": self._check,
            "static_graph": settings.static_graph,
            "comm_hook": None if hook is None else getattr(hook, "__qualname__", type(hook).__qualname__),
            "overlap": settings.overlap,
            "loader": None if settings.loader is None else settings.loader.identity,
        }

    def _unwatch(self) -> None:
        for reducer in self._reducers:
            reducer.close()
        self._reducers = []

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UnisonoError("these replicas are closed: call replicate() again")

    def _set_paused(self, paused: int) -> None:
        self._paused = paused
        for reducer in self._reducers:
            reducer.paused = paused > 0


def _check_remote(named: Mapping[str, nn.Module], *, average: bool) -> None:
    """Check that the gradients of remote modules are means if those of the models are, and sums otherwise."""
    for name, model in named.items():
        for path, part in model.named_modules(prefix=name):
            if isinstance(part, RemoteModule) and part.average != average:
                raise ValueError(
                    f"{path} is a remote module with average={part.average}, and replicate() has average={average}: "
                    "its gradients would have another scale than those of the rest. Give both the same"
                )


def _timeout(timeout: timedelta | float | None) -> timedelta | None:
    """Return the argument `timeout` as a timedelta.

    Raises:
        TypeError: It is not a number, a timedelta or None.
        ValueError: It is not finite and positive.
    """
    if timeout is None:
        return None
    if not isinstance(timeout, timedelta):
        if isinstance(timeout, bool) or not isinstance(timeout, int | float):
            raise TypeError(f"timeout={timeout!r} must be a number of seconds, a timedelta, or None for the group's")
        if not math.isfinite(timeout):
            raise ValueError(f"timeout={timeout} must be a finite number of seconds; None takes the group's")
        timeout = timedelta(seconds=timeout)
    if timeout <= timedelta(0):
        raise ValueError(f"timeout={timeout.total_seconds():g} s must be positive; None takes the group's")
    return timeout


def _refuse_watched(parameter: Parameter) -> None:
    if any(isinstance(watcher, Reducer) for watcher in watchers_of(parameter.tensor)):
        raise ValueError(
            f"parameter {parameter.name!r} is watched by another replicate() already: close() that one first, or give "
            "all models that share parameters to one call"
        )
