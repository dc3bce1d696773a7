"""Waits for the endpoint's name: that of a machine or pod which starts may be known only some time later.

Does not import torch. Start reading at `await_addresses`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from unisono.errors import LaunchError
from unisono.launch.hosts.addresses import HostAddresses, NameUnknownError, find_addresses
from unisono.launch.hosts.host_settings import HostSettings

__all__ = ["await_addresses"]

_PAUSE_S = 1.0


def await_addresses(
    settings: HostSettings,
    *,
    say: Callable[[str], None],
    notice: Callable[[str], None],
    pause: Callable[[float], bool],
) -> HostAddresses | None:
    """Find the addresses of this host, once the name of the endpoint can be resolved.

    It is tried for as long as hosts wait for each other (`join_timeout`). A name that can never be one is refused at
    once, and so is what follows from a wrong `local_addr`.

    Args:
        say: Called once, with what is waited for.
        notice: Called with the same later, and for how long it still is.
        pause: Waits for so many seconds; returns False to give up.

    Returns:
        The addresses; None if `pause` has returned False.

    Raises:
        LaunchError: The name is still unknown at the end, or the addresses cannot be found.
    """
    began_s, is_first = time.monotonic(), True
    while True:
        try:
            return find_addresses(settings)
        except NameUnknownError as error:
            waited_s = time.monotonic() - began_s
            if waited_s >= settings.join_timeout_s:
                raise LaunchError(
                    f"--rdzv-endpoint {settings.endpoint}: the name {settings.endpoint_host} could not be resolved for "
                    f"{settings.join_timeout_s:g} s ({error.reason}); give an address, or a name that all hosts know"
                ) from error
            left_s = settings.join_timeout_s - waited_s
            told = f"the name {settings.endpoint_host} is not known yet ({error.reason}); trying for {left_s:.0f} s"
            if is_first:
                say(told)
            else:
                notice(f"unisono: {told} ...")
            is_first = False
        if not pause(min(_PAUSE_S, left_s)):
            return None
