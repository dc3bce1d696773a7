"""Transport of payloads: an envelope of fixed size for each, with the payload inside if it fits, then the rest.

So small values take one collective and large ones two, and no rank needs to know sizes in advance. Envelopes also carry
the name of the call: ranks that make different calls, or whose value cannot be sent, are found before data is sent.

All functions but `send` and `recv` must be called by every rank of the group. `src` and `dst` are numbers within the
group; `of` describes the value, for errors. A failure raises its error on its own rank once the others have it, and
PeerError on those. RankMismatchError means that ranks make different calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.activity import Observed, Wait
from unisono.collectives.framing import (
    ENVELOPE_NBYTES,
    Envelope,
    FailedSend,
    Outgoing,
    read_envelope,
    write_envelope,
)
from unisono.collectives.freed_wait import run_collective, wait_for_message
from unisono.collectives.group import Group
from unisono.collectives.received import (
    Received,
    arrived_bytes,
    check_grad_modes,
    own_payload,
    raise_failures,
    read_payload,
)
from unisono.collectives.serialization import (
    NOT_FOLLOWED,
    Payload,
    serialize,
)
from unisono.collectives.structure import check_concat
from unisono.collectives.tensor_collectives import all_gather_single
from unisono.plan.alignment import WIRE_NBYTES, align_up

__all__ = [
    "FailedSend",
    "Outgoing",
    "all_gather",
    "all_to_all",
    "broadcast",
    "gather",
    "gather_values",
    "recv",
    "scatter",
    "send",
    "serialize_or_fail",
]

_WASTE = 2
"""Padding for one collective instead of several may multiply the bytes that travel by at most this factor."""
_SMALL = 1 << 16
"""Bytes up to which padding is always allowed."""
TAG = 0x756E69
"""The tag of messages within collectives, so that no other receive takes them."""


def all_gather(group: Group, call: str, sent: Outgoing, *, of: str = "") -> list[Received]:
    """Return the payloads of all ranks, in the order of the group."""
    if group.process_group is None:
        return [own_payload(sent)]
    envelopes = _gather_envelopes(group, call, sent, of)
    rests: list[Tensor | None] = [None] * group.size
    sizes = [envelope.rest_nbytes for envelope in envelopes]
    most = max(sizes)
    if most:
        assert isinstance(sent, Payload)
        device = group.bytes_device(accelerated=any(envelope.accelerated for envelope in envelopes))
        own = _rest(envelopes[group.rank], sent, device)
        if _may_pad(sizes):
            padded = [torch.empty(most, dtype=torch.uint8, device=device) for _ in sizes]
            run_collective(dist.all_gather, padded, _padded(own, most, device), group=group.process_group)
            rests = list(padded)
        else:
            for index, size in enumerate(sizes):
                if size:
                    mine = index == group.rank
                    rest = own if mine and own is not None else torch.empty(size, dtype=torch.uint8, device=device)
                    run_collective(dist.broadcast, rest, group.ranks[index], group=group.process_group)
                    rests[index] = rest
    return _all_received(group, envelopes, rests, sent)


def gather_values(group: Group, call: str, value: Any) -> list[Any]:
    """Return one picklable value of each rank, in the order of the group. Every rank must call it.

    Args:
        group: The group.
        call: The purpose of the call, equal on all ranks, for messages.
        value: The value of this rank.

    Raises:
        TypeError: The value cannot be pickled.
        PeerError: The value of another rank cannot be pickled.
        RankMismatchError: Ranks make different calls.
    """
    return [received.open() for received in all_gather(group, call, serialize_or_fail(value))]


def serialize_or_fail(value: Any, concat: int | None = None, *, follow: bool = True) -> Outgoing:
    """Return the payload of a value, or the failure, which is raised here once the other ranks have it.

    Args:
        value: The value.
        concat: The dimension along which its tensors are to be concatenated, which is checked.
        follow: Propagate gradients to its tensors.
    """
    try:
        check_concat(value, concat)
        if follow:
            return serialize(value)
        with torch.no_grad():
            return serialize(value)
    except (TypeError, ValueError, RecursionError) as error:
        return FailedSend(error)


def gather(group: Group, call: str, sent: Outgoing, dst: int, *, of: str = "") -> list[Received] | None:
    """Return the payloads of all ranks on one, in the order of the group; None on the others."""
    if group.process_group is None:
        return [own_payload(sent)]
    envelopes = _gather_envelopes(group, call, sent, of)
    sizes = [envelope.rest_nbytes for envelope in envelopes]
    sizes[dst] = 0
    most, at_dst = max(sizes), group.rank == dst
    rests: list[Tensor | None] = [None] * group.size
    if most:
        assert isinstance(sent, Payload)
        device = group.bytes_device(accelerated=any(envelope.accelerated for envelope in envelopes))
        own = None if at_dst else _rest(envelopes[group.rank], sent, device)
        if _may_pad(sizes):
            padded = [torch.empty(most, dtype=torch.uint8, device=device) for _ in sizes] if at_dst else None
            own_part = _padded(own, most, device)
            run_collective(dist.gather, own_part, padded, dst=group.ranks[dst], group=group.process_group)
            rests = list(padded or rests)
        elif not at_dst and own is not None:
            _send_part(group, own, dst)
        elif at_dst:
            for index, size in enumerate(sizes):
                if size:
                    rests[index] = _recv_part(group, size, index, device)
    return _all_received(group, envelopes, rests, sent) if at_dst else None


def broadcast(group: Group, call: str, sent: Outgoing | None, src: int, *, of: str = "") -> Received:
    """Return the payload of one rank on all. `sent` is None on the others."""
    if group.process_group is None:
        assert sent is not None
        return own_payload(sent)
    at_src = group.rank == src
    raw = _to_device(write_envelope(call, sent), group) if sent is not None else _empty(ENVELOPE_NBYTES, group)
    group.run((call, None), of, dist.broadcast, raw, group.ranks[src])
    envelope = read_envelope(arrived_bytes(raw), call, group.ranks[src])
    raise_failures(group, call, {src: envelope}, sent)
    rest = None
    if envelope.rest_nbytes:
        device = group.bytes_device(accelerated=envelope.accelerated)
        rest = _rest(envelope, sent, device) if isinstance(sent, Payload) else None
        if rest is None:
            rest = torch.empty(envelope.rest_nbytes, dtype=torch.uint8, device=device)
        run_collective(dist.broadcast, rest, group.ranks[src], group=group.process_group)
    return read_payload(envelope, rest, sent, at_src)


def scatter(
    group: Group, call: str, sent: Sequence[Payload] | FailedSend | None, src: int, *, of: str = ""
) -> Received:
    """Return on each rank its payload from one rank, which has one for each. `sent` is None on the others."""
    if group.process_group is None:
        assert sent is not None
        return own_payload(sent if isinstance(sent, FailedSend) else sent[0])
    own: Outgoing | None = None
    raw, raws, envelopes = _empty(ENVELOPE_NBYTES, group), None, None
    if sent is not None:
        each: Sequence[Outgoing] = [sent] * group.size if isinstance(sent, FailedSend) else sent
        own = each[src]
        envelopes = [read_envelope(write_envelope(call, one), call, src) for one in each]
        sizes = [0 if index == src else envelope.rest_nbytes for index, envelope in enumerate(envelopes)]
        padded = max(sizes) if _may_pad(sizes) else 0
        fast = any(isinstance(one, Payload) and one.accelerated for one in each)
        followed = any(isinstance(one, Payload) and one.followed for one in each)
        flags = {"accelerated": fast, "followed": followed}
        raws = [_to_device(write_envelope(call, one, padded=padded, **flags), group) for one in each]
    group.run((call, None), of, dist.scatter, raw, raws, src=group.ranks[src])
    envelope = read_envelope(arrived_bytes(raw), call, group.ranks[src])
    raise_failures(group, call, {src: envelope}, own)
    device = group.bytes_device(accelerated=envelope.accelerated)
    rest: Tensor | None = None
    if envelope.padded:
        rest, rests = torch.empty(envelope.padded, dtype=torch.uint8, device=device), None
        if envelopes is not None and sent is not None and not isinstance(sent, FailedSend):
            rests = [
                _padded(_rest(c, p, device), envelope.padded, device) for c, p in zip(envelopes, sent, strict=True)
            ]
        run_collective(dist.scatter, rest, rests, src=group.ranks[src], group=group.process_group)
    elif envelopes is not None and sent is not None and not isinstance(sent, FailedSend):
        for index, (its, payload) in enumerate(zip(envelopes, sent, strict=True)):
            if index != src and (part := _rest(its, payload, device)) is not None:
                _send_part(group, part, index)
    elif envelope.rest_nbytes:
        rest = _recv_part(group, envelope.rest_nbytes, src, device)
    return read_payload(envelope, rest, own, group.rank == src)


def all_to_all(group: Group, call: str, sent: Sequence[Payload] | FailedSend, *, of: str = "") -> list[Received]:
    """Send the r-th payload to rank r, and return those received, in the order of the group."""
    if group.process_group is None:
        return [own_payload(sent if isinstance(sent, FailedSend) else sent[0])]
    each: Sequence[Outgoing] = [sent] * group.size if isinstance(sent, FailedSend) else sent
    mine = [read_envelope(write_envelope(call, one), call, group.own) for one in each]
    fast = any(isinstance(one, Payload) and one.accelerated for one in each)
    more = any(envelope.rest_nbytes for index, envelope in enumerate(mine) if index != group.rank)
    followed = any(isinstance(one, Payload) and one.followed for one in each)
    offered = all(isinstance(one, Payload) and any(meta.follow != NOT_FOLLOWED for meta in one.metas) for one in each)
    flags = {"accelerated": fast, "more": more, "followed": followed, "offered": offered}
    out = _to_device(b"".join(write_envelope(call, one, **flags) for one in each), group)
    raw = torch.empty_like(out)
    group.run((call, None), of, dist.all_to_all_single, raw, out)
    own = each[group.rank]
    envelopes = _read_all(group, call, raw, own)
    rests: list[Tensor | None] = [None] * group.size
    if any(envelope.more for envelope in envelopes) and not isinstance(sent, FailedSend):
        device = group.bytes_device(accelerated=any(envelope.accelerated for envelope in envelopes))
        parts = [
            None if index == group.rank else _rest(envelope, payload, device)
            for index, (envelope, payload) in enumerate(zip(mine, sent, strict=True))
        ]
        leaving = [torch.empty(0, dtype=torch.uint8, device=device) if part is None else part for part in parts]
        coming = [0 if index == group.rank else envelope.rest_nbytes for index, envelope in enumerate(envelopes)]
        buffer = torch.empty(sum(coming), dtype=torch.uint8, device=device)
        sizes = [part.numel() for part in leaving]
        run_collective(dist.all_to_all_single, buffer, torch.cat(leaving), coming, sizes, group=group.process_group)
        rests = list(torch.split(buffer, coming))
    return _all_received(group, envelopes, rests, own)


def send(group: Group, call: str, sent: Outgoing, dst: int, tag: int) -> None:
    """Send a payload to one rank, or a failure, whose error is then raised here."""
    _send(group, _to_device(write_envelope(call, sent), group), dst, tag)
    if isinstance(sent, FailedSend):
        raise sent.error
    envelope = read_envelope(write_envelope(call, sent), call, group.own)
    device = group.bytes_device(accelerated=sent.accelerated)
    if (rest := _rest(envelope, sent, device)) is not None:
        _send(group, rest, dst, tag)


def recv(group: Group, src: int | None, tag: int) -> Received:
    """Receive a payload from one rank; from any rank if `src` is None."""
    raw = _empty(ENVELOPE_NBYTES, group)
    source = dist.recv(raw, None if src is None else group.ranks[src], group=group.process_group, tag=tag)
    found = group.ranks.index(source)
    call = f"send to rank {group.own}"
    envelope = read_envelope(arrived_bytes(raw), call, source)
    raise_failures(group, call, {found: envelope}, None)
    rest = None
    if envelope.rest_nbytes:
        device = group.bytes_device(accelerated=envelope.accelerated)
        rest = _recv(group, envelope.rest_nbytes, found, tag, device)
    return read_payload(envelope, rest, None, own=False)


def _gather_envelopes(group: Group, call: str, sent: Outgoing, of: str) -> list[Envelope]:
    raw = _empty(ENVELOPE_NBYTES * group.size, group)
    group.run((call, None), of, all_gather_single, raw, _to_device(write_envelope(call, sent), group))
    return _read_all(group, call, raw, sent)


def _read_all(group: Group, call: str, raw: Tensor, sent: Outgoing) -> list[Envelope]:
    """Return the envelopes of all ranks once they fit together. `sent` is this rank's, which may have failed."""
    content = arrived_bytes(raw)
    envelopes = [
        read_envelope(content[i * ENVELOPE_NBYTES : (i + 1) * ENVELOPE_NBYTES], call, rank)
        for i, rank in enumerate(group.ranks)
    ]
    raise_failures(group, call, dict(enumerate(envelopes)), sent)
    check_grad_modes(group, call, [each.followed for each in envelopes], [each.in_grad_mode for each in envelopes])
    return envelopes


