"""Signs of a lost peer in the errors of process groups. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.errors import PeerError

__all__ = ["LOST_PEER", "is_peer_lost"]

LOST_PEER = (
    # gloo
    "connectfullmesh failed",
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "application timeout caused pair closure",
    "socket closed",
    "remote peer closed the connection",
    # shm
    "the group was left by rank",
    "the process of rank",
    "the processes of rank",
    # the store
    "connection was likely closed",
    "socket has failed to connect to",
    "client failed to connect",
    "timed out (try=",
    # NCCL
    "remote process exit",
    "remote process exited",
    "ncclremoteerror",
    "ncclsystemerror",
    "communicator was aborted",
    "communicator encountered error set by processgroupnccl",
    "to avoid data inconsistency, we are taking the entire process down",
)
"""Words in the messages of torch, in lower case."""

_TORCH_TYPES = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError")


def is_peer_lost(error: BaseException) -> bool:
    """Return True if another rank's end may be the cause of an error that a collective has raised.

    >>> is_peer_lost(RuntimeError("[/gloo/transport/tcp/pair.cc:540] Connection closed by peer [127.0.0.1]:45678"))
    True
    >>> is_peer_lost(RuntimeError("NCCL communicator was aborted on rank 1."))
    True
    >>> is_peer_lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    return any(
        isinstance(each, PeerError)
        or (type(each).__name__ in _TORCH_TYPES and any(word in str(each).lower() for word in LOST_PEER))
        for each in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
