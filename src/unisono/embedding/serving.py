"""The processes that update the rows of tables, and the age that rows may have when they are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from unisono.arguments import choice, whole
from unisono.embedding.table_settings import Table
from unisono.variables import SERVERS_VARIABLE

__all__ = ["Consistency", "ServerCounts", "Serving", "serving_for"]

_PLACEMENTS = ("hash", "table", "range", "column")


@dataclass(frozen=True, slots=True)
class Consistency:
    """How many steps old rows may be that a rank reads.

    Raises:
        ValueError: The text is no mode.

    >>> Consistency.read("sync").bound, Consistency.read("bounded(4)").bound, Consistency.read("async").bound
    (0, 4, None)
    """

    text: str
    bound: int | None
    """The largest number of steps; None: there is no bound."""

    @classmethod
    def read(cls, text: object) -> Consistency:
        """Read a mode as users write it."""
        if text == "sync":
            return cls("sync", 0)
        if text == "async":
            return cls("async", None)
        found = re.fullmatch(r"bounded\((\d{1,4})\)", text) if isinstance(text, str) else None
        if found is None or int(found[1]) < 1:
            raise ValueError(
                f'consistency={text!r}: give "sync", "async", or "bounded(k)" where rows may be k steps old, such as '
                '"bounded(4)"'
            )
        return cls(found[0], int(found[1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerCounts:
    """The updates that servers were given and have applied, since this process has had the tables."""

    steps: int = 0
    """Steps whose updates servers were given."""
    applied: int = 0
    """Steps that all servers have applied."""
    rows_given: int = 0
    """Rows in the updates that servers were given, each counted once for each step."""
    rows_applied: int = 0
    """Rows in the updates that they have applied."""
    repaired: int = 0
    """Updates of some rows that a server was killed in, and that the process in its place has completed."""
    most_stale: int = 0
    """The largest age of rows when a step began, in steps."""


class Serving:
    """The servers of some tables, as all modules of these tables know them.

    Args:
        servers: The number of server processes.
        consistency: How old rows may be.
        placement: How rows or columns are dealt over servers.
    """

    def __init__(self, servers: int, consistency: Consistency, placement: str) -> None:
        self.servers, self.consistency, self.placement = servers, consistency, placement
        self.settle: Callable[[], None] = lambda: None
        """Waits until servers have applied all that they were given. The engine sets it."""
        self.counts: Callable[[], ServerCounts] | None = None
        """Returns what servers have done. The engine that gives them updates sets it, and no other may."""
        self.past = ServerCounts()
        """The updates that they had applied before the memory of the tables was the present one."""

    @property
    def column_servers(self) -> int:
        """The number of servers that have columns of each row; 1 if each has whole rows."""
        return self.servers if self.placement == "column" else 1

    def __reduce__(self) -> tuple[type[Serving], tuple[int, Consistency, str]]:
        return Serving, (self.servers, self.consistency, self.placement)


def serving_for(
    tables: Mapping[str, Table], servers: int | None, consistency: str, placement: str, environment: Mapping[str, str]
) -> Serving | None:
    """Return the servers of tables; None: ranks update the rows themselves.

    Args:
        tables: The settings of the tables.
        servers: See `Tables`.
        consistency: See `Tables`.
        placement: See `Tables`.
        environment: The environment variables of this process.

    Raises:
        TypeError, ValueError: An argument has the wrong type, or does not fit the job.
    """
    started = int(environment.get(SERVERS_VARIABLE, "0"))
    mode = Consistency.read(consistency)
    choice("placement", placement, _PLACEMENTS)
    if servers is not None and whole("servers", servers, least=0) not in (0, started):
        raise ValueError(_differs(servers, started))
    if not started or servers == 0:
        if mode.bound != 0:
            raise ValueError(
                f"consistency={mode.text!r} is for tables on servers, and these are on none: without servers, ranks "
                'update rows in each step together. Start the program with `unisono run --servers 1`, or take "sync".'
            )
        return None
    columns = max(table.dim for table in tables.values())
    if placement == "column" and columns < started:
        raise ValueError(
            f"{started} servers for rows of {columns} columns: {started - columns} of them would have none. Start at "
            f'most {columns}, or deal rows: placement="hash".'
        )
    rows = sum(table.length for table in tables.values())
    if rows < started:
        raise ValueError(
            f"{started} servers for {rows} rows: {started - rows} of them would have none. Start at most {rows}."
        )
    for name, table in tables.items():
        _check(name, table, mode)
    return Serving(started, mode, placement)


def _check(name: str, table: Table, mode: Consistency) -> None:
    if table.when_full == "grow":
        raise ValueError(
            f'table {name!r} has when_full="grow", and one on servers keeps its memory: give it the capacity that it '
            'needs, or when_full="evict_oldest", or leave out --servers'
        )
    if table.rows is None and mode.bound != 0 and table.policy.evicts:
        raise ValueError(
            f"table {name!r} gives up rows, and with consistency={mode.text!r} an update on its way would then meet "
            'the row of another id: take "sync", or leave out evict_after and when_full'
        )


def _differs(servers: int, started: int) -> str:
    if started:
        return (
            f"servers={servers}, and the command has started {started}: give `unisono run --servers {servers}`, or "
            "leave servers= out, which takes as many as there are"
        )
    return (
        f"servers={servers}, and this program was started without servers, which the launcher makes: start it with "
        f"`unisono run --servers {servers}`, or leave servers= out"
    )
