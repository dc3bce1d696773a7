"""How parcels travel: a cell of fixed size from everybody, with the parcel inside where it fits, and the rest after it.

So small values take one collective and large ones two, and nobody needs to know sizes before. Cells carry the name of
the call too: ranks that call different things, or whose value cannot be sent, are found by all before any data move.
In all functions `of` says what the value is, for messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.collectives.framing import (
    ENVELOPE_NBYTES,
    LONGEST_CALL,
    Envelope,
    FailedSend,
    Outgoing,
    aligned,
    read_envelope,
    to_bytes,
    write_envelope,
)
from unisono.collectives.group import Group
from unisono.collectives.serialization import Payload, TensorFacts, deserialize, open_body, own_copies, tensors_from
from unisono.errors import PeerError, RankMismatchError

__all__ = [
    "FailedSend",
    "Outgoing",
    "Received",
    "all_gather",
    "all_to_all",
    "broadcast",
    "gather",
    "recv",
    "scatter",
    "send",
]

_WASTE = 2
"""How many times the bytes that are needed may travel for the sake of one collective in place of several."""
_SMALL = 1 << 16
"""Bytes that are not worth that thought."""
TAG = 0x756E69
"""Of messages within collectives, so that no other receive takes them."""


@dataclass(slots=True)
class Received:
    """What came of one rank."""

    body: bytes
    data: Tensor | None = None
    tensors: list[Tensor] | None = None
    """Of this rank itself: copies of what it sent, which did not travel."""
    followed: bool = False
    """Whether autograd follows a tensor of what that rank sent, to whomever."""

    @property
    def facts(self) -> list[TensorFacts]:
        """What the tensors are."""
        return open_body(self.body)

    def unpack(self) -> list[Tensor]:
        """Give the tensors, in the order of the facts."""
        return tensors_from(self.data, self.facts) if self.tensors is None else self.tensors

    def open(self, tensors: Sequence[Tensor] | None = None) -> Any:
        """Make the value. Args: tensors are those of `unpack`, or others that stand for them."""
        return deserialize(self.body, self.unpack() if tensors is None else tensors)


def all_gather(link: Group, call: str, sent: Outgoing, *, of: str = "") -> list[Received]:
    """Give every rank the parcels of all, in the order of the group. Raises: PeerError, RankMismatchError."""
    if link.group is None:
        return [_kept(sent)]
    cells = _gather_cells(link, call, sent, of)
    rests: list[Tensor | None] = [None] * link.size
    sizes = [cell.rest_nbytes for cell in cells]
    most = max(sizes)
    if most:
        assert isinstance(sent, Payload)
        device = link.bytes_device(accelerated=any(cell.accelerated for cell in cells))
        own = _rest(cells[link.rank], sent, device)
        if _may_pad(sizes):
            padded = [torch.empty(most, dtype=torch.uint8, device=device) for _ in sizes]
            dist.all_gather(padded, _padded(own, most, device), group=link.group)
            rests = list(padded)
        else:
            for index, size in enumerate(sizes):
                if size:
                    mine = index == link.rank
                    rest = own if mine and own is not None else torch.empty(size, dtype=torch.uint8, device=device)
                    dist.broadcast(rest, link.ranks[index], group=link.group)
                    rests[index] = rest
    return [_arrived(cell, rest, sent, i == link.rank) for i, (cell, rest) in enumerate(zip(cells, rests, strict=True))]


def gather(link: Group, call: str, sent: Outgoing, dst: int, *, of: str = "") -> list[Received] | None:
    """Give one rank the parcels of all; the others get None. Args: dst counts within the group."""
    if link.group is None:
        return [_kept(sent)]
    cells = _gather_cells(link, call, sent, of)
    sizes = [cell.rest_nbytes for cell in cells]
    sizes[dst] = 0
    most, at_dst = max(sizes), link.rank == dst
    rests: list[Tensor | None] = [None] * link.size
    if most:
        assert isinstance(sent, Payload)
        device = link.bytes_device(accelerated=any(cell.accelerated for cell in cells))
        own = None if at_dst else _rest(cells[link.rank], sent, device)
        if _may_pad(sizes):
            padded = [torch.empty(most, dtype=torch.uint8, device=device) for _ in sizes] if at_dst else None
            dist.gather(_padded(own, most, device), padded, dst=link.ranks[dst], group=link.group)
            rests = list(padded or rests)
        elif not at_dst and own is not None:
            _send(link, own, dst, TAG)
        elif at_dst:
            for index, size in enumerate(sizes):
                if size:
                    rests[index] = _recv(link, size, index, TAG, device)
    if not at_dst:
        return None
    return [_arrived(cell, rest, sent, i == dst) for i, (cell, rest) in enumerate(zip(cells, rests, strict=True))]


def broadcast(link: Group, call: str, sent: Outgoing | None, src: int, *, of: str = "") -> Received:
    """Give every rank the parcel of one. Args: sent is None elsewhere; src counts within the group."""
    if link.group is None:
        assert sent is not None
        return _kept(sent)
    at_src = link.rank == src
    raw = _to_device(write_envelope(call, sent), link) if sent is not None else _empty(ENVELOPE_NBYTES, link)
    link.run((call, None), of, dist.broadcast, raw, link.ranks[src])
    cell = read_envelope(to_bytes(raw), call, link.ranks[src])
    _raise_failures(link, call, {src: cell}, sent)
    rest = None
    if cell.rest_nbytes:
        device = link.bytes_device(accelerated=cell.accelerated)
        rest = _rest(cell, sent, device) if isinstance(sent, Payload) else None
        if rest is None:
            rest = torch.empty(cell.rest_nbytes, dtype=torch.uint8, device=device)
        dist.broadcast(rest, link.ranks[src], group=link.group)
    return _arrived(cell, rest, sent, at_src)


def scatter(link: Group, call: str, sent: Sequence[Payload] | FailedSend | None, src: int, *, of: str = "") -> Received:
    """Give each rank its parcel of those that one rank has. Args: sent is None elsewhere."""
    if link.group is None:
        assert sent is not None
        return _kept(sent if isinstance(sent, FailedSend) else sent[0])
    own: Outgoing | None = None
    raw, raws, cells = _empty(ENVELOPE_NBYTES, link), None, None
    if sent is not None:
        each: Sequence[Outgoing] = [sent] * link.size if isinstance(sent, FailedSend) else sent
        own = each[src]
        cells = [read_envelope(write_envelope(call, one), call, src) for one in each]
        sizes = [0 if index == src else cell.rest_nbytes for index, cell in enumerate(cells)]
        padded = max(sizes) if _may_pad(sizes) else 0
        fast = any(isinstance(one, Payload) and one.accelerated for one in each)
        followed = any(isinstance(one, Payload) and one.followed for one in each)
        flags = {"accelerated": fast, "followed": followed}
        raws = [_to_device(write_envelope(call, one, padded=padded, **flags), link) for one in each]
    link.run((call, None), of, dist.scatter, raw, raws, src=link.ranks[src])
    cell = read_envelope(to_bytes(raw), call, link.ranks[src])
    _raise_failures(link, call, {src: cell}, own)
    device = link.bytes_device(accelerated=cell.accelerated)
    rest: Tensor | None = None
    if cell.padded:
        rest, rests = torch.empty(cell.padded, dtype=torch.uint8, device=device), None
        if cells is not None and sent is not None and not isinstance(sent, FailedSend):
            rests = [_padded(_rest(c, p, device), cell.padded, device) for c, p in zip(cells, sent, strict=True)]
        dist.scatter(rest, rests, src=link.ranks[src], group=link.group)
    elif cells is not None and sent is not None and not isinstance(sent, FailedSend):
        for index, (its, parcel) in enumerate(zip(cells, sent, strict=True)):
            if index != src and (part := _rest(its, parcel, device)) is not None:
                _send(link, part, index, TAG)
    elif cell.rest_nbytes:
        rest = _recv(link, cell.rest_nbytes, src, TAG, device)
    return _arrived(cell, rest, own, link.rank == src)


def all_to_all(link: Group, call: str, sent: Sequence[Payload] | FailedSend, *, of: str = "") -> list[Received]:
    """Give rank r the r-th parcel of every rank, in the order of the group."""
    if link.group is None:
        return [_kept(sent if isinstance(sent, FailedSend) else sent[0])]
    each: Sequence[Outgoing] = [sent] * link.size if isinstance(sent, FailedSend) else sent
    mine = [read_envelope(write_envelope(call, one), call, link.own) for one in each]
    fast = any(isinstance(one, Payload) and one.accelerated for one in each)
    more = any(cell.rest_nbytes for index, cell in enumerate(mine) if index != link.rank)
    followed = any(isinstance(one, Payload) and one.followed for one in each)
    flags = {"accelerated": fast, "more": more, "followed": followed}
    out = _to_device(b"".join(write_envelope(call, one, **flags) for one in each), link)
    raw = torch.empty_like(out)
    link.run((call, None), of, dist.all_to_all_single, raw, out)
    cells = _read_all(link, call, raw)
    _raise_failures(link, call, dict(enumerate(cells)), each[link.rank])
    _check_grad_modes(link, call, cells)
    rests: list[Tensor | None] = [None] * link.size
    if any(cell.more for cell in cells) and not isinstance(sent, FailedSend):
        device = link.bytes_device(accelerated=any(cell.accelerated for cell in cells))
        parts = [
            torch.empty(0, dtype=torch.uint8, device=device) if index == link.rank else _rest(cell, parcel, device)
            for index, (cell, parcel) in enumerate(zip(mine, sent, strict=True))
        ]
        leaving = [torch.empty(0, dtype=torch.uint8, device=device) if part is None else part for part in parts]
        coming = [0 if index == link.rank else cell.rest_nbytes for index, cell in enumerate(cells)]
        buffer = torch.empty(sum(coming), dtype=torch.uint8, device=device)
        sizes = [part.numel() for part in leaving]
        dist.all_to_all_single(buffer, torch.cat(leaving), coming, sizes, group=link.group)
        rests = list(torch.split(buffer, coming))
    own = each[link.rank]
    return [_arrived(cell, rest, own, i == link.rank) for i, (cell, rest) in enumerate(zip(cells, rests, strict=True))]


def send(link: Group, call: str, sent: Outgoing, dst: int, tag: int) -> None:
    """Send a parcel to one rank. Args: dst counts within the group. Raises: its error if it is a failure."""
    _send(link, _to_device(write_envelope(call, sent), link), dst, tag)
    if isinstance(sent, FailedSend):
        raise sent.error
    cell = read_envelope(write_envelope(call, sent), call, link.own)
    device = link.bytes_device(accelerated=sent.accelerated)
    if (rest := _rest(cell, sent, device)) is not None:
        _send(link, rest, dst, tag)


def recv(link: Group, src: int | None, tag: int) -> Received:
    """Receive a parcel from one rank, or from any. Args: src counts within the group."""
    raw = _empty(ENVELOPE_NBYTES, link)
    source = dist.recv(raw, None if src is None else link.ranks[src], group=link.group, tag=tag)
    found = link.ranks.index(source)
    call = f"send to rank {link.own}"
    cell = read_envelope(to_bytes(raw), call, source)
    _raise_failures(link, call, {found: cell}, None)
    rest = None
    if cell.rest_nbytes:
        device = link.bytes_device(accelerated=cell.accelerated)
        rest = _recv(link, cell.rest_nbytes, found, tag, device)
    return _arrived(cell, rest, None, own=False)


def _gather_cells(link: Group, call: str, sent: Outgoing, of: str) -> list[Envelope]:
    raw = _empty(ENVELOPE_NBYTES * link.size, link)
    link.run((call, None), of, _all_gather_single, raw, _to_device(write_envelope(call, sent), link))
    cells = _read_all(link, call, raw)
    _raise_failures(link, call, dict(enumerate(cells)), sent)
    _check_grad_modes(link, call, cells)
    return cells


def _read_all(link: Group, call: str, raw: Tensor) -> list[Envelope]:
    content = to_bytes(raw)
    return [
        read_envelope(content[i * ENVELOPE_NBYTES : (i + 1) * ENVELOPE_NBYTES], call, rank)
        for i, rank in enumerate(link.ranks)
    ]


def _raise_failures(link: Group, call: str, cells: dict[int, Envelope], sent: Outgoing | None) -> None:
    """Raise what a rank has found wrong, its own first. Args: cells are by number within the group."""
    if isinstance(sent, FailedSend):
        raise sent.error
    name = call.encode()[:LONGEST_CALL].decode(errors="replace")
    if any(cell.call != name for cell in cells.values()):
        who: dict[str, list[int]] = {}
        own: dict[int, Envelope | None] = {link.rank: None}
        for index, cell in sorted({**own, **cells}.items()):
            who.setdefault(name if cell is None else cell.call, []).append(link.ranks[index])
        raise RankMismatchError(
            "ranks call different things: "
            + ", ".join(f"{what} on {name_some(ranks)}" for what, ranks in who.items())
            + ": make all call the same, in the same order"
        )
    for index, cell in cells.items():
        if cell.failed:
            said = cell.body.decode(errors="replace")
            raise PeerError(f"{call} was not done, for it failed on rank {link.ranks[index]}, with {said}")


def _check_grad_modes(link: Group, call: str, cells: Sequence[Envelope]) -> None:
    """Refuse gradients that some rank would not hand on. Raises: RankMismatchError."""
    asking = [rank for rank, cell in zip(link.ranks, cells, strict=True) if cell.followed]
    deaf = [rank for rank, cell in zip(link.ranks, cells, strict=True) if not cell.in_grad_mode]
    if asking and deaf:
        raise RankMismatchError(tell_modes(call, asking, deaf))


def tell_modes(call: str, asking: Sequence[int], deaf: Sequence[int]) -> str:
    """Say that gradients are asked for by ranks and others would not hand them on."""
    return (
        f"{call}: tensors of {name_some(asking)} require a gradient and {name_some(deaf)} called it under no_grad(), "
        "so that a backward would wait for ever: call it in the same mode everywhere, or detach() them"
    )


def name_some(ranks: Sequence[int]) -> str:
    """Write ranks.

    >>> name_some([1]), name_some([0, 2])
    ('rank 1', 'ranks 0, 2')
    """
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _kept(sent: Outgoing, *, followed: bool = False) -> Received:
    if isinstance(sent, FailedSend):
        raise sent.error
    return Received(sent.body, tensors=own_copies(sent), followed=sent.followed or followed)


def _arrived(cell: Envelope, rest: Tensor | None, sent: Outgoing | None, own: bool) -> Received:
    """Put together what was in a cell and what came after it."""
    followed = cell.followed
    if own:
        assert sent is not None
        return _kept(sent, followed=followed)
    body, start = cell.body, 0
    if not cell.body_here:
        assert rest is not None
        body, start = to_bytes(rest[: cell.body_nbytes]), aligned(cell.body_nbytes)
    data = None
    if cell.data_nbytes and cell.data_here:
        data = torch.frombuffer(bytearray(cell.data), dtype=torch.uint8)
    elif cell.data_nbytes:
        assert rest is not None
        data = rest[start : start + cell.data_nbytes]
    return Received(body, data, followed=followed)


def _rest(cell: Envelope, parcel: Payload, device: torch.device) -> Tensor | None:
    """Give the bytes of a parcel that come after its cell; those of a single tensor may be its own."""
    if not cell.rest_nbytes:
        return None
    parts = []
    if not cell.body_here:
        parts.append(
            torch.frombuffer(bytearray(parcel.body.ljust(aligned(len(parcel.body)), b"\0")), dtype=torch.uint8)
        )
    if not cell.data_here:
        parts.append(parcel.data(device))
    return parts[0].to(device) if len(parts) == 1 else torch.cat([part.to(device) for part in parts])


def _may_pad(sizes: Sequence[int]) -> bool:
    """Say whether to fill all up to the largest size, for one collective in place of one for each."""
    whole = max(sizes) * len(sizes)
    return whole <= _SMALL or whole <= _WASTE * sum(sizes)


def _padded(rest: Tensor | None, nbytes: int, device: torch.device) -> Tensor:
    if rest is not None and rest.numel() == nbytes:
        return rest
    padded = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    if rest is not None:
        padded[: rest.numel()].copy_(rest[:nbytes])
    return padded


def _send(link: Group, tensor: Tensor, dst: int, tag: int) -> None:
    dist.send(tensor, link.ranks[dst], group=link.group, tag=tag)


def _recv(link: Group, nbytes: int, src: int, tag: int, device: torch.device) -> Tensor:
    tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
    dist.recv(tensor, link.ranks[src], group=link.group, tag=tag)
    return tensor


def _empty(nbytes: int, link: Group) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=link.bytes_device())


def _to_device(content: bytes, link: Group) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(link.bytes_device())


# Torch 2.13 renamed it.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
