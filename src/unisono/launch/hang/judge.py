"""Decides what is done about ranks that wait in vain: a report, the end of the job, or the end of a stuck rank.

It is given what all ranks do, once a second or so: those of one machine by `launch.hang.observer`, those of several by
`launch.hosts.host_hangs`. Start reading at `HangJudge.look`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unisono.launch.hang.analysis import Finding, find_hang
from unisono.launch.hang.hang_report import render_finding, summarize
from unisono.launch.hang.situation import Situation
from unisono.text import name_ranks

__all__ = ["HangDecision", "HangJudge"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HangDecision:
    """The actions to take. At most one of `show`, `kill` and `abort` is set."""

    found: bool = False
    """True if ranks wait in vain."""
    show: tuple[int, ...] = ()
    """A report is due: the ranks whose stacks it may need, the most important first."""
    kill: tuple[int, ...] = ()
    """Ranks that have kept others waiting for too long."""
    abort: str | None = None
    """Why the job is to be ended."""


class HangJudge:
    """Decides about ranks that wait in vain.

    Args:
        hang_report_s: Seconds after which ranks that wait in vain are reported; 0 for never.
        hang_abort_s: Seconds after which the job is ended; None for never.
        stuck_s: Seconds after which ranks for which others wait are killed; None for never.
        folder: The working directory; paths in reports are relative to it.
        stacks: What the report says of where stacks can be seen, as a sentence without its end.
        has_flags: True if the job was started with flags, so that reports may name one.
    """

    def __init__(
        self,
        *,
        hang_report_s: float,
        hang_abort_s: float | None,
        stuck_s: float | None,
        folder: str,
        stacks: str,
        has_flags: bool,
    ) -> None:
        self.report_s, self.abort_s, self.stuck_s = hang_report_s, hang_abort_s, stuck_s
        self._folder, self._stacks, self._has_flags = folder, stacks, has_flags
        self._next_age_ns: dict[tuple[object, ...], float] = {}
        self._reported_s = -1e9

    @property
    def patience_s(self) -> float:
        """How long ranks may wait before that is looked at; 0 if it never is."""
        return min([seconds for seconds in (self.report_s, self.abort_s, self.stuck_s) if seconds], default=0.0)

    def look(self, situations: Sequence[Situation], now_s: float) -> HangDecision:
        """Return what is to be done now. Nothing is done about a hang before it has been reported."""
        finding = self._find(situations)
        if finding is None:
            return HangDecision()
        age_ns = time.monotonic_ns() - finding.since_ns
        key = finding.key()
        soon = now_s - self._reported_s < self.patience_s / 2
        told = key in self._next_age_ns
        if told and self.abort_s is not None and age_ns >= self.abort_s * 1e9:
            cause = summarize(finding, ranks=len(situations), now_ns=time.monotonic_ns())
            return HangDecision(found=True, abort=f"{cause}, and --hang-abort is {self.abort_s:g} s")
        if told and self.stuck_s is not None and finding.stuck and age_ns >= self.stuck_s * 1e9:
            self._next_age_ns.clear()
            return HangDecision(found=True, kill=finding.stuck)
        if age_ns >= self._next_age_ns.get(key, 0.0) and not soon:
            self._next_age_ns[key] = 2 * max(age_ns, self.patience_s * 1e9)
            return HangDecision(found=True, show=tuple(dict.fromkeys((*finding.stuck, *finding.involved))))
        return HangDecision(found=True)

    def explain(
        self,
        situations: Sequence[Situation],
        now_s: float,
        *,
        places: Callable[[Sequence[int]], str] = lambda ranks: "",
    ) -> str:
        """Return the report on ranks that wait in vain, with the stacks of `situations`; "" if they no longer do.

        Args:
            places: Returns a line on the hosts of the ranks at fault; "" for none.
        """
        finding = self._find(situations)
        if finding is None:
            return ""
        self._reported_s = now_s
        lines = [places(finding.stuck or finding.involved), self._remedy(finding)]
        return render_finding(
            finding,
            situations,
            now_ns=time.monotonic_ns(),
            folder=self._folder,
            remedy="\n".join(filter(None, lines)),
        )

    def forget(self) -> None:
        """Disregard what has been found: the ranks are not those that waited."""
        self._next_age_ns.clear()

    def _find(self, situations: Sequence[Situation]) -> Finding | None:
        return find_hang(situations, now_ns=time.monotonic_ns(), patience_ns=int(self.patience_s * 1e9))

    def _remedy(self, finding: Finding) -> str:
        if self.abort_s is not None:
            left_s = max(0.0, self.abort_s - (time.monotonic_ns() - finding.since_ns) / 1e9)
            return f"The job is ended in {left_s:.0f} s if nothing changes (--hang-abort)."
        if self.stuck_s is not None and finding.stuck:
            left_s = max(0.0, self.stuck_s - (time.monotonic_ns() - finding.since_ns) / 1e9)
            return f"{name_ranks(finding.stuck)} will be killed in {left_s:.0f} s if nothing changes (--stuck-timeout)."
        flag = "; started with --hang-abort SECONDS, it ends by itself" if self._has_flags else ""
        return f"The job goes on. {self._stacks}; Ctrl-C ends it{flag}."
