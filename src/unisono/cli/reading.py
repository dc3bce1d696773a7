"""Readers of the values of flags: from the text on the command line to the fields of a job.

Pure functions. A wrong text raises ValueError with what was expected; `cli.flags`
puts the name of the flag and its value in front of that.
"""

from __future__ import annotations

import difflib
import math
import re
import signal
from collections.abc import Callable
from typing import NamedTuple

__all__ = [
    "Endpoint",
    "Streams",
    "read_count",
    "read_endpoint",
    "read_filters",
    "read_metrics_address",
    "read_node_rank",
    "read_nodes",
    "read_port",
    "read_rank_list",
    "read_ranks",
    "read_rendezvous",
    "read_seconds",
    "read_signals",
    "read_streams",
    "streams_of",
]

_MOST_DIGITS = 9
_PORTS = 1 << 16


def read_ranks(text: str, *, cores: Callable[[], int], gpus: Callable[[], int | None]) -> int:
    """Read a number of ranks: a number, cpu (one per core), gpu (one per GPU) or auto (GPUs if there are any).

    Args:
        gpus: Returns the number of GPUs; None if torch is built for GPUs that cannot be counted.

    >>> read_ranks("auto", cores=lambda: 8, gpus=lambda: 2), read_ranks("cpu", cores=lambda: 8, gpus=lambda: 2)
    (2, 8)
    """
    if text == "cpu":
        return cores()
    if text in ("auto", "gpu"):
        if (found := gpus()) is None:
            raise ValueError("cannot count GPUs other than NVIDIA's, for which this torch is built: give a number")
        if text == "auto":
            return found or cores()
        if not found:
            raise ValueError("means one rank per GPU, and there is no GPU that torch can use: give a number, or cpu")
        return found
    if not (_is_number(text) and int(text) > 0):
        raise ValueError("is not a number of ranks: give 1 or more, or auto, cpu or gpu for what the machine has")
    return int(text)


def read_count(text: str) -> int:
    """Read a number of times, 0 or more."""
    if not _is_number(text):
        raise ValueError("is not a count: give 0 or more")
    return int(text)


def read_port(text: str) -> int:
    """Read the number of a port.

    >>> read_port("29500")
    29500
    """
    if not (_is_number(text) and int(text) < _PORTS):
        raise ValueError(f"is not a port: give a number from 0 (a free one) to {_PORTS - 1}")
    return int(text)


def read_nodes(text: str) -> tuple[int, int]:
    """Read a number of machines, or a range MIN:MAX of them.

    >>> read_nodes("2"), read_nodes("2:4")
    ((2, 2), (2, 4))
    """
    if not re.fullmatch(r"\d{1,9}(:\d{1,9})?", text, re.ASCII):
        raise ValueError("is not a number of machines: give one, such as 2, or a range MIN:MAX, such as 2:4")
    least, _, most = text.partition(":")
    found = int(least), int(most or least)
    if not 1 <= found[0] <= found[1]:
        raise ValueError("is an empty range: write MIN:MAX with MIN from 1 up to MAX, such as 2:4")
    return found


def read_node_rank(text: str) -> int:
    """Read the number of this machine, from 0."""
    if not _is_number(text):
        raise ValueError("is not the number of a machine: they count from 0")
    return int(text)


def read_rendezvous(text: str) -> str:
    """Read the name of a rendezvous backend."""
    if text not in ("c10d", "static"):
        raise ValueError("is neither c10d nor static: leave it out, and --node-rank decides")
    return text


class Endpoint(NamedTuple):
    """The address where ranks meet, as far as it was given."""

    host: str
    port: int | None


def read_endpoint(text: str) -> Endpoint:
    """Read HOST or HOST:PORT; an IPv6 address stands in brackets.

    >>> read_endpoint("localhost:29400"), read_endpoint("localhost")
    (Endpoint(host='localhost', port=29400), Endpoint(host='localhost', port=None))
    """
    found = re.fullmatch(r"(?P<host>\[[^]]*\]|[^:]*)(:(?P<port>.*))?", text)
    if found is None:
        raise ValueError("is not an endpoint: give HOST:PORT, with an IPv6 address in brackets")
    port = None if found["port"] is None else read_port(found["port"])
    return Endpoint(found["host"], port)


