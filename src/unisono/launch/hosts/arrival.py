"""A host comes to its job: it meets the others there before it begins, or joins them later. Start at `arrive`."""

from __future__ import annotations

import time
from collections.abc import Callable

from unisono.launch.hosts.addresses import HostAddresses
from unisono.launch.hosts.endpoint import HostRefusedError
from unisono.launch.hosts.host_differences import find_difference
from unisono.launch.hosts.host_settings import HostPlace, HostSettings
from unisono.launch.hosts.late_host import Admission, JobRunsError, knock
from unisono.launch.hosts.meeting import Meeting, meet
from unisono.launch.hosts.own_store import OwnStore
from unisono.launch.hosts.term import STORE_ERRORS

__all__ = ["arrive"]

_PATIENCE_S = 10.0
"""How long a host asks again where a running job has no room: its launcher may be the one whose end ends that job."""


def arrive(
    settings: HostSettings,
    addresses: HostAddresses,
    own: OwnStore,
    *,
    role: str,
    notice: Callable[[str], None],
    warn: Callable[[str], None],
) -> tuple[Meeting, Admission | None]:
    """Wait for the other hosts, or join a job of this name that runs; return who is there, and what the job says.

    Args:
        own: The store of this host.
        role: ROLE_NAME of its ranks.
        notice: Called with a line about what is waited for.
        warn: See `meet`.

    Raises:
        HostRefusedError: The endpoint cannot be reached or used, too few hosts come in time, the job has no room, or
            the hosts cannot form one.
    """
    try:
        meeting, admission = _meet_or_join(settings, addresses, own, role=role, notice=notice, warn=warn)
    except STORE_ERRORS as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise HostRefusedError(f"hosts could not meet at {settings.endpoint}: {reason}") from error
    if admission is None and (problem := find_difference(meeting.hellos)) is not None:
        meeting.let_all_read()  # otherwise the end of this process could hide the reason from others
        raise HostRefusedError(problem)
    meeting.servers.append(own)
    return meeting, admission


def _meet_or_join(
    settings: HostSettings,
    addresses: HostAddresses,
    own: OwnStore,
    *,
    role: str,
    notice: Callable[[str], None],
    warn: Callable[[str], None],
) -> tuple[Meeting, Admission | None]:
    began_s = time.monotonic()
    end_s, knocked_s = began_s + settings.join_timeout_s, None
    while True:
        try:
            ranks = own.hello["ranks"]
            meeting = meet(
                settings, addresses, ranks=ranks, role=role, hello=own.hello, notice=notice, warn=warn, may_be_late=True
            )
        except JobRunsError as found:
            answer = knock(found.leader, own.hello, settings, still_s=lambda: end_s - time.monotonic())
            if isinstance(answer, Admission):
                return _joined(answer, own, found), answer
            notice(f"unisono: {settings.endpoint}: {answer.reason}; trying again ...")
            now_s = time.monotonic()
            knocked_s = knocked_s or now_s
            if now_s > end_s or (answer.is_full and now_s > knocked_s + _PATIENCE_S):
                raise HostRefusedError(
                    f"the job {settings.run_id!r} at {settings.endpoint} runs, and this host cannot join it: "
                    f"{answer.reason}; try again later, or give another --rdzv-id for another job"
                ) from found
        else:
            return meeting, None


def _joined(admission: Admission, own: OwnStore, found: JobRunsError) -> Meeting:
    # What follows from the ranks of this host is decided later.
    host = admission.host
    place = HostPlace(
        host=host,
        hosts=len(admission.members) + 1,
        first_rank=0,
        world_size=0,
        first_role_rank=0,
        role_world_size=0,
        master_addr="",
        master_port=0,
        identity=f"{host} {own.hello['nonce']}",
    )
    return Meeting(place=place, store=None, handler=None, hellos=admission.hellos, servers=found.servers)
