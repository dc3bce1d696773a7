"""Checks that this machine can run a job, before any process is started.

A busy port, a log folder that cannot be written, fewer GPUs than ranks: each would fail on every rank, or only after
minutes. Here each is one message. Start reading at `check_machine`.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from unisono.errors import LaunchError
from unisono.launch.gpus import usable_gpus
from unisono.launch.launch_job import LaunchJob
from unisono.launch.source_scan import asks_for_nccl, program_source

__all__ = ["check_machine", "is_this_machine", "with_log_folder"]


def check_machine(job: LaunchJob, *, environment: Mapping[str, str]) -> None:
    """Check that this machine can run the job. Creates the log folder if there is none.

    Raises:
        LaunchError: The program cannot be executed, GPUs are missing, the port is in use, or the log folder cannot be
            written.
    """
    if not job.python:
        _check_executable(job.target, environment)
    _check_gpus(job, environment)
    if job.master_port:
        _check_port(job.master_port)
    if job.output.directory is not None:
        _check_folder(job.output.directory)


def is_this_machine(host: str) -> bool:
    """Return True if a host name or an address refers to this machine.

    >>> is_this_machine("localhost"), is_this_machine("192.0.2.1")
    (True, False)
    """
    host = host.removeprefix("[").removesuffix("]")
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(_is_own(family, address) for family, _, _, _, address in found)


def with_log_folder(job: LaunchJob) -> LaunchJob:
    """Return the job with a temporary log folder if it redirects or filters output and has no folder."""
    output = job.output
    wanted = any((*output.redirected.values(), output.stdout_filters, output.stderr_filters))
    if output.directory is not None or not wanted:
        return job
    folder = Path(tempfile.mkdtemp(prefix="unisono_"))
    return replace(job, output=replace(output, directory=folder))


def _check_executable(program: str, environment: Mapping[str, str]) -> None:
    if shutil.which(program, path=environment.get("PATH")) is not None:
        return
    if "/" not in program:
        hint = f"; give its path, such as ./{program}" if Path(program).is_file() else "; check the name"
        raise LaunchError(f"no program named {program!r} in the folders of PATH{hint}")
    if not Path(program).exists():
        raise LaunchError(f"no such file: {program!r} (in {str(Path.cwd())!r}); check the path")
    raise LaunchError(f"{program!r} cannot be executed; make it executable, or leave out --no-python if it is Python")


def _check_gpus(job: LaunchJob, environment: Mapping[str, str]) -> None:
    gpus = usable_gpus(environment)
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    if job.virtual_local_rank and setting is not None and job.ranks > len(names := setting.split(",")):
        raise LaunchError(
            f"--virtual-local-rank gives every rank one entry of CUDA_VISIBLE_DEVICES, and {setting!r} has "
            f"{len(names)} for {job.ranks} ranks; list more, or start at most {len(names)}"
        )
    if gpus is None or job.ranks <= gpus:
        return
    gpus_of = f"this machine has {gpus or 'no'} GPU{'s' * (gpus > 1)} that torch can use"
    found = f"{gpus_of}, for {job.ranks} rank{'s' * (job.ranks > 1)}"
    fewer = f"start at most {gpus}, or " if gpus else ""
    if job.virtual_local_rank and gpus:
        raise LaunchError(f"--virtual-local-rank gives every rank a GPU, and {found}; {fewer}leave it out")
    if job.numa_binding is not None:
        raise LaunchError(f"--numa-binding puts every rank near its GPU, and {found}; {fewer}leave it out")
    if _is_nccl_script(job, gpus):
        raise LaunchError(
            f"{job.target!r} asks for nccl, which needs a GPU for every rank, and {found}; "
            f"{fewer}let the script use gloo on CPUs"
        )


def _is_nccl_script(job: LaunchJob, gpus: int) -> bool:
    if not job.python or job.module:
        return False
    # A backend named on the command line beats the default in the script.
    if any(name in argument for argument in job.arguments for name in ("gloo", "mpi")):
        return False
    return asks_for_nccl(program_source(job), gpus=gpus)


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that an earlier job has just left is free
        try:
            probe.bind(("127.0.0.1", port))
        except PermissionError as error:
            raise LaunchError(f"port {port} is reserved for the system; choose one from 1024 to 65535") from error
        except OSError as error:
            raise LaunchError(
                f"port {port} of 127.0.0.1 is in use; choose another, or leave the port out for a free one"
            ) from error


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise LaunchError(
            f"cannot write into the log folder {str(folder)!r}: {reason}; choose another with --log-dir"
        ) from error


def _is_own(family: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
