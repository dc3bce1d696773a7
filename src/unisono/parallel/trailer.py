"""The trailer: numbers that ranks exchange at the end of a backward in addition to the gradients, as a sum over ranks.

One float32 vector: for each rank the serial number of its backward pass (negative if it has no batch any more) and a
hash of which parameters it has frozen; for each parameter the number of ranks on which it got a gradient, and of those
on which it got one too late; for each buffer the number of ranks that changed it; and the values of buffers. It lies
behind the last bucket, so it costs no additional message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from unisono.errors import RankMismatchError

__all__ = ["RoundSummary", "Trailer"]

_CYCLE = 2**24
"""float32 represents all whole numbers up to this one. After it, the numbers of backward passes begin with 1 again."""


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """The flags of all ranks' trailers, combined."""

    active: tuple[int, ...]
    """Ranks of the group that had a batch."""
    used: frozenset[int]
    """Parameters that got a gradient on any rank."""
    late: frozenset[int]
    """Parameters that got one after their bucket was sent, on any rank."""
    changed: tuple[bool, ...]
    """For each buffer, True if any rank changed it."""
    alike: bool = True
    """True if the ranks that had a batch have frozen the same parameters, by their hashes."""


class Trailer:
    """The layout of the vector, for one number of ranks, parameters and buffers."""

    def __init__(self, *, ranks: int, parameters: int, buffers: int, values: int) -> None:
        self._ranks, self._parameters, self._buffers = ranks, parameters, buffers
        self._flags = 2 * ranks + 2 * parameters + buffers
        self.numel = self._flags + values
        self._last: tuple[list[float], RoundSummary] | None = None
        self._template: tuple[Sequence[float], set[int], Sequence[bool], bytes, Tensor] | None = None

    def write(
        self,
        vector: Tensor,
        *,
        rank: int,
        serial: int,
        used: Sequence[float],
        late: set[int],
        changed: Sequence[bool],
        frozen: bytes,
    ) -> Tensor:
        """Write this rank's flags into the vector, and return the piece of it for values of buffers.

        Args:
            vector: The trailer, with `numel` elements.
            rank: The number of this rank within the group.
            serial: The serial number of the backward pass, negative if this rank has no batch any more.
            used: For each parameter, whether it got a gradient.
            late: The indices of parameters that got one after their bucket was sent.
            changed: For each buffer, whether this rank changed it.
            frozen: One byte for each parameter.
        """
        last = self._template
        if last is None or (used, late, changed, frozen) != last[:4] or vector.device != last[4].device:
            lates = [float(i in late) for i in range(self._parameters)]
            hashes = [0.0] * self._ranks
            hashes[rank] = float(crc32(frozen) % _CYCLE)
            flags = [0.0] * self._ranks + hashes + [float(u) for u in used] + lates + [float(c) for c in changed]
            template = torch.tensor(flags, dtype=torch.float32, device=vector.device)
            last = self._template = (list(used), set(late), list(changed), frozen, template)
        template = last[4]
        template[rank : rank + 1].fill_(math.copysign(_sent(serial), serial))
        vector[: self._flags].copy_(template)
        return self.values(vector)

    def values(self, vector: Tensor) -> Tensor:
        """Return the piece of the vector for values of buffers."""
        return vector[self._flags :]

    def read(self, vector: Tensor, *, serial: int) -> RoundSummary:
        """Read the sum of all ranks' vectors. Return the same object as the last time if the flags are the same.

        Raises:
            RankMismatchError: The ranks are not in the same backward pass.
        """
        ranks, parameters = self._ranks, self._parameters
        flags: list[float] = vector[: self._flags].tolist()
        heads, rest = flags[:ranks], flags[ranks:]
        expected = _sent(serial)
        for rank, head in enumerate(heads):
            if abs(head) != expected:
                theirs = serial + (int(abs(head)) - expected + _CYCLE // 2) % _CYCLE - _CYCLE // 2
                raise RankMismatchError(
                    f"rank {rank} of the group is in backward pass {theirs} of this model while this rank is "
                    f"in pass {serial}: their gradients do not belong together. Every rank must run the same backward "
                    "passes; one that catches an error of a backward and goes on does not"
                )
        active = tuple(rank for rank, head in enumerate(heads) if head > 0)
        if self._last is not None and self._last[0] == rest and self._last[1].active == active:
            return self._last[1]  # the usual case
        hashes, rest = rest[:ranks], rest[ranks:]
        summary = RoundSummary(
            active,
            frozenset(i for i in range(parameters) if rest[i]),
            frozenset(i for i in range(parameters) if rest[parameters + i]),
            tuple(count > 0 for count in rest[2 * parameters :]),
            len({hashes[rank] for rank in active}) < 2,
        )
        self._last = (hashes + rest, summary)
        return summary


def _sent(serial: int) -> int:
    """Return the number that stands for a backward pass: 1 to `_CYCLE`.

    >>> _sent(1), _sent(-7), _sent(2**24), _sent(2**24 + 1)
    (1, 7, 16777216, 1)
    """
    return (abs(serial) - 1) % _CYCLE + 1
