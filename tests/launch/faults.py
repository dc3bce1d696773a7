"""The ways in which a rank can fail, each as a script that does it, and what the report must say.

In a script, `bad` is true in the rank that is at fault, `wait()` does what the others do meanwhile: a collective that
the bad one does not enter. The line at fault is marked `# here`.
"""

import re
import textwrap
from dataclasses import dataclass

_PROLOGUE = """\
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
    """Numbers of ranks in the short suite."""
    files: tuple[tuple[str, str], ...] = ()
    """Other files, by name."""
    target: tuple[str, ...] = ("script.py",)
    quiet: bool = True
    """Whether nothing may be on stderr but what the launcher says."""
    one_line: bool = False
    """Whether nothing is started, and one line says why."""

    def script(self) -> str:
        return _PROLOGUE * self.prologue + textwrap.dedent(self.source).lstrip("\n")

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


_HANG = ("--hang-report", "1", "--hang-abort", "2")
_WAITED = "{others} {have} waited 1."

FAULTS = (
    Fault(
        name="exception",
        source="""
            def step(batch):
                if bad:
                    raise ValueError(f"bad batch {batch}")  # here
            step(7)
            wait()
        """,
        first="{last} failed: ValueError: bad batch 7",
        details=("{here} in step",),
        ranks=(1, 2, 3, 4),
    ),
    Fault(
        name="exception-everywhere",
        source="""
            raise ValueError("bad batch 7")  # here
        """,
        first="{all} failed: ValueError: bad batch 7",
        details=("{here}",),
        ranks=(1, 3, 4),
    ),
    Fault(
        name="exception-before-meeting",
        source="""
            import os, torch.distributed as dist
            if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
                raise OSError("no such data set")  # here
            dist.init_process_group("gloo")
        """,
        prologue=False,
        first="{last} failed: OSError: no such data set",
        details=("{here}",),
        ranks=(3,),
    ),
    Fault(
        name="exception-with-causes",
        source="""
            def load(name):
                try:
                    return {}[name]
                except KeyError as error:
                    raise ValueError("no such key") from error  # here
            if bad:
                load("weights")
            wait()
        """,
        first="{last} failed: ValueError: no such key",
        details=("{here} in load", "caused by KeyError: 'weights'"),
    ),
    Fault(
        name="assertion-in-rank-0",
        source="""
            def check(total):
                assert rank != 0 or total == 3, f"total is {total}"  # here
            check(2)
            wait()
        """,
        first="rank 0 failed: AssertionError: total is 2",
        details=("{here} in check",),
        ranks=(1, 2, 4),
    ),
    Fault(
        name="import",
        source="""
            if bad:
                import model
            wait()
        """,
        files=(("model.py", "width = 64\ndepth = width / 0  # here\n"),),
        first="{last} failed: ZeroDivisionError: division by zero",
        details=("{here}", "depth = width / 0", "import model"),
        ranks=(1, 3),
    ),
    Fault(
        name="syntax-error",
        source="""
            if bad:
                import model
            wait()
        """,
        files=(("model.py", "width = 64\nlayers = range(3:  # here\n"),),
        first="{last} failed: SyntaxError: ",
        details=("{here}", "layers = range(3:"),
    ),
    Fault(
        name="missing-import",
        source="""
            import no_such_package  # here
        """,
        prologue=False,
        first="{all} failed: ModuleNotFoundError: No module named 'no_such_package'",
        details=("{here}",),
    ),
    Fault(
        name="missing-script",
        source="",
        target=("no_such_script.py",),
        first="no such file: 'no_such_script.py'",
        codes=(2,),
        one_line=True,
    ),
    Fault(
        name="missing-module",
        source="",
        target=("-m", "no_such_module"),
        first="no module named 'no_such_module'",
        codes=(2,),
        one_line=True,
    ),
    Fault(
        name="module",
        source="",
        target=("-m", "train"),
        files=(("train.py", _PROLOGUE + "if bad:\n    raise ValueError('bad batch 7')  # here\nwait()\n"),),
        first="{last} failed: ValueError: bad batch 7",
        details=("{here}",),
    ),
    Fault(
        name="data-loader-worker",
        source="""
            from torch.utils.data import DataLoader, Dataset
            class Table(Dataset):
                def __len__(self):
                    return 8
                def __getitem__(self, index):
                    if bad and index == 5:
                        raise KeyError(f"row {index}")  # here
                    return torch.tensor(index)
            def main():
                for batch in DataLoader(Table(), batch_size=2, num_workers=2):
                    wait()
            main()
        """,
        first="{last} failed in DataLoader worker process 0: KeyError: 'row 5'",
        details=(
            "{here} in __getitem__",
            'raise KeyError(f"row {index}")',
            "asked for at script.py:",
            "for batch in DataLoader",
        ),
        ranks=(1, 3),
    ),
    Fault(
        name="data-loader-worker-killed",
        source="""
            from torch.utils.data import DataLoader, Dataset
            class Table(Dataset):
                def __len__(self):
                    return 8
                def __getitem__(self, index):
                    if bad and index == 5:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return torch.tensor(index)
            for batch in DataLoader(Table(), batch_size=2, num_workers=2):  # here
                wait()
        """,
        first="{last} failed: RuntimeError: DataLoader worker (pid",
        details=("killed by signal: Killed", "{here}"),
        quiet=False,
    ),
    Fault(
        name="backward-hook",
        source="""
            def check(grad):
                if bad:
                    raise FloatingPointError("gradient is not finite")  # here
            x = torch.ones(3, requires_grad=True)
            x.register_hook(check)
            (x * 2).sum().backward()
            wait()
        """,
        first="{last} failed: FloatingPointError: gradient is not finite",
        details=("{here} in check", "(x * 2).sum().backward()"),
        ranks=(1, 2),
    ),
    Fault(
        name="backward-in-ddp",
        source="""
            from torch.nn.parallel import DistributedDataParallel as DDP
            class Double(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    return 2 * x
                @staticmethod
                def backward(ctx, grad):
                    if bad:
                        raise RuntimeError("cannot go back")  # here
                    return 2 * grad
            model = DDP(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)))
            Double.apply(model(torch.ones(2, 3))).sum().backward()
        """,
        first="{last} failed: RuntimeError: cannot go back",
        details=("{here} in backward",),
    ),
    Fault(
        name="ddp-forward",
        source="""
            from torch.nn.parallel import DistributedDataParallel as DDP
            model = DDP(torch.nn.Linear(4, 2))
            batch = torch.ones(3, 5 if bad else 4)
            model(batch).sum().backward()  # here
            wait()
        """,
        first="{last} failed: RuntimeError: mat1 and mat2 shapes cannot be multiplied (3x5 and 4x2)",
        details=("{here}",),
        ranks=(1, 3),
    ),
    Fault(
        name="exit-code",
        source="""
            if bad:
                sys.exit(3)  # here
            wait()
        """,
        first="{last} exited with code 3",
        details=("{here}", "sys.exit(3)"),
        codes=(3,),
        ranks=(1, 2),
    ),
    Fault(
        name="exit-message",
        source="""
            if bad:
                sys.exit("the learning rate must be positive")  # here
            wait()
        """,
        first="{last} exited with code 1: the learning rate must be positive",
        details=("{here}",),
        quiet=False,
        ranks=(3,),
    ),
    Fault(
        name="os-exit",
        source="""
            print("about to leave", flush=True)
            if bad:
                os._exit(1)
            wait()
        """,
        first="{last} exited with code 1",
        details=("os._exit", "about to leave"),
        ranks=(1, 2, 4),
    ),
    Fault(
        name="sigkill",
        source="""
            if bad:
                os.kill(os.getpid(), signal.SIGKILL)
            wait()
        """,
        first="{last} was killed by SIGKILL",
        details=("No counter of the kernel speaks for a lack of memory",),
        codes=(137,),
        ranks=(1, 2, 4),
    ),
    Fault(
        name="sigsegv",
        source="""
            import ctypes
            def crash():
                ctypes.string_at(0)  # here
            if bad:
                crash()
            wait()
        """,
        first="{last} was killed by SIGSEGV",
        details=("native code", "{here} in crash"),
        codes=(139,),
        ranks=(1, 3),
    ),
    Fault(
        name="sigabrt",
        source="""
            if bad:
                os.abort()  # here
            wait()
        """,
        first="{last} was killed by SIGABRT",
        details=("{here}",),
        codes=(134,),
    ),
    Fault(
        name="sigbus",
        source="""
            import mmap, tempfile
            if bad:
                with tempfile.TemporaryFile() as file:
                    file.truncate(4096)
                    view = mmap.mmap(file.fileno(), 4096)
                    file.truncate(0)
                    view[0]  # here
            wait()
        """,
        first="{last} was killed by SIGBUS",
        details=("{here}", "/dev/shm"),
        codes=(135,),
    ),
    Fault(
        name="sigterm-from-outside",
        source="""
            import subprocess
            if bad:
                subprocess.run(["kill", "-TERM", str(os.getpid())])
                time.sleep(60)
            wait()
        """,
        first="{last} was killed by SIGTERM",
        details=("Another process asked it to end",),
        codes=(143,),
        ranks=(1, 3),
    ),
    Fault(
        name="sigint-from-outside",
        source="""
            import subprocess
            if bad:
                subprocess.run(["kill", "-INT", str(os.getpid())])  # here
                time.sleep(60)
            wait()
        """,
        first="{last} was interrupted (KeyboardInterrupt)",
        details=("{here}",),
        codes=(130,),
        ranks=(2,),
    ),
    Fault(
        name="memory-error",
        source="""
            if bad:
                cache = bytearray(1 << 60)  # here
            wait()
        """,
        first="{last} failed: MemoryError",
        details=("{here}", "smaller"),
    ),
    Fault(
        name="cpu-allocator",
        source="""
            if bad:
                cache = torch.empty(1 << 58)  # here
            wait()
        """,
        first="{last} failed: RuntimeError: DefaultCPUAllocator: can't allocate memory",
        details=("{here}", "smaller"),
        ranks=(1, 2),
    ),
    Fault(
        name="memory-limit",
        source="""
            import resource
            if bad:
                used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
                resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
                rows = [bytes(1 << 20) for _ in range(10000)]  # here
            wait()
        """,
        first="{last} failed: MemoryError",
        details=("{here}", "smaller"),
    ),
    Fault(
        name="early-return",
        source="""
            if bad:
                sys.exit(0)
            wait()  # here
            wait()
        """,
        first="{last} ended while {some} still needed it",
        details=("then failed: RuntimeError: ", "{here}"),
        least_ranks=2,
        ranks=(2, 3),
    ),
    Fault(
        name="endless-loop",
        source="""
            def search():
                while True:
                    pass  # here
            if bad:
                search()
            wait()
        """,
        options=_HANG,
        first=_WAITED,
        details=("{last}: computing", "in search", "ending the job"),
        least_ranks=2,
        ranks=(2, 3),
    ),
    Fault(
        name="sigstop",
        source="""
            if bad:
                os.kill(os.getpid(), signal.SIGSTOP)
            wait()
        """,
        options=_HANG,
        first=_WAITED,
        details=("{last}: stopped", "kill -CONT", "ending the job"),
        least_ranks=2,
        ranks=(2,),
    ),
    Fault(
        name="data-loader-stuck",
        source="""
            from torch.utils.data import DataLoader, Dataset
            class Table(Dataset):
                def __len__(self):
                    return 8
                def __getitem__(self, index):
                    if bad and index == 5:
                        time.sleep(600)  # here
                    return torch.tensor(index)
            for batch in DataLoader(Table(), batch_size=2, num_workers=2):
                wait()
        """,
        options=_HANG,
        first=_WAITED,
        details=("{last}: waiting for its DataLoader", "{here} in __getitem__"),
        least_ranks=2,
        ranks=(2,),
    ),
    Fault(
        name="trainer-step",
        source="""
            import time, torch, unisono
            model = torch.nn.Linear(8, 2)
            trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), 0.1), progress=False)
            data = torch.utils.data.TensorDataset(torch.ones(32, 8))
            for epoch in trainer.epochs(2):
                for batch in trainer.batches(data, batch_size=8):
                    trainer.step(lambda model, batch: model(batch[0]).sum(1), batch)
                    if trainer.steps == 3 and trainer.rank == trainer.world_size - 1:
                        time.sleep(600)  # here
        """,
        options=_HANG,
        prologue=False,
        first="{others} {have} waited ",
        details=(" in Trainer.step for {last}", "{here}"),
        least_ranks=2,
        ranks=(3,),
    ),
    Fault(
        name="mismatched-collectives",
        source="""
            if bad:
                dist.broadcast(torch.ones(4), 0)
            else:
                dist.all_reduce(torch.ones(4, 4))  # here
        """,
        options=_HANG,
        first="{last} calls broadcast where {others} {call} all_reduce (collective 2)",
        details=("{others}: all_reduce(float32[4, 4], sum)", "{last}: broadcast(float32[4], root 0)", "{here}"),
        least_ranks=2,
        ranks=(2, 4),
    ),
    Fault(
        name="mismatched-shapes",
        source="""
            dist.all_reduce(torch.ones(5 if bad else 4))  # here
            time.sleep(60)
        """,
        options=_HANG,
        first="{last} calls all_reduce with float32[5], sum where {others} {have} float32[4], sum",
        codes=(1, 134),
        quiet=False,
        details=("{others}: all_reduce(float32[4], sum)", "{last}: all_reduce(float32[5], sum)", "{here}"),
        least_ranks=2,
        ranks=(2,),
    ),
    Fault(
        name="barrier-against-all-reduce",
        source="""
            if bad:
                dist.barrier()  # here
            wait()
        """,
        options=_HANG,
        first="{last} calls barrier where {others} {call} all_reduce (collective 2)",
        details=("{last}: barrier()", "{others}: all_reduce(float32[1], sum)", "{here}"),
        least_ranks=2,
        ranks=(2,),
    ),
    Fault(
        name="timeout",
        source="""
            from datetime import timedelta
            group = dist.new_group(timeout=timedelta(seconds=1))
            if bad:
                time.sleep(60)
            dist.all_reduce(torch.ones(1), group=group)
        """,
        first="{last} did not come where {others} waited for it",
        least_ranks=2,
        ranks=(3,),
    ),
    Fault(
        name="thread-that-exits",
        source="""
            def serve():
                raise ConnectionError("the data service is gone")
            def give_up(arguments):
                threading.__excepthook__(arguments)
                os._exit(7)
            threading.excepthook = give_up
            if bad:
                threading.Thread(target=serve).start()
            wait()
            time.sleep(60)
        """,
        first="{last} exited with code 7",
        details=("ConnectionError: the data service is gone",),
        codes=(7,),
        quiet=False,
    ),
    Fault(
        name="threads-that-go-on",
        source="""
            if bad:
                threading.Thread(target=time.sleep, args=(600,)).start()
                raise ValueError("bad batch 7")  # here
            wait()
        """,
        options=("--shutdown-timeout", "2"),
        first="{last} failed: ValueError: bad batch 7",
        details=("{here}",),
        quiet=False,
    ),
    Fault(
        name="recursion",
        source="""
            def depth(n):
                return 1 + depth(n + 1)  # here
            if bad:
                depth(0)
            wait()
        """,
        first="{last} failed: RecursionError: maximum recursion depth exceeded",
        details=("{here} in depth",),
    ),
    Fault(
        name="keyboard-interrupt",
        source="""
            if bad:
                raise KeyboardInterrupt  # here
            wait()
        """,
        first="{last} was interrupted (KeyboardInterrupt)",
        details=("{here}",),
        codes=(130,),
    ),
    Fault(
        name="error-without-words",
        source="""
            class Odd(Exception):
                def __str__(self):
                    raise RuntimeError("no words")
            if bad:
                raise Odd  # here
            wait()
        """,
        first="{last} failed: Odd: (its __str__ raised an error)",
        details=("{here}",),
    ),
    Fault(
        name="own-excepthook",
        source="""
            def show(kind, error, trace):
                print(f"shown by the program: {error}", file=sys.stderr)
            sys.excepthook = show
            if bad:
                raise ValueError("bad batch 7")  # here
            wait()
        """,
        first="{last} failed: ValueError: bad batch 7",
        details=("shown by the program: bad batch 7", "{here}"),
        quiet=False,
    ),
    Fault(
        name="exception-group",
        source="""
            if bad:
                raise ExceptionGroup("two jobs", [ValueError("bad batch 7"), KeyError("row 5")])  # here
            wait()
        """,
        first="{last} failed: ExceptionGroup: two jobs",
        details=("{here}", "ValueError: bad batch 7"),
    ),
    Fault(
        name="spawned-interpreter",
        source="""
            if bad:
                raise ValueError("bad batch 7")  # here
            wait()
        """,
        options=("--start-method", "spawn"),
        first="{last} failed: ValueError: bad batch 7",
        details=("{here}",),
    ),
    Fault(
        name="other-program",
        source="",
        files=(
            ("job.sh", 'if [ "$RANK" = $((WORLD_SIZE - 1)) ]; then echo "disk is full" >&2; exit 9; fi; sleep 60\n'),
        ),
        target=("--no-python", "sh", "job.sh"),
        first="{last} exited with code 9",
        details=("disk is full",),
        codes=(9,),
        quiet=False,
    ),
)
