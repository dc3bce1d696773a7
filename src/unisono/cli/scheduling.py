"""`unisono run --on slurm`, `--on kubernetes` and `--on ray`: flags for a scheduler. Start reading at `schedule`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from unisono.cli import reading
from unisono.cli.flags import Flag, Reader, given_flags
from unisono.errors import LaunchError

__all__ = ["PLACE_TO_CHECK", "SCHEDULING_FLAGS", "check_scheduling", "schedule"]

_SECTION = "On a cluster, through its scheduler"
_LEAST_SAVE_S = 20
_MARGIN_S = 10
_OF = {
    **dict.fromkeys(("image", "volume"), ("kubernetes",)),
    **dict.fromkeys(("time", "sbatch"), ("slurm",)),
    **dict.fromkeys(("num_workers", "cpus_per_worker", "gpus_per_worker", "ray_address"), ("ray",)),
    **dict.fromkeys(
        ("dry_run", "job_name", "cpus_per_node", "gpus_per_node", "memory_per_node", "save_time", "requeues"),
        ("slurm", "kubernetes"),
    ),
}
"""By flag, the schedulers that it is for."""
_MEETING = ("rdzv_endpoint", "rdzv_backend", "node_rank", "local_addr", "master_addr", "master_port", "standalone")

PLACE_TO_CHECK = {"rdzv_endpoint": reading.Endpoint("localhost", 29500)}
"""A place to meet for the check of the other flags; the scheduler arranges the real one."""


def _read_count(text: str) -> int:
    if not (count := reading.read_count(text)):
        raise ValueError("is not a number of them: give 1 or more")
    return count


def _read_save_time(text: str) -> int:
    seconds = reading.read_count(text)
    if not _LEAST_SAVE_S <= seconds <= 65535:
        raise ValueError(f"is not a time to save: give {_LEAST_SAVE_S} to 65535 seconds")
    return seconds


def _read_time(text: str) -> str:
    if not re.fullmatch(r"\d+(:\d{1,2}){0,2}|\d+-\d+(:\d{1,2}){0,2}", text, re.ASCII):
        raise ValueError(
            "is not a time limit of Slurm: write MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS, such as 2:00:00"
        )
    return text


def _read_option(text: str) -> str:
    if not text.startswith("-") or "\n" in text:
        raise ValueError("is not an option of sbatch: write --sbatch=--partition=gpu")
    return text


def _read_claim(text: str) -> tuple[str, str]:
    claim, colon, path = text.partition(":")
    if not (re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", claim) and colon and path.startswith("/")):
        raise ValueError("is not CLAIM:/PATH, the name of a persistent volume claim and where to mount it")
    return claim, path


def _read_cluster(text: str) -> str:
    if "://" in text:
        raise ValueError(
            "is an address for Ray's client: give HOST:PORT on a node of the cluster, or submit from elsewhere by "
            "`ray job submit -- unisono run --on ray ...`"
        )
    return text


def _read_name(text: str) -> str:
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?", text):
        raise ValueError("is not a name for a job: use up to 50 small letters, digits and hyphens, with a letter first")
    return text


SCHEDULING_FLAGS = [
    Flag(names, section=_SECTION, torchruns=False, **settings)
    for names, settings in (
        (
            ["--on"],
            {
                "type": click.Choice(["slurm", "kubernetes", "ray"]),
                "help": "Do not start PROGRAM here: submit a batch job to Slurm, or print a manifest for Kubernetes "
                "(with --dry-run); --nnodes says how many machines, -n how many ranks on each. Or let a Ray cluster "
                "place --num-workers ranks, and follow them here.",
            },
        ),
        (["--dry-run"], {"is_flag": True, "help": "Slurm, Kubernetes: print what --on would submit."}),
        (
            ["--job-name"],
            {"type": Reader(_read_name), "metavar": "NAME", "help": "Name of the job.  [that of PROGRAM]"},
        ),
        (
            ["--time"],
            {"type": Reader(_read_time), "metavar": "TIME", "help": "Slurm: time limit, such as 2:00:00."},
        ),
        (
            ["--cpus-per-node"],
            {"type": Reader(_read_count), "metavar": "N", "help": "Cores to ask for on each machine."},
        ),
        (
            ["--gpus-per-node"],
            {"type": Reader(_read_count), "metavar": "N", "help": "GPUs to ask for on each machine."},
        ),
        (
            ["--memory-per-node"],
            {"metavar": "SIZE", "help": "Memory to ask for, as the scheduler writes it: 64G for Slurm, 64Gi for "
             "Kubernetes."},
        ),
        (
            ["--save-time"],
            {"type": Reader(_read_save_time), "default": "120", "metavar": "SECONDS",
             "help": "How long before the end of a job its ranks get SIGTERM, so that a Trainer saves.  [120]"},
        ),
        (
            ["--requeues"],
            {"type": Reader(reading.read_count), "default": "10", "metavar": "K",
             "help": "How often a job is started again after a preemption or its time limit; on Kubernetes, after "
             "failures.  [10]"},
        ),
        (
            ["--sbatch"],
            {"type": Reader(_read_option), "multiple": True, "metavar": "OPTION",
             "help": "Slurm: a further option, such as --sbatch=--partition=gpu. May be given again."},
        ),
        (["--image"], {"metavar": "IMAGE", "help": "Kubernetes: container image with unisono and PROGRAM."}),
        (
            ["--volume"],
            {"type": Reader(_read_claim), "multiple": True, "metavar": "CLAIM:/PATH",
             "help": "Kubernetes: mount a persistent volume claim. May be given again."},
        ),
        (
            ["--num-workers"],
            {"type": Reader(_read_count), "metavar": "N", "help": "Ray: number of ranks."},
        ),
        (
            ["--cpus-per-worker"],
            {"type": Reader(_read_count), "default": "1", "metavar": "N", "help": "Ray: cores of each rank.  [1]"},
        ),
        (
            ["--gpus-per-worker"],
            {"type": Reader(reading.read_count), "default": "0", "metavar": "N",
             "help": "Ray: GPUs of each rank.  [0]"},
        ),
        (
            ["--ray-address"],
            {"type": Reader(_read_cluster), "metavar": "HOST:PORT",
             "help": "Ray: the cluster.  [the one that RAY_ADDRESS names, or that runs on this machine]"},
        ),
    )
]  # fmt: skip


def check_scheduling(given: Mapping[str, Any], context: click.Context) -> None:
    """Refuse flags that do not go with the scheduler, or with none.

    Raises:
        ValueError: A flag is for another scheduler, or contradicts one.
        LaunchError: Slurm could not write the job's output.
    """
    typed = {flag.name: spelled for flag, spelled, _ in given_flags(context)}
    on = given["on"]
    if on is None:
        for flag in SCHEDULING_FLAGS:
            if flag.name in typed:
                raise ValueError(
                    f"{typed[flag.name]} is for a scheduler: give --on slurm, --on kubernetes or --on ray, too"
                )
        return
    for name in _MEETING:
        if name in typed:
            raise ValueError(f"{typed[name]} says where machines meet, which --on {on} arranges: leave it out")
    for name, owners in _OF.items():
        if name in typed and on not in owners:
            raise ValueError(f"{typed[name]} is for --on {' and '.join(owners)}, and this is --on {on}: leave it out")
    if on == "ray":
        _check_ray(given, typed)
    elif on == "kubernetes":
        _check_kubernetes(given)
    elif not os.access(Path.cwd(), os.W_OK):
        raise LaunchError(f"{Path.cwd()} cannot be written, and the job's output goes there: start from another folder")


def _check_kubernetes(given: Mapping[str, Any]) -> None:
    if not given["dry_run"]:
        raise ValueError(
            "--on kubernetes prints a manifest and starts nothing: add --dry-run, and pipe it to kubectl apply -f -"
        )
    if not given["image"]:
        raise ValueError("--on kubernetes needs --image, a container image that holds unisono and the program")
    least, most = given["nnodes"] or (1, 1)
    if least != most:
        raise ValueError(
            f"--nnodes {least}:{most} is a range, and a Job of Kubernetes has a fixed number of pods: give one"
        )


def _check_ray(given: Mapping[str, Any], typed: Mapping[str, str]) -> None:
    if given["num_workers"] is None:
        raise ValueError("--on ray needs --num-workers, the number of ranks")
    for name in ("nproc_per_node", "nnodes"):
        if name in typed:
            raise ValueError(f"{typed[name]} says how many ranks are where, which Ray decides: give --num-workers")
    for name in ("stdin", "rdzv_id", "rdzv_token_file"):
        if name in typed:
            raise ValueError(f"{typed[name]} is for launchers that you start: --on ray starts them on its nodes")


def schedule(given: Mapping[str, Any], command: Sequence[str], context: click.Context) -> int:
    """Submit a job to the scheduler that `--on` names, or print what would be submitted; return the exit code.

    Raises:
        LaunchError: The scheduler refuses the job.
    """
    if given["on"] == "ray":
        return _on_ray(given, command, context)
    from unisono.launch.schedulers.request import SchedulerRequest, name_of  # noqa: PLC0415  few jobs need it

    least, most = given["nnodes"] or (1, 1)
    kept = _kept(context)
    typed = {flag.name for flag, _, _ in given_flags(context)}
    if "shutdown_timeout" not in typed:
        kept += ["--shutdown-timeout", str(given["save_time"] - _MARGIN_S)]
    slurm = given["on"] == "slurm"
    launcher = [sys.executable, "-m", "unisono", "run"] if slurm else ["unisono", "run"]
    request = SchedulerRequest(
        name=given["job_name"] or name_of(command[0]),
        command=(*launcher, *kept, *command),
        min_nodes=least,
        max_nodes=most,
        folder=str(Path.cwd()) if slurm else "",
        cpus=given["cpus_per_node"],
        gpus=given["gpus_per_node"],
        memory=given["memory_per_node"],
        save_s=given["save_time"],
        restarts=given["requeues"],
    )
    if slurm:
        return _slurm(request, given)
    from unisono.launch.schedulers.kubernetes_manifest import kubernetes_manifest  # noqa: PLC0415

    manifest = kubernetes_manifest(request, image=given["image"], claims=dict(given["volume"]))
    click.echo(f"# Made by unisono {version('unisono')}\n{manifest}", nl=False)
    return 0


def _kept(context: click.Context, *, without: str = "nnodes") -> list[str]:
    """Return the flags that go to the launchers, as they were typed."""
    return [
        word
        for flag, _, words in given_flags(context)
        if flag not in SCHEDULING_FLAGS and flag.name != without
        for word in words
    ]


def _on_ray(given: Mapping[str, Any], command: Sequence[str], context: click.Context) -> int:
    from unisono.launch.ray.merged_output import MergedOutput  # noqa: PLC0415
    from unisono.launch.ray.node_shares import RayRequest  # noqa: PLC0415
    from unisono.launch.ray.ray_job import RayJob  # noqa: PLC0415

    request = RayRequest(
        command=(*_kept(context, without="rdzv_conf"), *command),
        workers=given["num_workers"],
        cpus=given["cpus_per_worker"],
        gpus=given["gpus_per_worker"],
        address=given["ray_address"],
        conf=given["rdzv_conf"] or "",
        folder=str(Path.cwd()),
    )
    return RayJob(request, MergedOutput(sys.stdout, sys.stderr)).run()


def _slurm(request: Any, given: Mapping[str, Any]) -> int:
    from unisono.launch.schedulers.slurm_script import slurm_script  # noqa: PLC0415
    from unisono.launch.schedulers.submission import submit_to_slurm  # noqa: PLC0415

    script = slurm_script(request, time=given["time"], options=given["sbatch"])
    if given["dry_run"]:
        click.echo(script, nl=False)
        return 0
    job = submit_to_slurm(script)
    click.echo(
        f"unisono: submitted job {job}; its output goes to {request.name}-{job}.log, and `squeue -j {job}` shows it"
    )
    return 0
