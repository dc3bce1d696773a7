"""A rank killed for lack of memory is told from one that somebody killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.memory import MemoryCounters, evidence, read_counters

LIMIT = 64 << 20
MOUNT = Path("/sys/fs/cgroup")


class Machine:
    """The files of a kernel, below a folder."""

    def __init__(self, root):
        self.root = root
        self.write("proc/vmstat", "nr_free_pages 5\noom_kill 3\n")
        self.write("proc/meminfo", "MemTotal:       16777216 kB\nMemFree: 1 kB\n")

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def evidence(self, before, code=-9):
        return evidence(code, before, read_counters(self.root))


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def events(kills, refusals):
    return f"low 0\nhigh 0\nmax 9\noom {refusals}\noom_kill {kills}\noom_group_kill 0\n"


@pytest.mark.parametrize("mount", ["sys/fs/cgroup", "sys/fs/cgroup/unified"])
@pytest.mark.parametrize(
    ("inner", "outer"), [(LIMIT, None), (None, LIMIT), (2 * LIMIT, LIMIT)], ids=["inner", "outer", "both"]
)
def test_the_limit_of_cgroup_v2_that_was_reached_is_named(machine, mount, inner, outer):
    machine.write("proc/self/cgroup", "0::/slice/job\n")
    for folder, limit in ("job", inner), (".", outer):
        machine.write(f"{mount}/slice/{folder}/memory.max", f"{limit or 'max'}\n")
        machine.write(f"{mount}/slice/{folder}/memory.events", events(0, 0))
    before = read_counters(machine.root)
    assert machine.evidence(before) is None
    # What happens in a group is counted in those around it, too.
    machine.write(f"{mount}/slice/job/memory.events", events(1, int(inner == LIMIT)))
    machine.write(f"{mount}/slice/memory.events", events(1, 1))
    assert (
        machine.evidence(before)
        == "out of memory: the kernel killed 1 process of this control group; the limit of 64 MiB was reached"
    )


@pytest.mark.parametrize("counter", ["failcnt", "max_usage_in_bytes"])
def test_a_limit_of_cgroup_v1_is_named_where_the_path_is_hidden(machine, counter):
    # In a container the path is that of the host, and the group lies at the mount itself.
    machine.write("proc/self/cgroup", "5:cpu:/docker/1f\n4:memory:/docker/1f\n0::/\n")
    files = {
        "oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
        "limit_in_bytes": f"{LIMIT}\n",
        "failcnt": "0\n",
        "max_usage_in_bytes": "4096\n",
    }
    for name, text in files.items():
        machine.write(f"sys/fs/cgroup/memory/memory.{name}", text)
    before = read_counters(machine.root)
    machine.write("sys/fs/cgroup/memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    machine.write(f"sys/fs/cgroup/memory/memory.{counter}", f"{LIMIT}\n")
    assert (
        machine.evidence(before)
        == "out of memory: the kernel killed 2 processes of this control group; the limit of 64 MiB was reached"
    )


def test_a_full_machine_is_named_where_no_limit_was_reached(machine):
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.write("sys/fs/cgroup/job/memory.max", "max\n")
    machine.write("sys/fs/cgroup/job/memory.events", events(0, 0))
    before = read_counters(machine.root)
    machine.write("sys/fs/cgroup/job/memory.events", events(1, 0))
    assert machine.evidence(before).endswith("the memory of the machine (16 GiB) was full")


def test_a_kill_of_another_control_group_is_no_evidence(machine):
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.write("sys/fs/cgroup/job/memory.events", events(0, 0))
    before = read_counters(machine.root)
    machine.write("proc/vmstat", "oom_kill 4\n")
    assert machine.evidence(before) is None


def test_without_control_groups_the_machines_counter_speaks(machine):
    before = read_counters(machine.root)
    machine.write("proc/vmstat", "oom_kill 4\n")
    assert (
        machine.evidence(before) == "out of memory: the kernel killed 1 process of this machine (16 GiB) during the job"
    )


def test_where_nothing_can_be_read_nothing_is_said(tmp_path):
    assert read_counters(tmp_path) == MemoryCounters()
    assert evidence(-9, MemoryCounters(), read_counters(tmp_path)) is None


def test_the_size_of_shared_memory_is_said_for_a_bus_error_alone():
    counters = MemoryCounters(shared_bytes=LIMIT)
    assert "/dev/shm has 64 MiB" in evidence(-signal.SIGBUS, counters, counters)
    assert evidence(-signal.SIGKILL, counters, counters) is None


def places():
    """Folders for a control group with a limit, each with the files that set that of memory and that of swap.

    cgroup v1 takes a group inside the own one. In v2 a group with processes has no limits for groups inside it, unless
    it is the root, so the group has to lie beside the own one.
    """
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            folder = MOUNT / "memory" / path.lstrip("/")
            if folder.is_dir():
                yield folder, ("memory.limit_in_bytes", LIMIT), ("memory.memsw.limit_in_bytes", LIMIT)
        elif not controllers:
            for mount in MOUNT, MOUNT / "unified":
                own = mount / path.lstrip("/")
                for folder in (own, own.parent) if own != mount else (own,):
                    given = folder / "cgroup.subtree_control"
                    if given.exists() and "memory" in given.read_text().split():
                        yield folder, ("memory.max", LIMIT), ("memory.swap.max", 0)


@pytest.fixture
def small_group():
    """A control group of this machine that has LIMIT bytes of memory and no swap."""
    refusals = []
    for folder, (memory, limit), (swap, swap_limit) in places():
        group = folder / f"unisono-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError as error:
            refusals.append(str(error))
            continue
        try:
            (group / memory).write_text(str(limit))
            if (group / swap).exists():  # where the kernel counts it
                (group / swap).write_text(str(swap_limit))
            yield group
        finally:
            group.rmdir()
        return
    why = "; ".join(refusals) or "no group hands the memory controller on to groups beside or below this process"
    pytest.skip(f"needs cgroup v1 or v2 and the right to make a group with a limit of memory: {why}")


# A small process: of two that share as much as pytest has, the kernel might choose the wrong one.
_KILLED_FOR_MEMORY = """
import os, sys
from pathlib import Path
from unisono.memory import evidence, read_counters

group, limit = Path(sys.argv[1]), int(sys.argv[2])
try:
    (group / "cgroup.procs").write_text("0")
except OSError as error:
    print(f"refused: {error}")
    sys.exit()
before = read_counters()
child = os.fork()
if child == 0:
    held = [b"x" * (1 << 20) for _ in range(4 * limit >> 20)]
    os._exit(bool(held))
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(code, evidence(code, before, read_counters()))
"""


def test_a_kill_for_memory_on_this_machine_is_seen(small_group):
    """With a real limit, where this process may set one."""
    command = [sys.executable, "-c", _KILLED_FOR_MEMORY, str(small_group), str(LIMIT)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    if said.startswith("refused: "):
        pytest.skip(f"needs the right to move a process into {small_group}: {said}")
    assert said == (
        "-9 out of memory: the kernel killed 1 process of this control group; the limit of 64 MiB was reached"
    )
