"""The buffers of a model over ranks: finds those that a forward pass changed, and makes them equal on all ranks.

Changed buffers travel at the end of a backward, beside the gradients: no forward pass waits for them, and none finds a
buffer written to between its forward and its backward. Unchanged buffers do not travel. `parallel.reducer` decides when
the vector of often changed buffers travels; newly changed buffers are exchanged here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from unisono.parallel.gradient_transport import GradientTransport
from unisono.parallel.trailer import RoundSummary

__all__ = ["BufferMode", "Buffers"]

BufferMode = Literal["broadcast", "mean"]

# The numbers of bits in the pieces of a 64-bit word; float32 represents each piece exactly.
_PIECES = (22, 22, 20)


class Buffers:
    """The buffers of one model.

    Those that change often travel as one float32 vector. `write` makes it on each rank. `share` reads its sum over
    ranks, and exchanges the other changed buffers one by one.

    Args:
        model: The model.
        mode: "broadcast" or "mean", as for `replicate`; None leaves all buffers alone.
    """

    def __init__(self, model: nn.Module, mode: BufferMode | None) -> None:
        self.mode = mode
        self._homes: list[tuple[nn.Module, str]] = []
        seen: set[int] = set()
        for module in model.modules() if mode is not None else ():
            for name, tensor in module._buffers.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    self._homes.append((module, name))
        self._known: list[tuple[int, int]] = [self._state(i) for i in range(len(self._homes))]
        self.often: list[int] = []
        """Indices of the buffers that travel with the gradients, since they have been changed before."""
        self.numel = 0
        """Length of the vector for these."""

    def __len__(self) -> int:
        return len(self._homes)

    def tensor(self, i: int) -> Tensor | None:
        """Return a buffer as it is now."""
        module, name = self._homes[i]
        return module._buffers.get(name)

    def changed(self) -> list[bool]:
        """Return for each buffer True if it has been written to or replaced since ranks last exchanged it."""
        return [self._state(i) != known or _is_written_unseen(self._homes[i][0]) for i, known in enumerate(self._known)]

    def add_often(self, indices: Sequence[int]) -> bool:
        """Make buffers travel with the gradients from now on. Return True if that changed the vector's length."""
        before = self.numel
        for i in indices:
            tensor = self.tensor(i)
            if i not in self.often and tensor is not None and (_fits_float32(tensor) or not self._has_mean(tensor)):
                self.often.append(i)  # a mean of wider numbers travels alone
        self.numel = sum(self._length(t) for i in self.often if (t := self.tensor(i)) is not None)
        return self.numel != before

    def write(self, vector: Tensor, *, is_source: bool, scale: float) -> None:
        """Write this rank's part, so that the sum of the parts is the mean, or the values of the source rank.

        Args:
            vector: The vector to write to, of `numel` elements.
            is_source: True if this rank's values count for buffers of which no mean is taken.
            scale: The factor for values of which the mean is taken.
        """
        for i, part in self._parts(vector):
            tensor = self.tensor(i)
            assert tensor is not None
            if self._has_mean(tensor):
                _like(tensor, part).copy_(_reals(tensor))
                part.mul_(scale)
            elif not is_source:
                part.zero_()
            elif _fits_float32(tensor):
                _like(tensor, part).copy_(_reals(tensor))
            else:
                part.copy_(_to_pieces(tensor))

    def share(
        self, summary: RoundSummary, total: Tensor, gradient_transport: GradientTransport, *, has_batch: bool
    ) -> bool:
        """Make the buffers that any rank changed equal on all ranks. Every rank must call it.

        Args:
            summary: The combined flags of all ranks.
            total: The sum over ranks of the vectors that `write` made.
            gradient_transport: The ranks.
            has_batch: True if this rank had a batch.

        Returns:
            True if the vector of the next round has a different length.
        """
        source = summary.active[0]
        known = {i for i in self.often if summary.changed[i]}
        if source != 0:
            # The vector has no values of the source rank: only the first rank writes as the source.
            known = {i for i in known if (tensor := self.tensor(i)) is not None and self._has_mean(tensor)}
        self._read(total, factor=gradient_transport.size / len(summary.active), indices=known)
        rest = [i for i, changed in enumerate(summary.changed) if changed and i not in known]
        for i in rest:
            self._exchange(i, gradient_transport, source=source, has_batch=has_batch, active=len(summary.active))
        return self.add_often(rest)

    def _read(self, total: Tensor, *, factor: float, indices: Collection[int]) -> None:
        """Write the values in the summed vector to some buffers.

        Args:
            total: The sum over ranks of the vectors that `write` made.
            factor: The factor for means, which are of fewer ranks if some have no batch.
            indices: The indices of the buffers.
        """
        for i, part in self._parts(total):
            tensor = self.tensor(i)
            assert tensor is not None
            if i not in indices:
                continue
            if not _fits_float32(tensor):
                self._overwrite(i, _from_pieces(part, tensor))
                continue
            if self._has_mean(tensor) and factor != 1.0:
                part.mul_(factor)
            value = _like(tensor, part)
            self._overwrite(i, torch.view_as_complex(value) if tensor.is_complex() else value)

    def _exchange(
        self, i: int, gradient_transport: GradientTransport, *, source: int, has_batch: bool, active: int
    ) -> None:
        """Exchange one buffer separately: set it to its mean over the active ranks, or to the source rank's value."""
        tensor = self.tensor(i)
        assert tensor is not None
        carried = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self._has_mean(tensor) and active:
            carried = carried if has_batch else carried.zero_()
            wide = carried if carried.dtype.itemsize >= 4 else carried.float()
            gradient_transport.wait(gradient_transport.all_reduce(wide, "buffers"), "buffers")
            carried = wide.div_(active)
        else:
            gradient_transport.broadcast(carried, source)
        self._overwrite(i, carried)

    def _has_mean(self, tensor: Tensor) -> bool:
        return self.mode == "mean" and (tensor.is_floating_point() or tensor.is_complex())

    def _length(self, tensor: Tensor) -> int:
        if _fits_float32(tensor):
            return tensor.numel() * (2 if tensor.is_complex() else 1)
        return len(_PIECES) * tensor.numel() * (2 if tensor.dtype == torch.complex128 else 1)

    def _parts(self, vector: Tensor) -> list[tuple[int, Tensor]]:
        lengths = [self._length(t) for i in self.often if (t := self.tensor(i)) is not None]
        return list(zip(self.often, torch.split(vector, lengths), strict=True))

    def _overwrite(self, i: int, value: Tensor) -> None:
        """Set buffer number i to a value."""
        tensor = self.tensor(i)
        assert tensor is not None
        # Without a new version, as torch's batch_norm writes: autograd saves the running values but does not use them,
        # and would otherwise refuse the second of two backwards that follow two forwards.
        target = tensor.data if _is_written_unseen(self._homes[i][0]) else tensor
        with torch.no_grad():
            target.copy_(value)
        self._known[i] = self._state(i)

    def _state(self, i: int) -> tuple[int, int]:
        tensor = self.tensor(i)
        return (0, 0) if tensor is None else (id(tensor), 0 if tensor.is_inference() else tensor._version)


