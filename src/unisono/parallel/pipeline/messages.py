"""The messages between stages for one micro-batch: tensors and a generator's state, packed into one piece of memory.

Both sides know the layout of a message from the plan, so nothing is sent about it but the strides of gradients, and
which of them there are. Strides travel with values, since sums over a tensor of other strides may round differently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from unisono.parallel.pipeline.placeholder import TensorLayout
from unisono.state.random import CPU_STATE_NBYTES, GPU_STATE_NBYTES

__all__ = ["Message", "MessageLayout"]

_ALIGNMENT = 64
_HEADER_DTYPE = torch.int64
_KEPT_HEADERS = 16

Key = TypeVar("Key", int, str)


@dataclass(frozen=True, slots=True)
class Message(Generic[Key]):
    """The content of a message."""

    tensors: Mapping[Key, Tensor]
    random_state: Tensor | None = None


class MessageLayout(Generic[Key]):
    """How the content of a message lies in memory.

    Args:
        entries: The tensors by key, in order.
        are_gradients: True if tensors may be absent, and have other strides than those of the layout.
        has_random_state: True if the states of torch's generators travel, too.
    """

    def __init__(
        self, entries: Mapping[Key, TensorLayout], *, are_gradients: bool = False, has_random_state: bool = False
    ) -> None:
        self._entries: dict[Key, TensorLayout] = dict(entries)
        self._are_gradients, self._has_random_state = are_gradients, has_random_state
        self._header = sum(1 + len(layout.shape) for layout in entries.values()) if are_gradients else 0
        offset = self._header * _HEADER_DTYPE.itemsize
        self._offsets: list[int] = []
        for layout in self._entries.values():
            offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
            self._offsets.append(offset)
            elements = math.prod(layout.shape) if are_gradients else _footprint(layout.shape, layout.strides)
            offset += elements * layout.dtype.itemsize
        state_offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
        devices = {layout.device for layout in entries.values()}
        has_gpu = any(device.type == "cuda" for device in devices)
        state_nbytes = CPU_STATE_NBYTES + GPU_STATE_NBYTES * has_gpu
        end = state_offset + state_nbytes * has_random_state
        self.nbytes = -(-end // _ALIGNMENT) * _ALIGNMENT
        """Size of the message; whole elements of any type."""
        self._state = slice(state_offset, end)
        self._headers: dict[tuple[int, ...], Tensor] = {}
        """Headers that were sent, of which there is hardly more than one."""
        self.device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        """Where the tensors of a message are."""

    def allocate(self, device: torch.device | None = None) -> Tensor:
        """Return uninitialised memory for a message: where its tensors are, or on another device."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device or self.device)

    def pack(self, message: Message[Key]) -> Tensor:
        """Return a message's memory, with a copy of its tensors."""
        memory = self.allocate()
        header: list[int] = []
        for (key, layout), offset in zip(self._entries.items(), self._offsets, strict=True):
            tensor = message.tensors.get(key)
            if tensor is None:
                header += [0] * (1 + len(layout.shape))
                continue
            strides: tuple[int, ...] = tuple(tensor.stride())
            if self._are_gradients and _footprint(layout.shape, strides) > math.prod(layout.shape):
                strides = tuple(torch.empty_like(tensor, device="meta").stride())
            header += [1, *strides]
            place, content = _view(memory, offset, layout, strides), tensor.detach()
            if 0 in strides:
                place, content = _once(place, strides), _once(content, strides)
            place.copy_(content)
        if self._header:
            self._write_header(memory, tuple(header))
        if self._has_random_state:
            assert message.random_state is not None
            state = memory[self._state]
            state.copy_(message.random_state[: len(state)], non_blocking=True)
        return memory

    def unpack(self, memory: Tensor) -> Message[Key]:
        """Return the content of a message; its tensors are views of the memory, or of a copy on their device."""
        memory, tensors = memory.to(self.device), {}
        header = memory.view(_HEADER_DTYPE)[: self._header].tolist() if self._header else []
        for (key, layout), offset in zip(self._entries.items(), self._offsets, strict=True):
            strides = layout.strides
            if self._are_gradients:
                is_there, *own = header[: 1 + len(layout.shape)]
                del header[: 1 + len(layout.shape)]
                if not is_there:
                    continue
                strides = tuple(own)
            tensors[key] = _view(memory, offset, layout, strides)
        state = None
        if self._has_random_state:  # a copy, as torch takes a generator's state from the beginning of its storage
            state = memory[self._state].to("cpu", copy=True)
        return Message(tensors, state)

    def _write_header(self, memory: Tensor, header: tuple[int, ...]) -> None:
        if header not in self._headers:
            if len(self._headers) >= _KEPT_HEADERS:
                self._headers.clear()
            self._headers[header] = torch.tensor(header, dtype=_HEADER_DTYPE)
        memory.view(_HEADER_DTYPE)[: self._header].copy_(self._headers[header], non_blocking=True)


def _footprint(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last one in memory."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _view(memory: Tensor, offset: int, layout: TensorLayout, strides: Sequence[int]) -> Tensor:
    return memory.view(layout.dtype).as_strided(layout.shape, strides, offset // layout.dtype.itemsize)


def _once(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Return each element of an expanded tensor once."""
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
