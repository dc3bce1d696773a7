"""Hands a batch script to sbatch. Start reading at `submit_to_slurm`."""

from __future__ import annotations

import shutil
import subprocess

from unisono.errors import LaunchError

__all__ = ["submit_to_slurm"]

_TIMEOUT_S = 60.0


def submit_to_slurm(script: str) -> str:
    """Submit a script and return the number of its job.

    Raises:
        LaunchError: There is no sbatch here, it refuses the script, or it does not answer.
    """
    if shutil.which("sbatch") is None:
        raise LaunchError(
            "--on slurm needs the program sbatch, which is not on this machine's PATH: run it where Slurm is "
            "installed, or print the script with --dry-run"
        )
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=script, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"sbatch has not answered for {_TIMEOUT_S:g} s: see whether `squeue` lists the job before you try again"
        ) from error
    if done.returncode:
        said = "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines())
        raise LaunchError(f"sbatch refuses the job: {said or f'code {done.returncode}'}; --dry-run prints its script")
    return done.stdout.strip().partition(";")[0]