def read_metrics_address(text: str) -> tuple[str, int]:
    """Read HOST:PORT of a server; an IPv6 address stands in brackets.

    >>> read_metrics_address("127.0.0.1:9400")
    ('127.0.0.1', 9400)
    """
    host, port = read_endpoint(text)
    if not host or port is None:
        raise ValueError("is not an address: give HOST:PORT, such as 127.0.0.1:9400, or port 0 for a free one")
    return host, port


def read_seconds(text: str) -> float:
    """Read a time of 0 seconds or more.

    >>> read_seconds("2.5")
    2.5
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError("is not a number of seconds: give 0 or more")
    return seconds


class Streams(NamedTuple):
    """A choice of streams: of every rank, or by local rank."""

    every: frozenset[str]
    by_rank: dict[int, frozenset[str]]


def read_streams(text: str) -> Streams:
    """Read a choice of streams: 0 none, 1 stdout, 2 stderr, 3 both; or RANK:STREAMS, separated by commas.

    >>> read_streams("1").every, sorted(read_streams("0:1,12:3").by_rank[12])
    (frozenset({'stdout'}), ['stderr', 'stdout'])
    """
    if re.fullmatch("[0-3]", text):
        return Streams(_streams(text), {})
    if not re.fullmatch(r"\d{1,9}:[0-3](,\d{1,9}:[0-3])*", text, re.ASCII):
        raise ValueError(
            "is not a choice of streams: give 0 (none), 1 (stdout), 2 (stderr), 3 (both), or 0:1,1:3 by rank"
        )
    pairs = (pair.split(":") for pair in text.split(","))
    return Streams(frozenset(), {int(rank): _streams(number) for rank, number in pairs})


def streams_of(streams: Streams, *, ranks: int) -> dict[int, frozenset[str]]:
    """Return the chosen streams of every rank.

    >>> streams_of(read_streams("1:2"), ranks=2)
    {0: frozenset(), 1: frozenset({'stderr'})}
    """
    return {rank: streams.by_rank.get(rank, streams.every) for rank in range(ranks)}


def read_rank_list(text: str) -> frozenset[int]:
    """Read local ranks, separated by commas.

    >>> sorted(read_rank_list("0,2"))
    [0, 2]
    """
    names = [name.strip() for name in text.split(",")]
    if not all(_is_number(name) for name in names):
        raise ValueError("is not a list of ranks: give numbers separated by commas, such as 0,2")
    return frozenset(map(int, names))


def read_filters(text: str) -> tuple[str, ...]:
    """Read texts separated by commas; two commas are one within a text.

    >>> read_filters("loss,step 1,,000")
    ('loss', 'step 1,000')
    """
    parts = text.replace(",,", "\0").split(",")
    return tuple(part.replace("\0", ",") for part in parts if part)


def read_signals(text: str) -> tuple[int, ...]:
    """Read names of signals, separated by commas.

    >>> [int(signum) for signum in read_signals("SIGTERM,SIGUSR1")]
    [15, 10]
    """
    known = {member.name: int(member) for member in signal.Signals}
    signals: list[int] = []
    for name in (part.strip() for part in text.split(",")):
        if name not in known:
            near = difflib.get_close_matches(name.upper(), known, n=1)
            raise ValueError(
                f"names no signal with {name!r}: " + (f"did you mean {near[0]}?" if near else "see kill -l")
            )
        if name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"has {name}, which no process can handle: leave it out")
        signals.append(known[name])
    return tuple(dict.fromkeys(signals))


def _streams(number: str) -> frozenset[str]:
    return frozenset(name for bit, name in ((1, "stdout"), (2, "stderr")) if int(number) & bit)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
