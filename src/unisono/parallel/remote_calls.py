"""One call of a remote module: inputs go to its owner, outputs come back, and gradients take the same way in backward.

All ranks of a group make each call together: a gather of the inputs, the passes on the owner in the order of ranks, and
a scatter of the outputs. A backward is a gather of gradients, the backward passes in the same order, and a scatter. So
sums do not depend on which rank is first. The owner's graph is apart from those of the callers: it begins where inputs
arrive, and ends at the outputs. Start reading at `RemoteCalls.call`.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from unisono.collectives import object_transport
from unisono.collectives.argument_checks import GroupArgument
from unisono.collectives.call_description import describe
from unisono.collectives.differentiable import attach
from unisono.collectives.group import Group, group_of
from unisono.collectives.object_gradients import replaced
from unisono.collectives.object_transport import FailedSend, Outgoing
from unisono.collectives.received import Received
from unisono.collectives.serialization import FOLLOWABLE, FOLLOWED, NOT_FOLLOWED, Payload, TensorMeta, serialize
from unisono.errors import PeerError, RankMismatchError
from unisono.job.user_function import enter as refuse_collectives
from unisono.job.user_function import leave
from unisono.mismatch import by_value
from unisono.parallel.device_names import device_of
from unisono.parallel.graph_entry import enter
from unisono.parallel.scatter_gather import moved
from unisono.text import name_ranks

__all__ = ["Inputs", "RemoteCalls"]

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of a call."""

_NO_COLLECTIVES = (
    "It runs on its owner alone, where the other ranks wait for its outputs. Call collectives outside of it, on all "
    "ranks."
)


_PLACES = {"value.inputs[0]": "args", "value.inputs[1]": "kwargs", "value.outputs": "outputs"}
"""Places in what is sent, as they are called in a program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _RemoteRequest:
    """The message of a rank to the owner."""

    token: str
    """The module, which several ranks may have under one name."""
    call: str
    """The call, its number and its mode, as words; equal on all ranks."""
    inputs: Inputs | None
    """None for a rank that takes part without inputs."""
    random_state: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reply:
    """The reply of the owner."""

    outputs: Any = None
    random_state: Tensor | None = None
    """The caller's generator after the call; None if the module drew nothing."""
    failure: str | None = None
    mismatch: str | None = None


@dataclass(slots=True)
class _Pass:
    """A caller's pass through the module, on the owner, from forward to backward."""

    inputs: list[TensorMeta]
    outputs: list[TensorMeta] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    """The outputs, with their graph."""
    captured: dict[int, Tensor] = field(default_factory=dict)
    """Gradients of the inputs, by their places."""
    has_inputs: bool = False
    device: torch.device | None = None
    """The device of the first tensor of the inputs, to which outputs are moved; None without one."""


