"""Observes the ranks for the agent: the activity of each, which ones wait for which, and when to report it.

Reads the ranks' status blocks a few times a second. Asks for a flight recorder only if its rank makes no progress or is
not known to have met its peers, and for stacks only for a report. Never blocks the agent's loop for long: stacks are
collected over several turns. Start reading at `Observer.tick`.
"""

from __future__ import annotations

import linecache
import time
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from unisono.launch.hang.analysis import find_mismatch
from unisono.launch.hang.call_times import part_in_calls
from unisono.launch.hang.hang_report import render_mismatch
from unisono.launch.hang.idle_watch import IdleWatch
from unisono.launch.hang.judge import HangJudge
from unisono.launch.hang.observed_rank import ObservedRank, describe_call
from unisono.launch.hang.situation import Situation
from unisono.launch.hang.situation_reader import SituationReader, poll_stacks, request_stacks
from unisono.launch.hang.stacks import StackRequest, crash_text
from unisono.polling import wait_until

__all__ = ["Observer"]

_TICK_S = 0.25
_COLLECTING_TICK_S = 0.03
_JUDGING_S = 1.0
_LATELY_NS = 1_000_000_000
_GAP_S = 5.0
"""A longer time between two ticks means that this process was stopped, and probably the ranks with it."""


class Observer:
    """Watches the ranks of a job. The agent's loop calls `tick` when `next_deadline_s` has come.

    Args:
        ranks: The number of ranks.
        hang_report_s: Seconds after which ranks that wait in vain are reported; 0 for never.
        hang_abort_s: Seconds after which `abort` is set; None for never.
        stuck_s: Seconds after which `take_stuck` returns ranks for which others wait; None for never.
        job: The name of the job for `unisono stacks`.
        folder: The working directory; paths in reports are relative to it.
        has_flags: True if the job was started with flags, so that reports may name one.
        judges: False to report nothing: there are ranks on other hosts, and `launch.hosts.host_hangs` judges all.
    """

    def __init__(
        self,
        ranks: int,
        *,
        hang_report_s: float,
        hang_abort_s: float | None,
        stuck_s: float | None = None,
        job: str = "",
        folder: str = "",
        has_flags: bool = True,
        judges: bool = True,
    ) -> None:
        self._num_ranks = ranks
        command = f"unisono stacks {job}".rstrip()
        self._folder = folder
        self._judges = judges
        self.judge = HangJudge(
            hang_report_s=hang_report_s,
            hang_abort_s=hang_abort_s,
            stuck_s=stuck_s,
            folder=folder,
            stacks=f"`{command}` shows where all ranks are",
            has_flags=has_flags,
        )
        self._ranks: dict[int, ObservedRank] = {}
        self._deadline_s = 0.0
        self._standing = False
        self._judged_s = 0.0
        self._ticked_s = 0.0
        self._quiet_until_s = 0.0
        self._reader = SituationReader()
        self._requests: dict[int, StackRequest] = {}
        self.idle = IdleWatch(hang_report_s, folder=folder, command=command)
        """Finds ranks that do nothing, and reports them."""
        self._idle: tuple[int, ...] = ()
        """Idle ranks, to be reported once their stacks have been collected."""
        self.abort: str | None = None
        """The reason to end the job, once ranks have waited in vain for `hang_abort_s`; None before."""
        self.report = ""
        """The last report of a hang."""
        self.stuck: tuple[int, ...] = ()
        """The next result of `take_stuck`."""

    def files(self, rank: int) -> tuple[int, int, int]:
        """Create the status block, the file for stacks and the pipe for questions of a rank, in place of earlier ones.

        Returns:
            Numbers for the rank (status block, dump, read end of the pipe), which the caller closes after passing on.
        """
        watched, files = ObservedRank.opened()
        self.adopt(rank, watched)
        return files

    def adopt(self, rank: int, watched: ObservedRank) -> None:
        """Observe another process as a rank, in place of an earlier one."""
        if rank in self._ranks:
            self._ranks.pop(rank).close()
        self._requests.pop(rank, None)
        self._ranks[rank] = watched

    def started(self, rank: int, pid: int) -> None:
        """Record that a rank's process has started."""
        watched = self._ranks[rank]
        watched.pid, watched.exit_code, watched.mark_s = pid, None, time.monotonic()
        self._ticked_s = time.monotonic()

    def ended(self, rank: int, code: int) -> None:
        """Record that a rank has ended. Its status block and its stacks can still be read."""
        if rank in self._ranks:
            self._ranks[rank].exit_code = code
            self._requests.pop(rank, None)

    def resize(self, ranks: int) -> None:
        """Observe another number of ranks; processes with higher numbers are not ranks."""
        self._num_ranks = ranks

    def disregard_past(self, calm_s: float, *, until_ns: int | None = None) -> None:
        """Disregard earlier calls, and how long ranks have waited: the ranks are not those that made them.

        Args:
            calm_s: Seconds in which no rank is reported, if that is longer than usual.
            until_ns: When the ranks went on together, by the monotonic clock. None: now.
        """
        now_s = time.monotonic()
        self._reader.past_ns = time.monotonic_ns() if until_ns is None else until_ns
        self._quiet_until_s = now_s + max(calm_s, self.judge.patience_s)
        self.judge.forget()
        self._requests.clear()
        self._idle = ()
        self.idle.forget()

    def next_deadline_s(self) -> float | None:
        """Return when `tick` is due, by the monotonic clock; None while no rank runs."""
        return self._deadline_s if any(watched.alive for watched in self._members.values()) else None

    def tick(self) -> list[str]:
        """Observe the ranks if `tick` is due, and return the reports to show."""
        now_s = time.monotonic()
        if now_s < self._deadline_s or self.next_deadline_s() is None:
            return []
        if now_s - self._ticked_s > _GAP_S:
            self._quiet_until_s = now_s + self.judge.patience_s
        self._ticked_s = now_s
        self._deadline_s = now_s + _TICK_S
        if self._requests and self._judges:
            return self._collect(now_s)
        if self._requests:
            self._deadline_s = now_s + _COLLECTING_TICK_S
            return []
        self._standing = self._look(now_s)
        if self._judges and self._standing and not self.is_quiet and now_s - self._judged_s >= _JUDGING_S:
            self._judged_s = now_s
            if not self._judge(now_s) and (idle := self.look_for_idle()):
                self._idle = idle
                self.collect(idle)
        return []

    @property
    def is_quiet(self) -> bool:
        """True if no rank is to be reported yet: this process was stopped, or ranks are being replaced."""
        return time.monotonic() < self._quiet_until_s

    def waits_s(self, ranks: Iterable[int]) -> float:
        """Return for how long one of these ranks has been in a call, or an operation of its backend; 0 if none is."""
        if not self._standing:
            return 0.0
        situations = self._reader.read(self._members, time.monotonic(), {}, ranks)
        starts = [call.started_ns for situation in situations for call in situation.calls if call.running]
        starts += [entry.since_ns for situation in situations for entry in situation.pending]
        return max(0.0, (time.monotonic_ns() - min(starts)) / 1e9) if starts else 0.0

    def look_for_idle(self) -> tuple[int, ...]:
        """Return the ranks that run if they have done nothing for long enough, and that is new; otherwise none."""
        return self.idle.look(time.monotonic(), self._members) if self._standing and not self.is_quiet else ()

    def idle_for_s(self) -> float:
        """Return for how long the ranks that run have done nothing, if that is long enough; otherwise 0."""
        return self.idle.for_s(time.monotonic(), self._members)

    def collect(self, ranks: Iterable[int]) -> None:
        """Begin to collect the stacks of these ranks, for `collected`."""
        self._requests = request_stacks(self._ranks, ranks)
        self._deadline_s = time.monotonic() + _COLLECTING_TICK_S

    def collected(self, ranks: Iterable[int]) -> list[Situation] | None:
        """Return what these ranks do, with the stacks that were asked for; None if those are not there yet."""
        if not poll_stacks(self._requests):
            return None
        requests, self._requests = self._requests, {}
        linecache.checkcache()
        return self._reader.read(self._members, time.monotonic(), requests, ranks)

    def snapshot(self, *, wait_s: float = 0.8) -> list[Situation]:
        """Return what every rank does now, with its stacks, for `hang_report.render_stacks`. Takes up to `wait_s`."""
        self._requests.clear()
        for watched in self._members.values():
            if watched.alive:
                watched.ask_recorder(time.monotonic())
        requests = request_stacks(self._ranks, self._members)
        wait_until(lambda: poll_stacks(requests), wait_s)
        linecache.checkcache()
        return self._reader.read(self._members, time.monotonic(), requests)

    def explain(self) -> str | None:
        """Return a description of collectives that did not match; None if all did. Ranks may have ended.

        Calls are counted from the start of a process, so those of replaced ranks cannot be compared.
        """
        if self._reader.past_ns is not None:
            return None
        read = self._reader.read(self._members, time.monotonic(), {})
        situations = [replace(situation, pending=()) for situation in read]
        mismatch = find_mismatch(situations, now_ns=time.monotonic_ns(), settled_ns=-1)
        return None if mismatch is None else render_mismatch(mismatch, ranks=self._num_ranks, folder=self._folder)

    def has_met(self, *, wait_s: float = 0.1) -> bool:
        """Return True if a collective of this generation has completed. Asks running ranks if no block shows one."""
        if any(watched.met or watched.block.met for watched in self._members.values()):
            return True
        asked = [watched for watched in self._members.values() if watched.alive and watched.block.begun]
        for watched in asked:
            watched.ask_recorder(time.monotonic())
        return bool(asked) and wait_until(lambda: any(watched.block.met for watched in asked), wait_s)

    def doing(self, rank: int) -> str:
        """Return the call that a rank is in, or has made last, as words: "in all_reduce at train.py:7"."""
        return self._ranks[rank].doing(self._folder) if rank in self._ranks else ""

    def activity(self, rank: int) -> tuple[str, float | None, float]:
        """Return the call that a rank is in, or has made last, as `doing` does, and how long it has been in calls.

        Returns:
            The call as words, the seconds that it has been in it, None if it is in none, and the part of the last
            second that it has spent in calls; of the time of the latest calls that are recorded if that is less.
        """
        if rank not in self._ranks:
            return "", None, 0.0
        block = self._ranks[rank].block
        times, now_ns = block.times(), time.monotonic_ns()
        running = [each for each in times if each.ended_ns is None]
        found = [block.call_at(each.place) for each in (running or times)[-1:]]
        calls = block.calls() if None in found else [call for call in found if call is not None]
        waits_s = max(0.0, (now_ns - min(each.started_ns for each in running)) / 1e9) if running else None
        part = part_in_calls(times, now_ns=now_ns, window_ns=_LATELY_NS, is_all=bool(times) and times[0].number == 1)
        return describe_call(calls, folder=self._folder), waits_s, part

    def finished_ns(self, rank: int) -> int | None:
        """Return when a rank's program ended without an error; None if it has not. Its process may still run."""
        return self._ranks[rank].block.finished_ns if rank in self._ranks else None

    def left_ns(self, rank: int) -> int | None:
        """Return when a rank left its process groups, by the monotonic clock; None if it has not, or had none."""
        return self._ranks[rank].block.left_ns if rank in self._ranks else None

    def grouped(self, rank: int) -> bool:
        """Return False if a rank is known to have neither made a process group nor begun to."""
        return rank not in self._ranks or self._ranks[rank].grouped

    def in_call(self, rank: int) -> bool:
        """Return False if a rank's latest call of torch.distributed is known to have ended without an error."""
        return rank not in self._ranks or self._ranks[rank].in_call

    def ask_errors(self, ranks: Collection[int], *, wait_s: float = 0.2) -> None:
        """Ask ranks which exceptions they handle, for `failure`, and wait up to `wait_s` for the answers."""
        asked = [self._ranks[rank] for rank in ranks if self._ranks[rank].alive]
        for watched in asked:
            watched.ask_error()
        wait_until(lambda: all(watched.block.read_failure() is not None for watched in asked), wait_s)

    def where(self, rank: int) -> str:
        """Return the current line of a running rank's program, as words: "at train.py:7 in save"; "" if unknown.

        Takes up to half a second.
        """
        if not self._ranks[rank].alive:
            return ""
        self._requests.pop(rank, None)
        requests = request_stacks(self._ranks, [rank])
        wait_until(lambda: poll_stacks(requests), 0.5)
        place = self._reader.read(self._ranks, time.monotonic(), requests, [rank])[0].place
        return "" if place is None else f"at {place.place_in(self._folder)}"

    def failure(self, rank: int) -> dict[str, Any] | None:
        """Return the record that a rank has written of its failure; None if there is none."""
        return self._ranks[rank].block.read_failure() if rank in self._ranks else None

    def crash(self, rank: int) -> str:
        """Return the stacks that a rank, or a child of it, wrote when a signal such as SIGSEGV ended it; "" if none."""
        return crash_text(self._ranks[rank].dump) if rank in self._ranks else ""

    def take_stuck(self) -> tuple[int, ...]:
        """Return ranks for which others have waited for `stuck_s` since their stacks were reported; each only once."""
        stuck, self.stuck = self.stuck, ()
        return stuck

    def close(self) -> None:
        """Close all files."""
        for watched in self._ranks.values():
            watched.close()
        self._ranks.clear()
        self._requests.clear()

    @property
    def _members(self) -> dict[int, ObservedRank]:
        """The ranks whose files exist."""
        return {rank: watched for rank, watched in self._ranks.items() if rank < self._num_ranks}

    def _look(self, now_s: float) -> bool:
        """Read the status blocks' counters and ask flight recorders. Return True if a rank may have to be reported."""
        standing = False
        for watched in self._members.values():
            if not watched.alive:
                continue
            mark = watched.block.mark
            if mark != watched.mark:
                watched.mark, watched.mark_s = mark, now_s
            still_s = now_s - watched.mark_s
            standing |= still_s >= _JUDGING_S
            if not watched.met:
                watched.met = watched.block.met if mark != (0, 0) else False
            # If a rank uses only DDP, nothing but its flight recorder shows that it has met its peers.
            curious = mark[1] > 0 and not watched.met and now_s - watched.asked_s >= _JUDGING_S
            patience_s = self.judge.patience_s
            idle = patience_s > 0 and mark[0] > 0 and still_s >= patience_s / 3
            if curious or (idle and now_s - watched.asked_s >= max(_COLLECTING_TICK_S, patience_s / 6)):
                watched.ask_recorder(now_s)
        return standing and self.judge.patience_s > 0

    def _judge(self, now_s: float) -> bool:
        """Judge the ranks, and return True if some wait in vain."""
        decision = self.judge.look(self._reader.read(self._members, now_s, {}), now_s)
        self.abort = decision.abort or self.abort
        self.stuck = decision.kill or self.stuck
        if decision.show:
            self.collect(decision.show)
        return decision.found

    def _collect(self, now_s: float) -> list[str]:
        """Continue to collect stacks; once all are there, return the report."""
        if not poll_stacks(self._requests):
            self._deadline_s = now_s + _COLLECTING_TICK_S
            return []
        requests, self._requests = self._requests, {}
        linecache.checkcache()
        situations = self._reader.read(self._members, now_s, requests)
        if self._idle:
            idle, self._idle = self._idle, ()
            if any(situations[rank].ended for rank in idle):
                return []
            text = self.idle.report(situations, now_s - self.idle.since_s)
            return [f"unisono: {text}"] if text else []
        # Stacks show the places. A hang that has resolved in the meantime is not reported.
        if not (text := self.judge.explain(situations, now_s)):
            return []
        self.report = text
        return [f"unisono: {text}"]
