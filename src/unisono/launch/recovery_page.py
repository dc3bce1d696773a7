"""Messages of a rank and the agent about ranks that come and go, in a region of the page that they share.

The region lies behind the status block (`launch.hang.status_block`), in the same file. The rank writes its half and the
agent the other one, so either may read at any time, also when the rank was killed. Start reading at `RankLink`.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, get_args

from unisono.recovery_link import Membership, Phase
from unisono.text import clip, format_ranks, parse_ranks

__all__ = ["Note", "RankLink", "RecoveryPage"]

_OFFSET, _SIZE = 448 << 10, 16 << 10
"""Where the region begins in the file: behind everything that the status block writes."""

# Written by the rank.
_NOTE = struct.Struct("=qii")  # steps done, place of the phase from 1 (0: nothing noted), virtual rank
_ARMED = struct.Struct("=QQQ")  # when, the number of virtual ranks, and that of GPUs if each rank needs one
_CAME = struct.Struct("=Q")  # when the script came to its Trainer
_JOINED = struct.Struct("=QQ")  # number of the decision, and when
_LENGTH = struct.Struct("=Q")  # of the text behind it; written after the text
_NOTE_AT, _ARMED_AT, _JOINED_AT, _CAME_AT, _FIXED_AT, _REFUSAL_AT, _SAMPLES_AT = 0, 64, 128, 192, 256, 1024, 4096
_LONGEST_FIXED, _LONGEST_REFUSAL, _LONGEST_SAMPLES = 700, 2000, 3000

# Written by the agent. Decisions alternate between two places, so that the latest one is always whole.
_NUMBER = struct.Struct("=Q")
_MEMBERS = struct.Struct("=Q")  # the number of ranks; the new ones follow as a text
_WANTED = struct.Struct("=Q")
_ASKED = struct.Struct("=Q")  # the same, once it is in the pages of all ranks
_SETTLED = struct.Struct("=Q")  # the number of the latest decision that is in the pages of all ranks
_NEW = struct.Struct("=?")
_ENDS = struct.Struct("=??")  # whether all ranks end, and whether because one has failed
_NUMBER_AT, _WANTED_AT, _SETTLED_AT, _ENDS_AT, _ASKED_AT = 8192, 8200, 8208, 8216, 8224
_NEW_AT, _SECRET_AT, _MEMBERS_AT = 8256, 8264, 8320
_MEMBERS_SIZE = 3500
_SECRET_SIZE = 32

_PHASES: tuple[Phase, ...] = get_args(Phase)
_PLACES = {phase: place for place, phase in enumerate(_PHASES, 1)}


class Note(NamedTuple):
    """The work of a rank when it noted it last."""

    phase: Phase
    step: int
    """The steps done since the start of the run."""
    virtual_rank: int
    """-1: none."""


class RankLink:
    """The rank's end: a `RecoveryLink`. It does nothing in processes that the rank forks, such as data workers.

    Args:
        file: The file of the rank's status block. It may be closed afterwards.
        take_rank: Waits until this process has a rank, if it is a spare one; called once.
    """

    def __init__(self, file: int, *, take_rank: Callable[[], None] | None = None) -> None:
        self._region: mmap.mmap | bytearray = mmap.mmap(file, _SIZE, offset=_OFFSET)
        self._take_rank = take_rank
        self._latest = Membership(0, (), 0)
        self.is_armed = False
        self.is_new: bool = _NEW.unpack_from(self._region, _NEW_AT)[0]
        """True if this process takes the place of a rank that died, or is one more."""
        self.secret = self._region[_SECRET_AT : _SECRET_AT + _SECRET_SIZE]
        """Known to the ranks of the job alone."""
        os.register_at_fork(after_in_child=partial(_part, weakref.ref(self)))

    def await_rank(self) -> None:
        """Wait until this process has a rank, if it is a spare one."""
        if self._take_rank is not None:
            self._take_rank()
            self._take_rank = None

    def come(self) -> None:
        """Note that the script has come to its Trainer. Only the first call counts."""
        if not _CAME.unpack_from(self._region, _CAME_AT)[0]:
            _CAME.pack_into(self._region, _CAME_AT, time.monotonic_ns())

    def arm(self, virtual_ranks: int, *, gpus: int = 0, fixed_size: str = "") -> None:
        """Tell the agent that a Trainer of this process survives the death of others."""
        self.is_armed = True
        _write_text(self._region, _FIXED_AT, fixed_size, most=_LONGEST_FIXED)
        _ARMED.pack_into(self._region, _ARMED_AT, time.monotonic_ns(), virtual_ranks, gpus)

    def refuse(self, reason: str) -> None:
        """Tell the agent why it must not replace single ranks of this job any more. The first reason stays."""
        if not _read_text(self._region, _REFUSAL_AT):
            _write_text(self._region, _REFUSAL_AT, reason or "no reason was given", most=_LONGEST_REFUSAL)

    def note(self, phase: Phase, step: int, virtual_rank: int = -1) -> None:
        """Note what this rank does."""
        _NOTE.pack_into(self._region, _NOTE_AT, step, _PLACES[phase], virtual_rank)

    def note_samples(self, samples: str) -> None:
        """Note the samples that this rank computes."""
        _write_text(self._region, _SAMPLES_AT, samples, most=_LONGEST_SAMPLES)

    def membership(self) -> Membership:
        """Return the latest decision."""
        while (number := _NUMBER.unpack_from(self._region, _NUMBER_AT)[0]) != self._latest.number:
            size = _MEMBERS.unpack_from(self._region, _members_at(number))[0]
            text = _read_text(self._region, _members_at(number) + _MEMBERS.size)
            if _NUMBER.unpack_from(self._region, _NUMBER_AT)[0] == number:  # otherwise its place may have a newer one
                store, hosts, ranks = text.split("|")
                each = tuple(parse_ranks(host) for host in hosts.split(";") if host)
                self._latest = Membership(number, parse_ranks(ranks), size, each, store)
        return self._latest

    def settled(self) -> int:
        """Return the number of the latest decision that `membership` returns on all ranks, or a newer one."""
        return int(_SETTLED.unpack_from(self._region, _SETTLED_AT)[0])

    def wanted_size(self) -> int:
        """Return the number of ranks that the agent wants from the next step on; 0 if it wants no change."""
        return int(_WANTED.unpack_from(self._region, _WANTED_AT)[0])

    def asked_size(self) -> int:
        """Return the number of ranks that the agent wants, once it has told all ranks; 0 if it wants no change."""
        return int(_ASKED.unpack_from(self._region, _ASKED_AT)[0])

    def job_ends(self) -> bool:
        """Return True if the agent ends all ranks."""
        return bool(_ENDS.unpack_from(self._region, _ENDS_AT)[0])

    def job_failed(self) -> bool:
        """Return True if the agent ends all ranks because one has failed."""
        return bool(_ENDS.unpack_from(self._region, _ENDS_AT)[1])

    def joined(self, number: int) -> None:
        """Tell the agent that this rank and all others go on together after a decision."""
        _JOINED.pack_into(self._region, _JOINED_AT, number, time.monotonic_ns())

    def part(self) -> None:
        """Keep this process, which the rank has forked, from writing into the rank's page."""
        self._region = bytearray(_SIZE)
        self._take_rank = None
        self._latest = Membership(0, (), 0)


