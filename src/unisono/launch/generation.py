"""One generation of ranks: the processes from one start to their common end, and the facts known about each.

A job has one generation, and one more after each restart. The agent's loop calls; only `look_at_leavers` waits.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.launch.environment import rank_environment
from unisono.launch.failure.root_cause import RankFailure, RootCause, find_root_cause
from unisono.launch.hang.observed_rank import ObservedRank
from unisono.launch.hang.observer import Observer
from unisono.launch.launch_job import LaunchJob
from unisono.launch.linux import is_dying
from unisono.launch.output.relay import Relay
from unisono.launch.recovery_page import RecoveryPage
from unisono.launch.standard_input import duplicate_stdin
from unisono.server_page import ServerPage

if TYPE_CHECKING:
    from unisono.launch.hosts.host_settings import HostPlace

__all__ = ["Generation"]

_ASKED = (-signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM)
"""Codes of processes that were asked to end, also of those whose program handles SIGTERM."""


class Generation:
    """The ranks of one attempt.

    Args:
        attempt: The number of restarts before it.
        relay: Receives the output of its ranks.
        secret: Known to all ranks, also to those of other machines; None: a new one.
    """

    def __init__(self, job: LaunchJob, *, attempt: int, relay: Relay, secret: bytes | None = None) -> None:
        self._job, self._relay, self.attempt = job, relay, attempt
        first = range(job.first_rank, job.first_rank + job.ranks)
        self._local = {rank: number for number, rank in enumerate((job.place and job.place.ranks) or first)}
        self.host = job.place
        """The place of this machine among several; None if it is the only one."""
        self.size = job.world_size
        """The number of ranks, on all machines. Processes with higher numbers are not ranks yet, or no longer."""
        self.observer = Observer(
            self.size,
            hang_report_s=job.hang_report_s,
            hang_abort_s=job.hang_abort_s,
            stuck_s=job.stuck_timeout_s,
            job=str(job.run_id),
            folder=str(Path.cwd()),
            has_flags=job.has_flags,
            judges=job.place is None,
        )
        self._expected: dict[int, int] = {}  # local numbers once there is another number of ranks on several machines
        self._expected_size = 0
        self._wanted = self._asked = 0
        self.running: set[int] = set()
        """Ranks that have been started and have not ended."""
        self.leaving: set[int] = set()
        """Ranks whose process here still runs, though they are another machine's now, or were meanwhile."""
        self.places: dict[int, str] = {}
        """By rank, where those were that had left their process groups when others failed."""
        self._secret = secrets.token_bytes(32) if secret is None else secret
        self.pages: dict[int, RecoveryPage] = {}
        """By rank, what its present or last process tells about the replacement of ranks."""
        self.servers = job.servers
        """The number of servers of embedding tables."""
        self.server_page = ServerPage.create() if job.servers else None
        """By what ranks and these servers find each other; None without servers."""
        self.overdue: set[int] = set()
        """Ranks that were killed because they did not end after they had reported their failure."""
        self.is_closed = False
        """True once all ranks have ended and what was known about them has been used."""
        self._pids: dict[int, int] = {}
        self._failures: dict[int, RankFailure] = {}
        self._replaced: dict[int, RankFailure] = {}  # of processes that have been replaced since all went on
        self._finished: set[int] = set()
        self._ended_ns: int | None = None

    def open(self, rank: int) -> dict[str, int]:
        """Open the files of a new process of a rank, and return them by name. The caller sends and closes them."""
        page, dump, ask = self.observer.files(rank)
        if rank in self.pages:
            self.pages[rank].close()
        self.pages[rank] = RecoveryPage(page)
        self.pages[rank].share(self._secret)
        self.pages[rank].want(self._wanted)
        self.pages[rank].ask(self._asked)
        stdout, stderr, *events = self._relay.open(rank, attempt=self.attempt)
        self.running.add(rank)
        files = {"stdout": stdout, "stderr": stderr, "page": page, "dump": dump, "ask": ask, **self._page_file()}
        if self._local.get(rank, rank) == self._job.stdin and (file := duplicate_stdin()) is not None:
            files["stdin"] = file
        return files | ({"events": events[0]} if events else {})

    @property
    def ranks(self) -> list[int]:
        """The ranks of this machine."""
        return sorted(self._local)

    def local_rank(self, rank: int) -> int:
        """Return the number of a rank among those of this machine."""
        return self._local.get(rank, self._expected.get(rank, rank))

    def expect(self, ranks: Collection[int], *, size: int) -> None:
        """Note which ranks this machine is to have once there are `size` on all; none if that does not change.

        Processes of those that it does not have yet are started as ranks of that time.
        """
        self._expected, self._expected_size = self._numbers(ranks), size

    def expected_here(self, rank: int) -> int:
        """Return how many ranks this machine is to have, if this one will be among them and is not yet; else 0."""
        return len(self._expected) if rank in self._expected and rank not in self._local else 0

    def _numbers(self, ranks: Collection[int]) -> dict[int, int]:
        """Return local numbers for ranks: those that they have, or are expected to have; others get free ones."""
        known = {**self._expected, **self._local}
        numbers = {rank: known[rank] for rank in sorted(ranks) if rank in known}
        free = (number for number in range(len(ranks)) if number not in set(numbers.values()))
        return numbers | dict(zip(sorted(set(ranks) - numbers.keys()), free, strict=False))

    def place(self, ranks: Collection[int]) -> None:
        """Note which ranks this machine has from now on; further ones get the lowest local numbers that are free.

        Processes of ranks that are another machine's now are `leaving`.
        """
        for rank in self._local.keys() - set(ranks):
            self._failures.pop(rank, None)
            if rank in self.running:
                self.leaving.add(rank)
        self._local = self._numbers(ranks)

    def want(self, size: int, *, asks: bool = True) -> None:
        """Tell all ranks, also those that come later, how many there are to be; 0: no change is wanted.

        Args:
            asks: False to ask no rank yet: those of other machines have not been told.
        """
        # Ranks come to the end of a step together as soon as one of them is asked, and wait there as long as its own
        # page says that a change is wanted. So what is wanted is in all pages before, and as long as, any is asked.
        self._wanted, self._asked = size, size if asks else 0
        tell = [(RecoveryPage.want, size), (RecoveryPage.ask, self._asked)]
        for each, value in tell if size else reversed(tell):
            for page in self.pages.values():
                each(page, value)

    def resize(self, size: int) -> None:
        """Note that there is another number of ranks, whose processes have been started."""
        self.size = size
        if self.host is None:
            self._local = {rank: rank for rank in range(size)}
        self.observer.resize(size)

    def open_spare(self) -> tuple[ObservedRank, RecoveryPage, dict[str, int]]:
        """Open the files of a process that has no rank yet; return both ends: what is kept here, and files by name."""
        watched, (page, dump, ask) = ObservedRank.opened()
        own = RecoveryPage(page)
        own.share(self._secret)
        own.mark_new()
        return watched, own, {"page": page, "dump": dump, "ask": ask, **self._page_file()}

    def adopt(self, rank: int, watched: ObservedRank, page: RecoveryPage, pipes: Sequence[int]) -> None:
        """Let a process that was opened by `open_spare` be the process of a rank.

        Args:
            pipes: The ends to read from of its pipes: stdout, stderr, and events for rank 0.
        """
        self.observer.adopt(rank, watched)
        if rank in self.pages:  # otherwise its processes so far were on another machine
            self.pages[rank].close()
        self.pages[rank] = page
        page.want(self._wanted)
        page.ask(self._asked)
        self._relay.adopt(rank, pipes, attempt=self.attempt)
        self.running.add(rank)
        if watched.pid:
            self.started(rank, watched.pid)

    def environment(self, rank: int | None, *, ranks: int, port: int, visible_gpus: str | None) -> dict[str, str]:
        """Return the environment variables of a rank.

        Args:
            rank: None for a process that has no rank yet: its variables name a rank that does not exist.
            ranks: The number of ranks of this machine.
            port: The port of the job's store.
            visible_gpus: CUDA_VISIBLE_DEVICES of the launcher, None if it is not set.
        """
        job, folder = self._job, None
        if rank is not None:
            folder = self._relay.rank_folder(rank, attempt=self.attempt)
        return rank_environment(
            ranks if rank is None else self.local_rank(rank),
            ranks=ranks,
            place=self._place_of(rank, ranks=ranks),
            port=port,
            run_id=job.run_id,
            role=job.role,
            restarts=self.attempt,
            max_restarts=job.max_restarts,
            virtual_local_rank=job.virtual_local_rank,
            visible_gpus=visible_gpus,
            signals=job.signals,
            servers=job.servers,
            error_file=None if folder is None else str(folder / "error.json"),
        )

    def _place_of(self, rank: int | None, *, ranks: int) -> HostPlace | None:
        """Return the place of this machine from which that of a rank follows by adding its local number."""
        if self.host is None:
            return None
        if rank is None:  # it has the local number `ranks`, and is to get numbers that no rank has
            first, first_of_role = self.host.world_size - ranks, self.host.role_world_size - ranks
            return replace(self.host, first_rank=first, first_role_rank=first_of_role)
        first, host = rank - self.local_rank(rank), self.host
        if self.expected_here(rank):
            host = replace(host, world_size=self._expected_size, role_world_size=self._expected_size)
        return replace(host, first_rank=first, first_role_rank=self.host.first_role_rank + first - self.host.first_rank)

    def started(self, rank: int, pid: int) -> None:
        """Note the process of a rank."""
        self._pids[rank] = pid
        self.observer.started(rank, pid)

    def failing(self, rank: int, code: int, time_ns: int) -> None:
        """Note that a rank has reported its failure; its process still runs."""
        if rank not in self._local or rank in self.leaving:
            return
        if (known := self._failures.get(rank)) is not None:  # it was about to end, and was not asked to
            time_ns = min(time_ns, known.time_ns)
        self._failures[rank] = self._describe(rank, code=code, time_ns=time_ns, reported=True)

    def ended(self, rank: int, code: int, time_ns: int) -> None:
        """Note that the process of a rank has ended."""
        self.running.discard(rank)
        self.observer.ended(rank, code)
        if rank in self.leaving:
            self.leaving.discard(rank)
            code = -signal.SIGKILL  # if the rank has come back, this was not its process any more
        if rank not in self._local:
            self._pids.pop(rank, None)
            return
        told = self._failures.pop(rank, None)
        if told is not None and self._ended_ns is not None and code in (-signal.SIGTERM, -signal.SIGKILL):
            code = told.code  # it was about to end and took too long
        elif told is not None and (code == 0 or rank in self.overdue):
            code = told.code  # a hook or an exit function of the program has chosen 0, or it was killed
        elif code in _ASKED and self._has_finished(rank):
            code = 0  # only its process was still there
        if code != 0:
            time_ns = time_ns if told is None else told.time_ns
            self._failures[rank] = self._describe(rank, code=code, time_ns=time_ns, reported=told is not None)
        elif self._ended_ns is None:
            # Also just after peers have failed: they fail because it is gone.
            self._finished.add(rank)

    def replaced(self, rank: int) -> int:
        """Note that another process is about to take the place of one that has failed; return the id of the old one.

        Its failure counts among those that `judge` compares until `forget_replaced`.
        """
        self._replaced.setdefault(rank, self._failures.pop(rank))
        self.places.pop(rank, None)
        self.overdue.discard(rank)
        return self._pids.pop(rank)

    def forget_replaced(self) -> None:
        """Note that all ranks go on: the failures of processes that have been replaced do not matter any more."""
        self._replaced.clear()

    def blame_again(self, rank: int) -> None:
        """Let `judge` use the latest failure of a rank, not that of a process that it has replaced."""
        self._replaced.pop(rank, None)

    def close(self) -> None:
        """Close all files. The ranks have ended."""
        self.is_closed = True
        self.observer.close()
        for page in self.pages.values():
            page.close()
        self.pages.clear()
        if self.server_page is not None:
            self.server_page.close()
            self.server_page = None

    def ends(self, *, failed: bool) -> None:
        """Note that the launcher begins to end the ranks: from now on they fail because of that.

        Args:
            failed: True if it does so because one has failed.
        """
        if self._ended_ns is None:
            self._ended_ns = time.monotonic_ns()
            for page in self.pages.values():
                page.end_job(failed=failed)

    def look_at_leavers(self) -> None:
        """Examine ranks that have left their process groups and still run: one may be about to fail.

        A rank that cleans up after an exception reports it only when the clean-up is over. A rank that is handling an
        exception counts as failing from now on. Takes up to 0.2 s, and half a second for each such rank.
        """
        left = [rank for rank in self.running - self.failed if self.observer.left_ns(rank) is not None]
        self.observer.ask_errors(left)
        for rank in left:
            if (left_ns := self.observer.left_ns(rank)) is None:  # in a new group by now
                continue
            account = self.observer.failure(rank)
            if account is not None and account.get("handled"):
                self._failures[rank] = self._describe(rank, code=1, time_ns=left_ns, reported=True)
            self.places[rank] = self.observer.where(rank)

    def describe_ranks(self) -> list[dict[str, Any]]:
        """Return each rank that runs: its process, and what it tells about the replacement of ranks."""
        return [
            {"rank": rank, "pid": self._pids[rank], "armed": page.armed, "refusal": page.refusal}
            for rank, page in sorted(self.pages.items())
            if rank in self.running and rank in self._pids
        ]

    @property
    def failed(self) -> set[int]:
        """Ranks that have failed or reported that they fail."""
        return set(self._failures)

    @property
    def failures(self) -> list[RankFailure]:
        """The failures of these ranks."""
        return list(self._failures.values())

    @property
    def finished(self) -> set[int]:
        """Ranks whose program has ended without an error. Their processes may still run."""
        # An interpreter takes some time to end, and peers notice before it has ended.
        ended = {rank for rank in self._pids.keys() - self.failed if self._has_finished(rank)}
        return {rank for rank in self._finished | ended if rank in self._local}

    @property
    def dying(self) -> set[int]:
        """Ranks that the kernel is ending. Others have lost their connections by then, up to seconds before the end."""
        return {rank for rank in self.running - self.failed if is_dying(self._pids.get(rank, 0))}

    def judge(self) -> RootCause:
        """Find the cause among the failures so far. There must be at least one."""
        # What happened first to a rank that was replaced may have led to all that followed.
        failures = self._failures | self._replaced
        finished = self.finished - failures.keys()
        first_ns = min(failure.time_ns for failure in failures.values())
        left = {rank for rank in self.places if rank not in failures and self._left_before(rank, first_ns)}
        left |= {failure.rank for failure in failures.values() if self._was_ended_after_leaving(failure, first_ns)}
        return find_root_cause(
            failures.values(),
            finished=finished,
            left=left - finished,
            running=self.running - failures.keys() - finished,
            ended_ns=self._ended_ns,
        )

    def _page_file(self) -> dict[str, int]:
        return {} if self.server_page is None else {"servers": os.dup(self.server_page.fd)}

    def _left_before(self, rank: int, time_ns: int) -> bool:
        left_ns = self.observer.left_ns(rank)
        return left_ns is not None and left_ns < time_ns

    def _was_ended_after_leaving(self, failure: RankFailure, time_ns: int) -> bool:
        """Return True if the launcher ended a rank that had left its process groups before that time."""
        by_launcher = self._ended_ns is not None and failure.time_ns >= self._ended_ns and failure.code < 0
        return by_launcher and failure.rank in self.places and self._left_before(failure.rank, time_ns)

    def _has_finished(self, rank: int) -> bool:
        """Return True if the program of a rank finished before the launcher began to end ranks."""
        finished_ns = self.observer.finished_ns(rank)
        return finished_ns is not None and (self._ended_ns is None or finished_ns < self._ended_ns)

    def _describe(self, rank: int, *, code: int, time_ns: int, reported: bool) -> RankFailure:
        return RankFailure(
            rank=rank,
            code=code,
            time_ns=time_ns,
            reported=reported,
            pid=self._pids.get(rank),
            account=self.observer.failure(rank),
            crash_stack=self.observer.crash(rank) if code < 0 else "",
            tail=tuple(self._relay.tail(rank)),
            grouped=self.observer.grouped(rank),
            in_call=self.observer.in_call(rank),
            doing=self.observer.doing(rank),
        )