def _all_received(group: Group, envelopes: list[Envelope], rests: list[Tensor | None], own: Outgoing) -> list[Received]:
    pairs = zip(envelopes, rests, strict=True)
    return [read_payload(envelope, rest, own, index == group.rank) for index, (envelope, rest) in enumerate(pairs)]


def _rest(envelope: Envelope, payload: Payload, device: torch.device) -> Tensor | None:
    """Return the bytes of a payload that follow its envelope; for a single tensor, possibly its own memory."""
    if not envelope.rest_nbytes:
        return None
    parts = []
    if not envelope.body_here:
        padded = payload.body.ljust(align_up(len(payload.body), WIRE_NBYTES), b"\0")
        parts.append(torch.frombuffer(bytearray(padded), dtype=torch.uint8))
    if not envelope.data_here:
        parts.append(payload.data(device))
    return parts[0].to(device) if len(parts) == 1 else torch.cat([part.to(device) for part in parts])


def _may_pad(sizes: Sequence[int]) -> bool:
    """Return True if all are to be padded to the largest size, for one collective instead of one for each."""
    whole = max(sizes) * len(sizes)
    return whole <= _SMALL or whole <= _WASTE * sum(sizes)


def _padded(rest: Tensor | None, nbytes: int, device: torch.device) -> Tensor:
    if rest is not None and rest.numel() == nbytes:
        return rest
    padded = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    if rest is not None:
        padded[: rest.numel()].copy_(rest[:nbytes])
    return padded


def _send(group: Group, tensor: Tensor, dst: int, tag: int) -> None:
    dist.send(tensor, group.ranks[dst], group=group.process_group, tag=tag)


def _recv(group: Group, nbytes: int, src: int, tag: int, device: torch.device) -> Tensor:
    tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
    dist.recv(tensor, group.ranks[src], group=group.process_group, tag=tag)
    return tensor


def _send_part(group: Group, tensor: Tensor, dst: int) -> None:
    """Send a message that is part of a collective."""
    _wait(group, dist.isend(tensor, group.ranks[dst], group=group.process_group, tag=TAG), "send", dst)


def _recv_part(group: Group, nbytes: int, src: int, device: torch.device) -> Tensor:
    tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
    _wait(group, dist.irecv(tensor, group.ranks[src], group=group.process_group, tag=TAG), "recv", src)
    return tensor


def _wait(group: Group, work: dist.Work | None, name: str, other: int) -> None:
    assert work is not None  # this rank is in the group
    assert group.process_group is not None
    with Observed(Wait(name, group.process_group.group_name, group.size, 0, group.ranks[other])):
        wait_for_message(work)


def _empty(nbytes: int, group: Group) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=group.bytes_device())


def _to_device(content: bytes, group: Group) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(group.bytes_device())
