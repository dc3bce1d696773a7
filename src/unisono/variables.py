"""Names of environment variables that both the launcher and what runs in ranks know. Without torch."""

from __future__ import annotations

__all__ = ["CHECK_VARIABLE", "CPU_BACKEND_VARIABLE", "EVENTS_VARIABLE"]

CHECK_VARIABLE = "UNISONO_CHECK"
"""Asks `unisono.comm` to compare calls between ranks: 1. `unisono run --check` sets it."""

CPU_BACKEND_VARIABLE = "UNISONO_CPU_BACKEND"
"""Names the backend that "auto" takes for ranks without GPUs: "gloo" or "shm". `unisono run --cpu-backend` sets it."""

EVENTS_VARIABLE = "UNISONO_EVENTS_FD"
"""Holds the number of the open pipe to which rank 0 writes progress events, one JSON object per line."""