def _is_written_unseen(module: nn.Module) -> bool:
    # torch's batch_norm writes without increasing a tensor's version counter.
    return isinstance(module, _NormBase) and module.training and bool(module.track_running_stats)


def _fits_float32(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float32, torch.float16, torch.bfloat16, torch.complex64)


def _reals(tensor: Tensor) -> Tensor:
    """Return a view of a tensor as real numbers."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def _like(tensor: Tensor, part: Tensor) -> Tensor:
    """Return a view of a piece of a vector in the shape of a tensor's real numbers."""
    return part.view((*tensor.shape, 2) if tensor.is_complex() else tensor.shape)


def _to_pieces(tensor: Tensor) -> Tensor:
    """Return the elements as 64-bit words, cut into whole numbers in float32, the low bits first."""
    words = _words(tensor)
    rows, shift = [], 0
    for bits in _PIECES:
        rows.append((words >> shift) & ((1 << bits) - 1))
        shift += bits
    return torch.cat(rows).to(torch.float32)


def _from_pieces(pieces: Tensor, like: Tensor) -> Tensor:
    """Return the tensor of which `_to_pieces` made the pieces; `like` has its shape and type."""
    rows = pieces.to(torch.int64).view(len(_PIECES), -1)
    words, shift = torch.zeros_like(rows[0]), 0
    for row, bits in zip(rows, _PIECES, strict=True):
        words |= row << shift
        shift += bits
    if like.dtype in (torch.float64, torch.complex128):
        return words.view(like.dtype).view(like.shape)
    return words.to(like.dtype).view(like.shape)


def _words(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.int64) if flat.dtype in (torch.float64, torch.complex128) else flat.to(torch.int64)
