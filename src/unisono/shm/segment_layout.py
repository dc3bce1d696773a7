"""The size of a group's segment, and the offsets of its parts.

Rank 0 decides and writes the layout to the beginning of the segment, so ranks with different settings still agree.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from unisono.errors import UnisonoError
from unisono.shm.abort_flag import AbortFlag
from unisono.shm.point_to_point import PointToPoint
from unisono.shm.segment import Segment, aligned
from unisono.shm.slot_ring import SlotRing

__all__ = ["Options", "SegmentLayout"]

_PREAMBLE = struct.Struct("<8sqqq")
_MAGIC = b"unisono1"
_LARGEST_SLOT, _SMALLEST_SLOT = 256 * 1024, 4 * 1024
_MIB = 1024 * 1024
_DEFAULT_NBYTES = 64 * _MIB
_LARGEST_MESSAGES = 32 * _MIB
_VARIABLE = "UNISONO_SHM_MIB"


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Settings of a group, for `pg_options` of `init_process_group` and `new_group`. Those of rank 0 apply.

    Raises:
        ValueError: `mib` is less than 1.
    """

    mib: int | None = None
    """The most shared memory of the group, in MiB. None: 64, or as much as a group of more than 32 ranks needs. Pages
    are allocated at first use. Tensors that do not fit are sent in pieces."""

    def __post_init__(self) -> None:
        if self.mib is not None and self.mib < 1:
            raise ValueError(f"mib={self.mib} must be at least 1")

    @classmethod
    def choose(cls, given: object, environ: Mapping[str, str]) -> Options:
        """Return the given options, otherwise those of the environment (UNISONO_SHM_MIB), otherwise the defaults.

        Args:
            given: The value of `pg_options`. Options of torch count as None.
            environ: The environment variables.

        Raises:
            TypeError: `given` is neither `Options` nor an object of torch.
            ValueError: UNISONO_SHM_MIB is not a whole number, at least 1.
        """
        if isinstance(given, cls):
            return given
        if given is not None and type(given).__module__.partition(".")[0] != "torch":
            raise TypeError(f"pg_options of an shm group must be unisono.comm.shm.Options, not {type(given).__name__}")
        text = environ.get(_VARIABLE)
        if text is None:
            return cls()
        try:
            return cls(mib=int(text))
        except ValueError:
            raise ValueError(f"{_VARIABLE}={text!r} must be a whole number of MiB, at least 1") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentLayout:
    """The offsets of the parts of a group's segment, in bytes."""

    size: int
    """The number of ranks in the group."""
    slot_nbytes: int
    """The size of a slot."""
    messages_nbytes: int
    """The budget of the rings for messages."""

    @classmethod
    def plan(cls, size: int, options: Options) -> SegmentLayout:
        """Divide the memory of a group: at most half, and at most 32 MiB, for messages, the rest for slots.

        Raises:
            ValueError: `options.mib` is too little for the number of ranks.
        """
        # The minimum grows with the square of the number of ranks; most of it is never touched.
        least = cls(size=size, slot_nbytes=_SMALLEST_SLOT, messages_nbytes=1)
        budget = max(_DEFAULT_NBYTES, 2 * least.nbytes) if options.mib is None else options.mib * _MIB
        messages_nbytes = min(budget // 2, _LARGEST_MESSAGES)
        slot_nbytes = _LARGEST_SLOT
        while slot_nbytes >= _SMALLEST_SLOT:
            layout = cls(size=size, slot_nbytes=slot_nbytes, messages_nbytes=messages_nbytes)
            if layout.nbytes <= budget:
                return layout
            slot_nbytes //= 2
        raise ValueError(
            f"{options.mib} MiB of shared memory are too few for a group of {size} ranks: give it at least "
            f"{-(-2 * least.nbytes // _MIB)} by pg_options=unisono.comm.shm.Options(mib=...) or {_VARIABLE}"
        )

    @property
    def abort_flag(self) -> int:
        """The offset of the abort flags."""
        return aligned(_PREAMBLE.size)

    @property
    def messages(self) -> int:
        """The offset of the rings for messages."""
        return self.abort_flag + aligned(AbortFlag.nbytes(self.size))

    @property
    def slots(self) -> int:
        """The offset of the slots."""
        return self.messages + aligned(PointToPoint.nbytes(self.size, self.messages_nbytes))

    @property
    def nbytes(self) -> int:
        """The size of the segment."""
        return self.slots + SlotRing.nbytes(self.size, slot_nbytes=self.slot_nbytes)

    def create(self) -> Segment:
        """Create the segment and initialize its parts, on one rank. Raise UnisonoError if memory is short."""
        try:
            segment = Segment.create(self.nbytes, name="unisono")
        except UnisonoError as error:
            raise UnisonoError(
                f"{error}. Let the group take less, by pg_options=unisono.comm.shm.Options(mib=...) or {_VARIABLE}, or "
                "raise the limit on this process"
            ) from error
        segment.memory[: _PREAMBLE.size] = _PREAMBLE.pack(_MAGIC, self.size, self.slot_nbytes, self.messages_nbytes)
        AbortFlag.create(segment, self.abort_flag, self.size)
        PointToPoint.create(segment, self.messages, self.size, self.messages_nbytes)
        SlotRing.create(segment, self.slots, self.size)
        return segment

    @classmethod
    def of(cls, segment: Segment) -> SegmentLayout:
        """Return the layout that rank 0 wrote. Raise RuntimeError if its version of unisono is different."""
        magic, size, slot_nbytes, messages_nbytes = _PREAMBLE.unpack(segment.memory[: _PREAMBLE.size])
        if magic != _MAGIC:
            raise RuntimeError("rank 0 has a different version of unisono than this rank: install the same for both")
        return cls(size=size, slot_nbytes=slot_nbytes, messages_nbytes=messages_nbytes)
