"""What a fault is: a script that fails, and what the report must say.

In a script, `bad` is true in the rank that is at fault, `wait()` does what the others do meanwhile: a collective that
the bad one does not enter. The line at fault is marked `# here`.
"""

import re
import textwrap
from dataclasses import dataclass

PROLOGUE = """\
import os, signal, sys, threading, time
import torch, torch.distributed as dist
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
bad = rank == size - 1
dist.init_process_group("gloo")
def wait():
    dist.all_reduce(torch.ones(1))
wait()
"""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One way to fail. In `first` and `details`, {last}, {others}, {all} and {here} stand for ranks and the place."""

    name: str
    source: str
    first: str
    """How the first line of the report begins, after "unisono: "."""
    details: tuple[str, ...] = ()
    """What else must be told."""
    codes: tuple[int, ...] = (1,)
    """Exit codes of the launcher: one, unless chance decides how the fault shows."""
    options: tuple[str, ...] = ()
    prologue: bool = True
    least_ranks: int = 1
    ranks: tuple[int, ...] = (2,)
    """Numbers of ranks in the short suite. The long one has all faults, at several."""
    files: tuple[tuple[str, str], ...] = ()
    """Other files, by name."""
    target: tuple[str, ...] = ("script.py",)
    quiet: bool = True
    """Whether nothing may be on stderr but what the launcher says."""
    one_line: bool = False
    """Whether nothing is started, and one line says why."""

    def script(self) -> str:
        return PROLOGUE * self.prologue + textwrap.dedent(self.source).lstrip("\n")

    def pattern(self, text: str, ranks: int) -> str:
        """Give a regular expression for a text of the report, by names of ranks and the place at fault."""
        last = ranks - 1
        words = {
            "last": f"rank {last}",
            "others": {1: "rank 0", 2: "ranks 0(-| and )1"}.get(last, f"ranks 0-{last - 1}"),
            # The first that fails may be so early that the launcher ends some before they fail themselves.
            "all": "rank 0" if ranks == 1 else f"(all {ranks} ranks|ranks? [0-9, and-]+)",
            "some": "ranks? [0-9, and-]+",
            "have": "has" if last == 1 else "have",
            "call": "calls" if last == 1 else "call",
            "here": re.escape(self.place()),
        }
        return re.sub(r"\\{(\w+)\\}", lambda found: words.get(found[1], found[0]), re.escape(text))

    def place(self) -> str:
        for file, source in (("script.py", self.script()), *self.files):
            for number, line in enumerate(source.splitlines(), 1):
                if "# here" in line:
                    return f"{file}:{number}"
        return ""
