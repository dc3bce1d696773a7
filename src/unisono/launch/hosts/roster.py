"""The hosts of a job as one of them knows them: who takes part, who knows of whom, who has ended, who is done."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from unisono.launch.hosts.quorum import find_obstacle

__all__ = ["Roster"]


@dataclass(slots=True)
class Roster:
    """The hosts of a job.

    >>> roster = Roster()
    >>> roster.begin([0, 1])
    >>> roster.add(2)
    >>> roster.is_settled
    False
    >>> [roster.agree(host, [0, 1, 2]) for host in (0, 1, 2)]
    [False, False, True]
    >>> roster.know([0, 1, 2])
    >>> roster.is_settled
    True
    """

    members: set[int] = field(default_factory=set)
    """Those that take part."""
    known: set[int] = field(default_factory=set)
    """The latest members that all of them are known to know: other sets could be counted against twice."""
    ended: set[int] = field(default_factory=set)
    """Hosts that are known to have ended."""
    finished: set[int] = field(default_factory=set)
    """Members whose ranks have succeeded, or that have none yet."""
    _agreed: set[int] = field(default_factory=set)

    def begin(self, members: Collection[int]) -> None:
        """Note who takes part in a new term."""
        self.members, self.finished, self._agreed = set(members), set(), set()
        self.known = self.known or set(members)

    def add(self, host: int) -> None:
        """Note that another host takes part, as yet without ranks."""
        self.members = {*self.members, host}
        self.finished.add(host)
        self._agreed = set()

    def shrink(self, members: Collection[int]) -> None:
        """Note that only these hosts still take part."""
        if self.members != set(members):
            self.members, self._agreed = set(members), set()

    def agree(self, host: int, members: Collection[int]) -> bool:
        """Note that a host knows these members. Return True if all members know now who they are."""
        if set(members) == self.members:
            self._agreed.add(host)
        return self._agreed == self.members

    def know(self, members: Collection[int]) -> None:
        """Note that all members are known to know that they are these."""
        if set(members) == self.members:
            self.known = set(members)

    @property
    def joining(self) -> set[int]:
        """Members that some of the others may not know of."""
        return self.members - self.known

    @property
    def is_settled(self) -> bool:
        """True if all members know who they are."""
        return self.members == self.known

    @property
    def are_done(self) -> bool:
        """True if the ranks of all members have succeeded."""
        return self.members <= self.finished

    def obstacle(self, reachable: Collection[int], *, min_hosts: int) -> str:
        """Return why only these members must not go on; "" if they may."""
        return find_obstacle(
            self.known, reachable=reachable, ended=self.ended, joining=self.joining, min_hosts=min_hosts
        )
