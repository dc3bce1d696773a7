"""`DataParallel`: one process, several devices, a replica of the model on each for one pass.

`parallel.device_copies` copies the model and returns its gradients; `parallel.scatter_gather` divides the batch. One
rank per device (`parallel.replicate`) is faster: see docs/data-parallel.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from threading import Thread
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from unisono.errors import LossError
from unisono.parallel.device_copies import carry, copy_to
from unisono.parallel.device_names import as_device
from unisono.parallel.losses import loss_of, read_loss
from unisono.parallel.placed.forward import refuse_placed
from unisono.parallel.remote_module import refuse_remote
from unisono.parallel.scatter_gather import divide, join, moved
from unisono.parallel.sync_batch_norm import SyncBatchNorm
from unisono.text import a_type

__all__ = ["DataParallel"]

_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, functools.partial)

T = TypeVar("T")


class DataParallel:
    """Computes a module on several devices at once, each with its part of the batch, in threads of this process.

    It is not a module: parameters, state dict, mode and optimizer remain those of the given model. Each pass copies
    parameters and buffers to the other devices; backward adds the replicas' gradients to those of the model. The model
    itself computes the first part, so its buffers are updated as in training with that part alone.

    There are two forms. `parallel(loss_function, batch)`, or `parallel.loss(...)`: each device computes the loss of its
    part, and only sums travel. `parallel(*inputs, **kwargs)`: outputs are gathered on one device, as torch's
    DataParallel does; that device then has the outputs of the whole batch and computes the loss alone.

    Args:
        module: The model. It must lie on the first device.
        device_ids: The devices: numbers of GPUs, names, or torch.device. None means all GPUs, or the CPU if there is
            none. A device may occur several times, such as ["cpu", "cpu"], which is slower and good for tests.
        output_device: The device on which outputs are gathered and the loss lies; None means the first device.
        dim: The dimension of samples in all inputs.

    Raises:
        TypeError: module is not a module, or device_ids is not a list.
        ValueError: The module cannot be copied, device_ids is empty, a device does not exist, or dim is negative.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"module is {a_type(module)}: give a torch.nn.Module")
        if isinstance(device_ids, int | str | torch.device):
            raise TypeError(f"device_ids={device_ids!r} must be a list, such as [{device_ids!r}]")
        if device_ids is None:
            device_ids = list(range(torch.cuda.device_count())) or ["cpu"]
        if not device_ids:
            raise ValueError("device_ids is empty: name at least one device, or leave it out for all GPUs")
        if dim < 0:
            raise ValueError(f"dim={dim} must count from the front: 0 or more")
        self.module = module
        """The given model."""
        self.devices = [as_device(each) for each in device_ids]
        """The devices, one per replica; the module lies on the first."""
        self.output_device = self.devices[0] if output_device is None else as_device(output_device)
        """The device of outputs and losses."""
        self.dim = dim
        """The dimension along which inputs are divided."""
        if len(self.devices) > 1:
            refuse_remote(module, "DataParallel", "use the module that is on this rank")
            _check_copyable(module)
            # In a forked process, torch makes its pool of threads anew at the first use, and fails ("Invalid thread
            # pool!") if the threads of replicas are the first to use it, at the same time.
            torch.set_num_threads(torch.get_num_threads())

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Compute `module(*inputs, **kwargs)` on all devices, or the loss if the first of two inputs is a function.

        Tensors are divided along `dim` wherever they stand in the inputs. `Whole(...)` marks an input that is not
        divided. Outputs may be tensors in dicts, lists, tuples and dataclasses. With two or more parts, scalars become
        a vector with one element per part. An error of a replica is raised here, with the number of the replica.

        Args:
            *inputs: The inputs of the module; or a function and a batch, as for `loss`.
            **kwargs: Further inputs of the module.

        Returns:
            The outputs of all parts, joined along `dim` on the output device.

        Raises:
            ValueError: The inputs differ in their number of samples or have no dimension `dim`, the outputs cannot be
                joined, or the module is not on the first device.
        """
        if len(inputs) == 2 and not kwargs and isinstance(inputs[0], _FUNCTIONS):
            return self.loss(*inputs)
        self._check_place()
        parts, _ = divide((inputs, kwargs), self.devices, dim=self.dim, place="input")
        outputs = self._run(lambda module, part: module(*part[0], **part[1]), parts)
        return (
            moved(outputs[0], self.output_device)
            if len(parts) == 1
            else join(outputs, self.output_device, dim=self.dim)
        )

    def loss(self, function: Callable[[Any, Any], Any], batch: Any) -> Tensor:
        """Compute `function(model, part)` for each device's part of the batch; return the mean over the whole batch.

        Parts of different sizes count by their size.

        Args:
            function: May return one loss per sample (shape [samples]), a scalar, taken as the mean of its part,
                `unisono.Sum(total, weight)` for means over tokens or weighted samples, or a dict with one of these as
                "loss", whose other values are ignored.
            batch: The samples; its tensors are divided along `dim`.

        Returns:
            A scalar in float32 or float64, on the output device.

        Raises:
            LossError: The function returned something else, or weights that are not valid or add up to 0.
            ValueError: As for `__call__`.
        """
        self._check_place()
        parts, sizes = divide(batch, self.devices, dim=self.dim, place="batch")
        results = self._run(function, parts)
        sums = [read_loss(loss_of(result), samples=size) for result, size in zip(results, sizes, strict=True)]
        totals = torch.stack([carry(each.total, self.output_device) for each in sums])
        weights = [each.weight for each in sums]
        weight = sum(carry(w, self.output_device) if isinstance(w, Tensor) else w for w in weights)
        if (not isinstance(weight, Tensor) or weight.is_cpu) and not weight:
            raise LossError("the weights of the batch add up to 0, so the loss has no mean: give one above zero")
        return totals.sum() / weight

    def _run(self, function: Callable[[Any, Any], T], parts: list[Any]) -> list[T]:
        devices = self.devices[: len(parts)]
        modules = [self.module, *copy_to(self.module, devices[1:])] if len(parts) > 1 else [self.module]
        calls = [functools.partial(function, module, part) for module, part in zip(modules, parts, strict=True)]
        return _in_threads(calls, devices)

    def _check_place(self) -> None:
        home = self.devices[0]
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if is_lazy(tensor):
                raise ValueError(f"{name!r} has no size yet: run the model once on one batch before DataParallel does")
            if tensor.device != home:
                raise ValueError(
                    f"{name!r} lies on {tensor.device} and the first device is {home}: move the model there with "
                    f"model.to({str(home)!r})"
                )

    def __getattr__(self, name: str) -> NoReturn:
        hint = ""
        if hasattr(self.__dict__.get("module"), name):
            hint = f": the model is no part of it, use model.{name} on the model that you gave"
        raise AttributeError(f"DataParallel has no attribute {name!r}{hint}")

    def __repr__(self) -> str:
        return f"DataParallel({type(self.module).__name__}, {[str(device) for device in self.devices]})"


def _check_copyable(module: nn.Module) -> None:
    refuse_placed(module, "DataParallel copies a model to other devices")
    for name, each in module.named_modules():
        where = f"{name!r} is" if name else "the model is"
        if isinstance(each, (SyncBatchNorm, nn.SyncBatchNorm)):
            raise ValueError(  # noqa: TRY004  no wrong argument by its type
                f"{where} a SyncBatchNorm, which joins ranks and not the devices of one. Start one rank per device, or "
                "use revert_sync_batchnorm."
            )
        if isinstance(each, torch.jit.ScriptModule) or hasattr(type(each), "dynamo_ctx") or "dynamo_ctx" in vars(each):
            raise ValueError(f"{where} compiled and cannot be copied: give DataParallel the model that was compiled")


def _in_threads(calls: Sequence[Callable[[], T]], devices: Sequence[torch.device]) -> list[T]:
    """Return the results of one call per device, made at the same time, the first in this thread, each as if made here.

    If calls fail, the error of the first of them is raised once all have ended.
    """
    results: dict[int, T] = {}
    failures: dict[int, BaseException] = {}
    here = _Surroundings(devices)

    def make(i: int) -> None:
        try:
            with here.on(i):
                results[i] = calls[i]()
        except BaseException as failure:  # raised in the caller's thread
            failures[i] = failure

    threads = [Thread(target=copy_context().run, args=(make, i), name=f"replica-{i}") for i in range(1, len(calls))]
    for thread in threads:
        thread.start()
    make(0)
    for thread in threads:
        thread.join()
    if failures:
        number, failure = min(failures.items())
        if len(calls) > 1:
            _say(failure, f"in replica {number}, on {devices[number]}")
        raise failure
    return [results[i] for i in range(len(calls))]


def _say(failure: BaseException, where: str) -> None:
    """Add a location to an exception, and keep its class, which callers may catch."""
    if hasattr(failure, "add_note"):
        failure.add_note(where)
    elif failure.args and isinstance(failure.args[0], str):  # Python 3.10
        failure.args = (f"{failure.args[0]} ({where})", *failure.args[1:])


class _Surroundings:
    """The state that torch keeps per thread and the threads here copy: gradients, autocast, devices and streams."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._recording, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._cache = torch.is_autocast_cache_enabled()
        self._casts = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {"cpu", *(device.type for device in devices)}
        }
        self._streams = [
            None if device.type == "cpu" else torch.get_device_module(device).current_stream(device)
            for device in devices
        ]

    @contextmanager
    def on(self, number: int) -> Iterator[None]:
        """Enter the state of the thread that made this object, on one of the devices."""
        with ExitStack() as stack:
            if self._inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._recording))
            for kind, (enabled, dtype) in self._casts.items():
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=self._cache))
            stream = self._streams[number]
            if stream is not None:
                module = torch.get_device_module(self._devices[number])
                stack.enter_context(module.device(self._devices[number]))
                stack.enter_context(module.stream(stream))
            yield