class RemoteCalls:
    """The calls of one remote module, on one rank.

    Args:
        name: The module's name, for messages, equal on all ranks.
        token: Distinguishes it from others of that name, equal on all ranks.
        owner: The rank that has it.
        module: The module on the owner; None elsewhere.
        average: True to divide the gradients of parameters by the number of ranks that call it with inputs.
        group: The ranks that call it.
    """

    def __init__(
        self, *, name: str, token: str, owner: int, module: nn.Module | None, average: bool, group: GroupArgument
    ) -> None:
        self._call = f"remote {name} on rank {owner}"
        self._token, self._owner, self._module, self._average, self._group = token, owner, module, average, group
        self._number = 0
        self.is_updated = False
        """True if something may update the parameters, such as an optimizer."""

    def call(self, inputs: Inputs | None, *, training: bool) -> Any:
        """Call the module with this rank's inputs, and return its outputs for them. Every rank must call it.

        Args:
            inputs: This rank's arguments; None to take part without a pass of its own.
            training: True in train mode.

        Returns:
            The outputs; for a rank without inputs a zero, from which a backward can begin.

        Raises:
            PeerError: The module has failed on the owner, or another rank's inputs cannot be sent.
            RankMismatchError: Ranks are in different calls, or some are in another mode.
            TypeError: The inputs or outputs cannot be sent.
            Exception: On the owner, any error of the module.
        """
        group = group_of(self._group)
        root = group.index_of(self._owner, "on")
        number = self._number + 1
        gradients = torch.is_grad_enabled()
        mode = f"{'train' if training else 'eval'} mode, {'with' if gradients else 'without'} gradients"
        values = () if inputs is None else (*inputs[0], *inputs[1].values())
        kinds = ", ".join(map(describe, values)) or "nothing"
        if group.check is not None:
            group.check.compare(self._call, described=kinds)
        request = _RemoteRequest(
            token=self._token,
            call=f"{self._call}: call {number}, {mode}",
            inputs=inputs,
            random_state=torch.get_rng_state(),
        )
        sent = _serialize(request, "the inputs")
        arrived = object_transport.gather(group, self._call, sent, root, of=kinds)
        assert isinstance(sent, Payload)
        replies, passes, error = None, None, None
        if arrived is not None:
            replies, passes, error = self._run(group, arrived)
        got = object_transport.scatter(group, f"the outputs of {self._call}", replies, root)
        self._raise(got, error)
        self._number = number  # a call that some rank did not make is none
        tensors = got.unpack()
        if got.followed and gradients:
            places = _attached_places(got.metas)
            sources = [tensor for tensor, meta in zip(sent.tensors, sent.metas, strict=True) if meta.follow == FOLLOWED]

            def send_back(grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
                return self._backward(number, passes, grads)

            attached = attach(sources, [tensors[place] for place in places], send_back, zeros=False)
            tensors = replaced(tensors, places, attached)
        reply: _Reply = got.open(tensors)
        if reply.random_state is not None:
            torch.set_rng_state(reply.random_state)
        return reply.outputs

    def _run(
        self, group: Group, arrived: Sequence[Received]
    ) -> tuple[Sequence[Payload], list[_Pass], Exception | None]:
        """On the owner, run the module for each rank; return what to send to each, and the passes."""
        assert self._module is not None
        own_state = torch.get_rng_state()
        replies: list[Payload] = []
        passes = [_Pass(one.metas) for one in arrived]
        what = "before its first pass"
        try:
            requests = [
                _open(one, each, gradients=torch.is_grad_enabled()) for one, each in zip(arrived, passes, strict=True)
            ]
            calls = {rank: (request.token, request.call) for rank, request in zip(group.ranks, requests, strict=True)}
            if mismatch := self._mismatch(calls):
                return self._tell(group, _Reply(mismatch=mismatch)), passes, None
            for rank, request, each in zip(group.ranks, requests, passes, strict=True):
                what = f"for the input of rank {rank}"
                payload = self._run_one(request, each.device)
                each.outputs, each.values, each.has_inputs = payload.metas, payload.tensors, request.inputs is not None
                replies.append(payload)
            what = "after its passes"
            _check_backward(group, replies)
        except Exception as error:  # of any class: it is raised on this rank, once the others know
            return self._tell(group, _Reply(failure=self._failure(error, what))), passes, error
        finally:
            torch.set_rng_state(own_state)
        return replies, passes, None

    def _run_one(self, request: _RemoteRequest, device: torch.device | None) -> Payload:
        """Run the module for one rank, with that rank's random numbers; outputs go to the device of its inputs."""
        assert self._module is not None
        if request.inputs is None:
            return serialize(_Reply(outputs=torch.zeros(())))
        torch.set_rng_state(request.random_state)
        home = device_of(self._module)
        if home is None or device is None or device == home:
            home = device = None  # nothing moves
        args, kwargs = request.inputs if home is None else moved(request.inputs, home)
        token = refuse_collectives(f"the module of {self._call}", _NO_COLLECTIVES)
        try:
            outputs = self._module(*args, **kwargs)
        finally:
            leave(token)
        state = torch.get_rng_state()
        if device is not None:
            outputs = moved(outputs, device)
        reply = _Reply(outputs=outputs, random_state=None if torch.equal(state, request.random_state) else state)
        sent = _serialize(reply, "the outputs")
        if isinstance(sent, FailedSend):
            raise sent.error
        return sent

    def _backward(
        self, number: int, passes: list[_Pass] | None, gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Send the gradients of this rank's outputs to the owner, and return those of its inputs."""
        group = group_of(self._group)
        root = group.index_of(self._owner, "on")
        call = f"the backward of {self._call}"
        if group.check is not None:
            group.check.compare(call)
        sent = serialize((self._token, f"{call}, call {number}", list(gradients)), strides=True)
        arrived = object_transport.gather(group, call, sent, root)
        replies, error = None, None
        if arrived is not None:
            assert passes is not None
            replies, error = self._run_backward(group, arrived, passes)
        got = object_transport.scatter(group, f"the gradients of {self._call}", replies, root)
        self._raise(got, error)
        returned: Sequence[Tensor | None] = got.open().outputs
        return returned

    def _run_backward(
        self, group: Group, arrived: Sequence[Received], passes: Sequence[_Pass]
    ) -> tuple[Sequence[Payload], Exception | None]:
        """On the owner, run backward for each rank in turn; return what to send to each."""
        assert self._module is not None
        came = [one.open() for one in arrived]
        calls = {rank: (token, call) for rank, (token, call, _) in zip(group.ranks, came, strict=True)}
        if mismatch := self._mismatch(calls):
            return self._tell(group, _Reply(mismatch=mismatch)), None
        parameters = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        callers = sum(each.has_inputs for each in passes)
        divisor = callers if self._average else 1
        held = [parameter.grad for parameter in parameters] if divisor > 1 else []
        for parameter, _ in zip(parameters, held, strict=False):
            parameter.grad = None
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        replies: list[Payload] = []
        what = "before backward"
        token = refuse_collectives(f"the backward of {self._call}", _NO_COLLECTIVES)
        try:
            if parameters and not self.is_updated:
                self._warn()
            for rank, each, (_, _, gradients) in zip(group.ranks, passes, came, strict=True):
                what = f"in backward for the outputs of rank {rank}"
                returned = _run_backward_of(each, gradients, keep=keep)
                replies.append(serialize(_Reply(outputs=returned), strides=True))
        except Exception as error:  # of any class: it is raised on this rank, once the others know
            return self._tell(group, _Reply(failure=self._failure(error, what))), error
        finally:
            leave(token)
            for parameter, before in zip(parameters, held, strict=False):
                parameter.grad = _added(before, parameter.grad, divisor)
        return replies, None

    def _warn(self) -> None:
        self.is_updated = True
        warnings.warn(
            f"{self._call} gets gradients, and nothing is there to apply them: make its optimizer on all ranks, "
            "by .optimizer(torch.optim.SGD, lr=...), or freeze it by .requires_grad_(False)",
            RuntimeWarning,
            stacklevel=2,
        )

    def _mismatch(self, calls: Mapping[int, tuple[str, str]]) -> str | None:
        """Return how the calls of ranks differ, as a message; None if they are the same."""
        if len({*calls.values()}) == 1:
            return None
        texts = {rank: text for rank, (_, text) in calls.items()}
        if len({*texts.values()}) == 1:
            texts = {
                rank: text if token == self._token else f"{text}, of another module of this name"
                for rank, (token, text) in calls.items()
            }
        return (
            f"ranks are in different calls: {by_value(texts, separator='; ')}. Call remote modules on all ranks, in "
            "the same order and the same mode; a rank without inputs calls serve()"
        )

    def _failure(self, error: Exception, what: str) -> str:
        """Return the text that tells the other ranks of an error."""
        frames = error.__traceback__
        while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
        if sys.version_info >= (3, 11):
            error.add_note(f"{self._call} failed {what}")
        kind = type(error).__name__
        return f"{self._call} failed {what}, with {kind}: {error}\nThe traceback of rank {self._owner}:\n{text}"

    @staticmethod
    def _tell(group: Group, reply: _Reply) -> list[Payload]:
        return [serialize(reply)] * group.size

    @staticmethod
    def _raise(got: Received, error: Exception | None) -> None:
        """Raise what the owner has told."""
        if error is not None:
            raise error
        if not got.metas:  # what is told has no tensors
            reply: _Reply = got.open()
            if reply.mismatch is not None:
                raise RankMismatchError(reply.mismatch)
            if reply.failure is not None:
                raise PeerError(reply.failure)


def _check_backward(group: Group, replies: Sequence[Payload]) -> None:
    """Check that a backward could begin on each rank if it can on one."""
    if any(payload.followed for payload in replies):
        lacking = [rank for rank, each in zip(group.ranks, replies, strict=True) if not _attached_places(each.metas)]
        if lacking:
            raise TypeError(
                f"outputs for {name_ranks(lacking)} have no floating-point tensor, and those for other ranks require a "
                "gradient, so that these would wait for ever in backward: return such a tensor for all inputs"
            )


def _open(received: Received, each: _Pass, *, gradients: bool) -> _RemoteRequest:
    """Return a rank's request, with inputs at which a graph begins if they require a gradient."""
    tensors = received.unpack()
    if gradients:
        for place, meta in enumerate(each.inputs):
            if meta.follow == FOLLOWED:
                tensors[place], _ = enter(tensors[place], each.captured, place)
    request: _RemoteRequest = received.open(tensors)
    each.device = next((tensor.device for tensor in tensors if tensor is not request.random_state), None)
    return request


def _run_backward_of(each: _Pass, gradients: Sequence[Tensor | None], *, keep: bool) -> list[Tensor | None]:
    """Run backward from one rank's outputs, and return the gradients of its inputs."""
    each.captured.clear()
    pairs = [
        (each.values[place], gradient)
        for place, gradient in zip(_attached_places(each.outputs), gradients, strict=True)
        if gradient is not None and each.values[place].requires_grad
    ]
    if pairs:
        torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs], retain_graph=keep)
    return [each.captured.pop(place, None) for place, meta in enumerate(each.inputs) if meta.follow == FOLLOWED]


