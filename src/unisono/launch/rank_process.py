"""Turns a forked process into a rank: first an independent process, then the user's program as `__main__`.

`settle` runs right after the fork; `run_program` is called from the top level of the interpreter. Start reading there.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import NoReturn

from unisono import recovery_link
from unisono.launch import backend_override, group_teardown, rendezvous_patch
from unisono.launch.cleanup import use_scratch
from unisono.launch.environment import program_arguments
from unisono.launch.failure.error_record import record_error
from unisono.launch.fast_exit import Preloaded, finish
from unisono.launch.hang import call_recorder, stacks, wait_recorder
from unisono.launch.hang.flight_recorder import has_completed
from unisono.launch.hang.status_block import StatusBlock
from unisono.launch.linux import set_parent_death_signal
from unisono.launch.program import NoProgramError, run_main, without_frames
from unisono.launch.recovery_page import RankLink
from unisono.launch.reserved_files import OwnFile, move_out_of_the_way
from unisono.launch.spare_process import RankGrant
from unisono.machine import let_threads_finish
from unisono.program_end import note_exception

__all__ = ["Program", "RankFiles", "RankProcess", "execute", "main", "run_program", "settle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """The user's program, as all ranks run it."""

    target: str
    """The path of a script, the name of a module, or a program that is not Python."""
    module: bool = False
    """True if the target is a module."""
    python: bool = True
    """True if the target is Python."""
    forked: bool = True
    """True if a forked rank runs it directly; otherwise the rank executes a new interpreter, or the program."""
    arguments: Sequence[str] = ()
    """The arguments that follow in `sys.argv`."""
    pass_local_rank: bool = False
    """True if `--local-rank=N` is passed before the arguments."""
    numa_binding: str | None = None
    """How the rank is bound to the cores near its GPU."""
    cpu_backend: str = "gloo"
    """The backend that makes the process groups for which the program asks for gloo."""
    recover: bool = False
    """True if the launcher replaces a rank that dies, where a Trainer allows it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFiles:
    """The open files that a rank receives from the agent, by number."""

    stdout: int
    stderr: int
    page: int
    """Shared memory in which the rank records its calls (`launch.hang.status_block`)."""
    dump: int
    """The file to which Python's fault handler writes stacks."""
    ask: int
    """A pipe: a byte requests the collectives that are not finished."""
    events: int | None = None
    """The file to which rank 0 writes progress events."""
    stdin: int | None = None
    """The launcher's standard input, for the rank that has it."""
    grant: int | None = None
    """In a spare process, the socket over which it is told its rank (`launch.spare_process`)."""
    servers: int | None = None
    """The memory by which ranks and servers of embedding tables find each other (`unisono.server_page`)."""

    def moved(self) -> RankFiles:
        """Move the files that stay open in the rank to high numbers, out of the program's way."""
        events = None if self.events is None else move_out_of_the_way(self.events)
        block, dump, ask = map(move_out_of_the_way, (self.page, self.dump, self.ask))
        grant = None if self.grant is None else move_out_of_the_way(self.grant)
        servers = None if self.servers is None else move_out_of_the_way(self.servers)
        return replace(self, page=block, dump=dump, ask=ask, events=events, grant=grant, servers=servers)

    def close(self) -> None:
        """Close all of these files in this process."""
        for file in asdict(self).values():
            if file is not None:
                os.close(file)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProcess:
    """The facts that a rank needs about itself after the fork."""

    rank: int
    """The number by which the fork server knows this process: its rank, or that of a spare process."""
    program: Program
    report: int
    """An open pipe to the fork server: one line `rank code nanoseconds` when the program fails."""
    files: RankFiles
    scratch: str = ""
    """The job's folder for sockets of multiprocessing, "" for none."""
    preloaded: Preloaded = field(default_factory=Preloaded)
    """The modules imported before the fork; none where the rank executes a new interpreter."""


