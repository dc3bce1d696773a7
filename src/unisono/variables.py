"""Names of the environment variables that both the launcher and its ranks use. Does not import torch."""

from __future__ import annotations

__all__ = [
    "CHECK_VARIABLE",
    "CPU_BACKEND_VARIABLE",
    "DRILL_VARIABLE",
    "EVENTS_VARIABLE",
    "HOST_VARIABLE",
    "SERVERS_VARIABLE",
    "SERVER_PAGE_VARIABLE",
    "SERVER_VARIABLE",
]

CHECK_VARIABLE = "UNISONO_CHECK"
"""If 1, `unisono.comm` compares calls between ranks. `unisono run --check` sets it."""

CPU_BACKEND_VARIABLE = "UNISONO_CPU_BACKEND"
"""The backend that "auto" selects for ranks without GPUs: "gloo" or "shm". `unisono run --cpu-backend` sets it."""

DRILL_VARIABLE = "UNISONO_DRILL"
"""The folder in which a Trainer keeps all that it would keep elsewhere, and tells what `unisono drill` compares."""

EVENTS_VARIABLE = "UNISONO_EVENTS_FD"
"""The file descriptor of the pipe to which rank 0 writes progress events, one JSON object per line."""

HOST_VARIABLE = "UNISONO_HOST"
"""A name of the host of a rank in a job on several hosts, set by `unisono run`: ranks with different names share no
memory, even if the systems look alike, as copies of a virtual machine do."""

SERVERS_VARIABLE = "UNISONO_SERVERS"
"""The number of the job's server processes for embedding tables. `unisono run --servers` sets it."""

SERVER_PAGE_VARIABLE = "UNISONO_SERVER_PAGE_FD"
"""The file descriptor of the memory by which ranks and servers find each other (`unisono.server_page`)."""

SERVER_VARIABLE = "UNISONO_SERVER"
"""The number of a server process, in that process alone."""
