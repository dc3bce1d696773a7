"""The agents' messages to the leader about their ranks, in few bytes: of most ranks only that nothing is unusual.

Start reading at `encode_members` and `encode_death`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from unisono.launch.failure.root_cause import RankFailure
from unisono.launch.recovery_page import Note
from unisono.launch.replacement_policy import Death, Member
from unisono.text import format_ranks, parse_ranks

__all__ = [
    "changed_places",
    "death_with_host",
    "decode_death",
    "decode_members",
    "encode_death",
    "encode_members",
    "new_places",
]

_KILLED = -9


def encode_members(members: Iterable[Member]) -> dict[str, Any]:
    """Return ranks as JSON. A thousand take some 20 bytes a host, if nothing is unusual.

    >>> told = encode_members([Member(rank=0), Member(rank=1), Member(rank=2, armed=False)])
    >>> told
    {'usual': '0-1', 'others': [{'rank': 2, 'armed': False}]}
    >>> [member.armed for member in decode_members(told)]
    [True, True, False]
    """
    usual, others = [], []
    for member in members:
        if member[1:] == _USUAL[1:]:
            usual.append(member.rank)
        else:
            told = member._asdict()
            others.append({name: told[name] for name in told if name == "rank" or told[name] != getattr(_USUAL, name)})
    return {"usual": format_ranks(usual, separator=","), "others": others}


def decode_members(told: Mapping[str, Any]) -> list[Member]:
    """Return what `encode_members` was given, in the order of ranks."""
    members = [Member(rank=rank) for rank in parse_ranks(told["usual"])]
    if told["others"]:
        members += [Member(**member) for member in told["others"]]
        members.sort(key=lambda member: member.rank)
    return members


_USUAL = Member(rank=-1)


def changed_places(before: Mapping[int, Sequence[int]], after: Mapping[int, Sequence[int]]) -> dict[str, str]:
    """Return the hosts whose ranks change, with their ranks, as JSON; "" for those that are there no more.

    >>> changed_places({0: [0, 1], 1: [2, 3], 2: [4, 5]}, {0: [0, 1, 2, 3], 2: [4, 5]})
    {'0': '0-3', '1': ''}
    """
    changed = {host: ranks for host, ranks in after.items() if list(before.get(host, ())) != list(ranks)}
    gone = dict.fromkeys(before.keys() - after.keys(), ())
    return {str(host): format_ranks(ranks, separator=",") for host, ranks in sorted({**changed, **gone}.items())}


def new_places(before: Mapping[int, Sequence[int]], changed: Mapping[str, str]) -> dict[int, list[int]]:
    """Return the ranks of each host after a change that `changed_places` has returned.

    >>> new_places({0: [0, 1], 1: [2, 3], 2: [4, 5]}, {"0": "0-3", "1": ""})
    {0: [0, 1, 2, 3], 2: [4, 5]}
    """
    after = {**before, **{int(host): parse_ranks(ranks) for host, ranks in changed.items()}}
    return {host: list(after[host]) for host in (sorted(after) if changed else after) if after[host]}


def encode_death(death: Death) -> dict[str, Any]:
    """Return a death as JSON, with what decisions and messages need."""
    failure = death.failure
    account = None
    if failure.account is not None:
        account = {"type": failure.account.get("type", ""), "frames": failure.account.get("frames", [])[-1:]}
    return {
        "failure": {"rank": failure.rank, "code": failure.code, "reported": failure.reported, "account": account},
        "step": death.step,
        "note": None if death.note is None else list(death.note),
        "samples": death.samples,
        "armed": death.armed,
        "had_state": death.had_state,
        "refusal": death.refusal,
    }


def decode_death(told: Mapping[str, Any]) -> Death:
    """Return what `encode_death` was given. The time is now: clocks of hosts differ."""
    failure = RankFailure(**told["failure"], time_ns=time.monotonic_ns())
    note = None if told["note"] is None else Note(*told["note"])
    return Death(**{**told, "failure": failure, "note": note})


def death_with_host(rank: int, step: int) -> Death:
    """Return the death of a rank that is lost with its host, in a step."""
    failure = RankFailure(rank=rank, code=_KILLED, time_ns=time.monotonic_ns(), reported=False)
    return Death(failure=failure, step=step)