def settle(*, parent: int, files: RankFiles, environment: Mapping[str, str]) -> None:
    """Turn this copy of the fork server into an independent process. Closes the files of standard streams after use.

    Ends the process at once if its parent is already gone.
    """
    os.setpgid(0, 0)  # a rank gets signals together with the processes it starts; the server does this as well
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    if files.stdin is not None:
        os.dup2(files.stdin, 0)
        os.close(files.stdin)
        sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for source, target in ((files.stdout, 1), (files.stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    # A pipe is block-buffered by default: a rank's output would appear late, and be lost when the rank is killed.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.update(environment)
    # Python's own generator reseeds itself in a forked process; numpy's global one would be equal on all ranks.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


_INTERPRETER = (
    "import sys; getattr(sys.flags, 'safe_path', False) or sys.path.pop(0); "
    "from unisono.launch.rank_process import main; main()"
)


def execute(process: RankProcess) -> NoReturn:
    """Replace this process with an interpreter that runs the program, or with the program if it is not Python."""
    program = process.program
    if not program.python:
        try:
            os.execvp(program.target, [program.target, *_arguments(program)])
        except OSError as error:
            _refuse(f"unisono: cannot execute {program.target!r}: {error.strerror}; give a program that is executable")
    kept = [
        file
        for name, file in asdict(process.files).items()
        if name not in ("stdin", "stdout", "stderr") and file is not None
    ]
    for file in (*kept, process.report):
        os.set_inheritable(file, True)
    os.environ["PYTHONUNBUFFERED"] = os.environ.get("PYTHONUNBUFFERED", "1")
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # what multiprocessing uses too
    os.execv(sys.executable, [sys.executable, *flags, "-c", _INTERPRETER, json.dumps(asdict(process))])


def main() -> None:
    """Run the program in a new interpreter. Called by that interpreter, with the rank as JSON."""
    facts = json.loads(sys.argv[1])
    files = RankFiles(**facts["files"])
    process = RankProcess(**{**facts, "program": Program(**facts["program"]), "files": files, "preloaded": Preloaded()})
    for file in (files.page, files.dump, files.ask, files.events, files.grant, files.servers, process.report):
        if file is not None:
            os.set_inheritable(file, False)
    run_program(process)


def run_program(process: RankProcess) -> NoReturn:
    """Run the program as `__main__` and end this process as Python would.

    Raises:
        SystemExit: The interpreter itself must end the process.
    """
    # Registered first, so that it runs last.
    atexit.register(let_threads_finish)
    try:
        code = _run(process)
    except KeyboardInterrupt:
        # It may also come while the failure of a peer, interrupted a moment earlier, is shown.
        code = 128 + signal.SIGINT
    # Here nothing holds the frames of the program any more.
    finish(code, process.preloaded)


def _run(process: RankProcess) -> int:
    """Run the program and return its exit code."""
    program = process.program
    block = _open_up(process)
    tell = partial(_tell, block, OwnFile(process.report), rank=process.rank)
    try:
        run_main(program.target, _arguments(program), module=program.module)
    except NoProgramError as error:
        tell(ModuleNotFoundError(*error.args), 2)
        return 2
    except SystemExit as end:
        if code := _exit_code(end):
            note_exception(end)
            tell(end, code)
        else:
            _finish(block)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)  # as Python does
        return code
    except KeyboardInterrupt as interrupt:
        note_exception(interrupt)
        tell(interrupt, 128 + signal.SIGINT)
        return 128 + signal.SIGINT
    # This is the top level of the user's program: an exception that it did not catch ends here.
    except BaseException as error:
        error.__traceback__ = without_frames(error.__traceback__, __file__)
        note_exception(error)
        if not tell(error, 1) or _shows_errors_itself():
            sys.excepthook(type(error), error, error.__traceback__)
        return 1
    _finish(block)
    return 0


def _open_up(process: RankProcess) -> StatusBlock:
    """Install the launcher's parts in a rank; return the block that shows the agent its calls and its error."""
    block = StatusBlock(process.files.page)
    recording = call_recorder.install(block, ask=process.files.ask, dump=process.files.dump)
    wait_recorder.install(recording)
    stacks.install(process.files.dump, has_thread=lambda: recording.has_thread)
    rendezvous_patch.install(os.environ)
    backend_override.install(process.program.cpu_backend)
    group_teardown.install()
    use_scratch(process.scratch)
    if process.program.recover:
        grant = None if process.files.grant is None else RankGrant(process.files.grant, events=process.files.events)
        recovery_link.current = RankLink(process.files.page, take_rank=None if grant is None else grant.take)
    if process.program.numa_binding is not None:
        _bind_to_gpu(process.program.numa_binding, gpu=int(os.environ["LOCAL_RANK"]))
    return block


def _tell(block: StatusBlock, report: OwnFile, error: BaseException, code: int, *, rank: int) -> bool:
    """Report an error; return False in a process that the program has forked, whose end is not the rank's.

    The report is sent at once: until the interpreter has shut down, peers that fail because of this rank may end first.
    """
    time_ns = time.monotonic_ns()
    if block.pid != os.getpid():
        return False
    try:
        account = record_error(error)
    except Exception as later:  # of a signal handler of the program: torch's DataLoader raises there for a dead worker
        account = record_error(later.with_traceback(error.__traceback__))
    block.write_failure({**account, "printed": _shows_errors_itself()})
    if block.begun and not block.met and has_completed():  # in DDP, say: no recorded call shows it
        block.note_meeting()
    if report.is_intact:  # otherwise the program has closed it, and the end of this process shows the failure
        os.write(report.number, f"{rank} {code} {time_ns}\n".encode())
    return True


def _finish(block: StatusBlock) -> None:
    """Record that the program has ended. Peers that still need this rank may fail before its process has ended."""
    if block.pid == os.getpid():
        block.note_finish()


def _shows_errors_itself() -> bool:
    """Return True if a hook of the program shows errors. Otherwise (torch's hook is like Python's), the agent does."""
    hook = sys.excepthook
    return hook is not sys.__excepthook__ and not (hook.__module__ or "").startswith("torch.distributed")


def _refuse(message: str) -> NoReturn:
    # All ranks find the same problem; one of them reports it.
    if os.environ["RANK"] == "0":
        print(message, file=sys.stderr)
    raise SystemExit(2)


def _bind_to_gpu(binding: str, *, gpu: int) -> None:
    """Bind this process to cores near a GPU, by torch's rules. Warns where torch cannot."""
    from torch.numa import binding as numa  # noqa: PLC0415  only with this option

    options = numa.NumaOptions(affinity_mode=numa.AffinityMode(binding))
    numa._maybe_apply_numa_binding_to_current_process(gpu_index=gpu, numa_options=options)


def _arguments(program: Program) -> list[str]:
    return program_arguments(program.arguments, local_rank=os.environ["LOCAL_RANK"], passed=program.pass_local_rank)


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    return end.code & 0xFF if isinstance(end.code, int) else 1
