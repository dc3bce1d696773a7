"""Exceptions in the program: raised by its own lines, in hooks and workers, in threads."""

from faults.fault import Fault

EXCEPTIONS = (
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
        ranks=(1, 4),
    ),
    Fault(
        name="exception-and-a-long-clean-up",
        source="""
            def save():
                time.sleep(600)  # its peers have failed long before it has
            try:
                if bad:
                    raise ValueError("bad batch 7")  # here
                wait()
            finally:
                dist.destroy_process_group()
                if bad:
                    save()
        """,
        options=("--shutdown-timeout", "1"),
        first="{last} left its process groups while handling ValueError: bad batch 7",
        details=("{here}", "{others} only lost the connection to {last}", "in save when others had failed"),
        least_ranks=2,
        ranks=(3,),
    ),
    Fault(
        name="sounds-like-a-lost-peer",
        source="""
            import contextlib, select
            pids = [None] * size
            dist.all_gather_object(pids, os.getpid())
            if bad:
                for pid in pids[:-1]:
                    with contextlib.suppress(ProcessLookupError):  # it is gone already
                        select.select([os.pidfd_open(pid)], [], [])  # it comes to its end, as it should
                raise RuntimeError("failed to connect to database")  # here
        """,
        first="{last} failed: RuntimeError: failed to connect to database",
        details=("{here}",),
        least_ranks=2,
        ranks=(3,),
    ),
    Fault(
        name="exception-everywhere",
        source="""
            raise ValueError("bad batch 7")  # here
        """,
        first="{all} failed: ValueError: bad batch 7",
        details=("{here}",),
        ranks=(3,),
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
        ranks=(),
    ),
    Fault(
        name="exception-with-causes",
        ranks=(),
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
        ranks=(4,),
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
        ranks=(2,),
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
        ranks=(2,),
    ),
    Fault(
        name="backward-in-ddp",
        ranks=(),
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
        ranks=(),
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
        ranks=(),
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
        ranks=(),
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
        ranks=(),
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
        ranks=(),
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
        ranks=(),
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
        ranks=(),
        source="""
            if bad:
                raise ExceptionGroup("two jobs", [ValueError("bad batch 7"), KeyError("row 5")])  # here
            wait()
        """,
        first="{last} failed: ExceptionGroup: two jobs",
        details=("{here}", "ValueError: bad batch 7"),
    ),
)