def _attached_places(metas: Sequence[TensorMeta]) -> list[int]:
    """Return the places of the outputs that require a gradient on their rank, where some rank's outputs do.

    They are those that require one on the owner. A rank without such outputs takes part in backward by the others.
    """
    followed = [place for place, meta in enumerate(metas) if meta.follow == FOLLOWED]
    return followed or [place for place, meta in enumerate(metas) if meta.follow == FOLLOWABLE]


def _added(before: Tensor | None, total: Tensor | None, divisor: int) -> Tensor | None:
    """Return the gradient of a parameter after a backward: what was there before, and the mean of what has come."""
    if total is None:
        return before
    mean = total.div_(divisor)
    return mean if before is None else before.add_(mean)


def _serialize(value: Any, what: str) -> Outgoing:
    """Return the payload of a value, or why there is none."""
    try:
        payload = serialize(value, strides=True)
    except (TypeError, ValueError, RecursionError) as error:
        text = str(error)
        for own, known in _PLACES.items():
            text = text.replace(own, known)
        return FailedSend(type(error)(text))
    for tensor, meta in zip(payload.tensors, payload.metas, strict=True):
        if meta.follow == NOT_FOLLOWED and tensor.requires_grad and torch.is_grad_enabled():
            shape = list(tensor.shape)
            return FailedSend(
                TypeError(
                    f"{what} have a tensor of shape {shape} that requires a gradient within an object that is not "
                    "searched for tensors: put it into a tuple, list, dict or dataclass, or detach() it"
                )
            )
    return payload
