"""Advice on failures that are recognized by their message or their signal. Pure; one table each."""

from __future__ import annotations

import signal

__all__ = ["hint_for", "meaning_of_signal"]

_MEMORY = "start fewer ranks, make batches smaller, or use fewer DataLoader workers"

_HINTS = (
    (
        ("cuda out of memory", "hip out of memory"),
        "make batches smaller or accumulate gradients; `nvidia-smi` shows who else uses this GPU",
    ),
    (("can't allocate memory", "cannot allocate memory", "std::bad_alloc", "memoryerror"), _MEMORY),
    (
        ("out of shared memory", "no space left on device", "unable to allocate shared memory", "bus error"),
        "see `df /dev/shm` and `df`; a container gets a larger /dev/shm by --shm-size",
    ),
    (("killed by signal: killed",), _MEMORY),
    (
        ("cannot re-initialize cuda in forked subprocess",),
        "let DataLoader workers touch no GPU, or give it multiprocessing_context='spawn'",
    ),
    (
        ("device-side assert",),
        "the place shown may be later than the fault; run again with CUDA_LAUNCH_BLOCKING=1 for the true one",
    ),
    (
        ("eof when reading a line", "bdbquit"),
        "of several ranks none has the terminal, and standard input is empty, unless `--stdin RANK` gives it to one",
    ),
    (("too many open files",), "raise the limit with `ulimit -n`, or use fewer DataLoader workers"),
    (("address already in use",), "another process has that port; use another one, or port 0 for any that is free"),
    (
        ("default process group has not been initialized",),
        "call torch.distributed.init_process_group() before the first collective",
    ),
    (
        ("no kernel image is available",),
        "this build of torch has no code for this GPU; install one that has",
    ),
)
"""Phrases of a message in lower case, one of which is enough, and the advice."""

_SIGNALS = {
    signal.SIGSEGV: "it touched memory that is not its own: a fault in native code (an extension, a driver), or a "
    "recursion too deep",
    signal.SIGABRT: "it ended itself: a C++ error, a failed assertion or a watchdog; its last lines may tell",
    signal.SIGBUS: "memory that it had mapped could not be had: often /dev/shm or a disk is full",
    signal.SIGILL: "it met an instruction that this processor does not have: a library built for another one",
    signal.SIGFPE: "native code divided an integer by zero",
    signal.SIGTERM: "another process asked it to end, such as a batch system or `kill`",
    signal.SIGINT: "another process interrupted it",
    signal.SIGHUP: "another process told it that its terminal is gone",
    signal.SIGPIPE: "it wrote to a pipe that nobody reads any more",
    signal.SIGXCPU: "it used more CPU time than `ulimit -t` allows",
    signal.SIGXFSZ: "it wrote a file larger than `ulimit -f` allows",
}


def hint_for(text: str) -> str | None:
    """Return advice on an error, from its type and message or from the last lines of a rank; None if there is none.

    >>> hint_for("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    'make batches smaller or accumulate gradients; `nvidia-smi` shows who else uses this GPU'
    """
    lower = text.lower()
    return next((hint for words, hint in _HINTS if any(word in lower for word in words)), None)


def meaning_of_signal(signum: int, *, evidence: str | None) -> str:
    """Return what a signal that ended a rank means, including `unisono.memory.evidence`.

    >>> meaning_of_signal(11, evidence=None).partition(":")[0]
    'it touched memory that is not its own'
    """
    if signum == signal.SIGKILL:
        if evidence is not None:
            return f"{evidence}. To use less, {_MEMORY}"
        return "no counter of the kernel speaks for a lack of memory; another process may have sent the signal"
    meaning = _SIGNALS.get(signal.Signals(signum), "") if signum in set(signal.Signals) else ""
    return "; ".join(part for part in (meaning, evidence) if part)
