"""Ranks that end without an exception: exit codes, signals, memory."""

from faults.fault import Fault

ENDS = (
    Fault(
        name="data-loader-worker-killed",
        ranks=(),
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
        name="exit-code",
        source="""
            if bad:
                sys.exit(3)  # here
            wait()
        """,
        first="{last} exited with code 3",
        details=("{here}", "sys.exit(3)"),
        codes=(3,),
        ranks=(2,),
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
        ranks=(),
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
        ranks=(1, 4),
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
        ranks=(4,),
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
        ranks=(3,),
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
        ranks=(),
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
        ranks=(3,),
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
        ranks=(),
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
)