class RecoveryPage:
    """The agent's end, for one rank's process.

    Args:
        file: The file of the rank's status block. It may be closed afterwards.

    >>> from unisono.launch.hang.status_block import create
    >>> file = create()
    >>> agent, rank = RecoveryPage(file), RankLink(file)
    >>> agent.decide(Membership(1, ranks=(1, 3), size=4, hosts=((0, 1), (2, 3)), store="127.0.0.1:40001"))
    >>> rank.membership()
    Membership(number=1, ranks=(1, 3), size=4, hosts=((0, 1), (2, 3)), store='127.0.0.1:40001')
    >>> rank.settled()
    0
    >>> agent.settle(1)
    >>> rank.settled()
    1
    >>> rank.note("backward", 417, 5)
    >>> rank.joined(1)
    >>> agent.note, agent.joined
    (Note(phase='backward', step=417, virtual_rank=5), 1)
    >>> agent.close()
    >>> os.close(file)
    """

    def __init__(self, file: int) -> None:
        self._region = mmap.mmap(file, _SIZE, offset=_OFFSET)

    def close(self) -> None:
        """Unmap the region."""
        self._region.close()

    def mark_new(self) -> None:
        """Tell the rank that it takes the place of one that died, or is one more. Call it before its process starts."""
        _NEW.pack_into(self._region, _NEW_AT, True)

    def share(self, secret: bytes) -> None:
        """Give the rank the secret of the job, 32 bytes. Call it before its process starts."""
        self._region[_SECRET_AT : _SECRET_AT + _SECRET_SIZE] = secret

    def decide(self, membership: Membership) -> None:
        """Tell the rank a decision on who the ranks are."""
        number = membership.number
        at = _members_at(number)
        _MEMBERS.pack_into(self._region, at, membership.size)
        hosts = ";".join(format_ranks(ranks, separator=",") for ranks in membership.hosts)
        text = f"{membership.store}|{hosts}|"
        most = _MEMBERS_SIZE - _MEMBERS.size - _LENGTH.size
        text += clip(format_ranks(membership.ranks, separator=","), most - len(text), at="middle")
        _write_text(self._region, at + _MEMBERS.size, text, most=most)
        _NUMBER.pack_into(self._region, _NUMBER_AT, number)

    def settle(self, number: int) -> None:
        """Tell the rank that all ranks have been told of the decision with this number."""
        _SETTLED.pack_into(self._region, _SETTLED_AT, number)

    def want(self, size: int) -> None:
        """Tell the rank the number of ranks that is wanted from the next step on; 0: no change is wanted."""
        _WANTED.pack_into(self._region, _WANTED_AT, size)

    def ask(self, size: int) -> None:
        """Tell the rank that `want` has told all ranks; 0: no change is wanted."""
        _ASKED.pack_into(self._region, _ASKED_AT, size)

    def end_job(self, *, failed: bool) -> None:
        """Tell the rank that all ranks are about to be ended.

        Args:
            failed: True if one of them has failed, or another host is lost.
        """
        _ENDS.pack_into(self._region, _ENDS_AT, True, failed)

    @property
    def came_ns(self) -> int:
        """When the script came to its Trainer, by the monotonic clock; 0 if it has not."""
        return int(_CAME.unpack_from(self._region, _CAME_AT)[0])

    @property
    def armed(self) -> bool:
        """True if the rank survives the death of others."""
        return bool(_ARMED.unpack_from(self._region, _ARMED_AT)[0])

    @property
    def virtual_ranks(self) -> int:
        """The largest number of ranks that its Trainer can have; 0 before it has one."""
        return int(_ARMED.unpack_from(self._region, _ARMED_AT)[1])

    @property
    def gpus(self) -> int:
        """The number of GPUs if each rank needs one; 0: ranks need none, or can share one."""
        return int(_ARMED.unpack_from(self._region, _ARMED_AT)[2])

    @property
    def fixed_size(self) -> str:
        """The reason why the number of ranks cannot change; "" if it can."""
        return _read_text(self._region, _FIXED_AT)

    @property
    def refusal(self) -> str:
        """The reason that the rank has given against replacing ranks; "" if there is none."""
        return _read_text(self._region, _REFUSAL_AT)

    @property
    def note(self) -> Note | None:
        """The latest note of the rank; None before its first."""
        step, place, virtual_rank = _NOTE.unpack_from(self._region, _NOTE_AT)
        return Note(_PHASES[place - 1], step, virtual_rank) if place else None

    @property
    def samples(self) -> str:
        """The samples that the rank has noted last, as words; "" if it has noted none."""
        return _read_text(self._region, _SAMPLES_AT)

    @property
    def joined(self) -> int:
        """The number of the latest decision after which the rank goes on; 0: none."""
        return int(_JOINED.unpack_from(self._region, _JOINED_AT)[0])

    @property
    def joined_ns(self) -> int:
        """When it did, by the monotonic clock."""
        return int(_JOINED.unpack_from(self._region, _JOINED_AT)[1])


def _part(link: weakref.ref[RankLink]) -> None:
    if (found := link()) is not None:
        found.part()


def _members_at(number: int) -> int:
    return _MEMBERS_AT + number % 2 * _MEMBERS_SIZE


def _write_text(region: mmap.mmap | bytearray, at: int, text: str, *, most: int) -> None:
    data = clip(text, most, at="middle").encode(errors="backslashreplace")[:most]
    _LENGTH.pack_into(region, at, 0)
    region[at + _LENGTH.size : at + _LENGTH.size + len(data)] = data
    _LENGTH.pack_into(region, at, len(data))


def _read_text(region: mmap.mmap | bytearray, at: int) -> str:
    length = _LENGTH.unpack_from(region, at)[0]
    return bytes(region[at + _LENGTH.size : at + _LENGTH.size + length]).decode(errors="ignore")
