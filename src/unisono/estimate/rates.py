"""The rates of this machine, measured in half a second: for the times of copies and messages."""

from __future__ import annotations

import socket
import statistics
import threading
import time

import torch

__all__ = ["flop_rate", "link_rate", "memory_rate"]

_MOVED_NBYTES = 64 << 20
_SENT_NBYTES = 32 << 20
_SIDE = 1024
_REPEATS = 3


def memory_rate() -> float:
    """Return how many bytes of memory a thread reads and writes per second, in a sum of two large vectors."""
    left, right = torch.zeros(_MOVED_NBYTES // 4), torch.zeros(_MOVED_NBYTES // 4)
    left.add_(right)
    times = []
    for _ in range(_REPEATS):
        since_s = time.perf_counter()
        left.add_(right)
        times.append(time.perf_counter() - since_s)
    return 3 * _MOVED_NBYTES / statistics.median(times)


def flop_rate() -> float:
    """Return how many floating-point operations per second a product of large matrices does, in float32."""
    left, right = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE)
    left @ right
    times = []
    for _ in range(_REPEATS):
        since_s = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - since_s)
    return 2 * _SIDE**3 / statistics.median(times)


def link_rate() -> float:
    """Return how many bytes per second one process of this host sends to another one over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    data, into = bytes(_SENT_NBYTES), bytearray(1 << 20)
    with sender, receiver:
        thread = threading.Thread(target=sender.sendall, args=(data,))
        since_s = time.perf_counter()
        thread.start()
        left = _SENT_NBYTES
        while left:
            left -= receiver.recv_into(into)
        elapsed_s = time.perf_counter() - since_s
        thread.join()
    return _SENT_NBYTES / elapsed_s
