"""The batch script by which Slurm starts a job, and starts it again after a preemption or at its time limit. Pure.

Slurm tells a job that it is about to end by SIGTERM: at a preemption, and `save_s` before the time limit (`--signal`).
The launchers pass it on, a Trainer saves, and all end with code 143. The script then asks Slurm why: a job that ends
within the grace time of a preemption is not requeued by Slurm itself. Start reading at `slurm_script`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from unisono.launch.schedulers.request import SchedulerRequest

__all__ = ["slurm_script"]

_EARLY_S = 60
"""How much earlier than asked Slurm may send a signal; see `--signal` in sbatch(1)."""

_BODY = """\
# Code 143: the launchers got SIGTERM, and a Trainer with a directory has saved its last step.
if (( code == 143 )); then
  state=$(scontrol show job "$SLURM_JOB_ID")
  limit=$(sed -n 's/.*[[:space:]]EndTime=\\([^ ]*\\).*/\\1/p' <<<"$state")
  left=$(( $(date -d "$limit" +%s 2>/dev/null || echo 9999999999) - $(date +%s) ))
  if [[ $state == *PreemptTime=[0-9]* ]] || (( left < {near_s} )); then
    if (( ${{SLURM_RESTART_COUNT:-0}} < {restarts} )); then
      echo "unisono: requeued to go on from the newest checkpoint" >&2
      scontrol requeue "$SLURM_JOB_ID" && sleep 60  # Slurm ends this script
    else
      echo "unisono: not requeued: this was start {starts} of {starts}; --requeues allows more" >&2
    fi
  fi
fi
exit "$code"
"""


def slurm_script(request: SchedulerRequest, *, time: str | None = None, options: Sequence[str] = ()) -> str:
    """Return the script for sbatch.

    Args:
        request: The job.
        time: The time limit, as Slurm writes it; None for that of the partition.
        options: Further options of sbatch, such as "--partition=gpu"; they override the others.

    >>> request = SchedulerRequest(name="train", command=("unisono", "run", "a b.py"), min_nodes=2, max_nodes=4)
    >>> [line for line in slurm_script(request).splitlines() if "nodes" in line or line.startswith("srun")]
    ['#SBATCH --nodes=2-4', "srun --ntasks-per-node=1 unisono run 'a b.py'"]
    """
    low, high = request.min_nodes, request.max_nodes
    asked = [
        f"--job-name={request.name}",
        f"--nodes={low}" if low == high else f"--nodes={low}-{high}",
        "--ntasks-per-node=1",
        f"--output={request.name}-%j.log",
        "--open-mode=append",
        "--requeue",
        f"--signal=TERM@{request.save_s}",
    ]
    per_node = {"cpus-per-task": request.cpus, "gpus-per-node": request.gpus, "mem": request.memory, "time": time}
    asked += [f"--{name}={value}" for name, value in per_node.items() if value is not None]
    if request.folder:
        asked.append(f"--chdir={request.folder}")
    # srun takes --cpus-per-task from its command line only, since Slurm 22.05.
    cores = [f"--cpus-per-task={request.cpus}"] if request.cpus is not None else []
    step = shlex.join(["srun", "--ntasks-per-node=1", *cores, *request.command])
    body = _BODY.format(near_s=request.save_s + 2 * _EARLY_S, restarts=request.restarts, starts=request.restarts + 1)
    lines = [*(f"#SBATCH {_quoted(option)}" for option in (*asked, *options)), step, "code=$?"]
    return "#!/bin/bash\n" + "\n".join(lines) + "\n" + body


def _quoted(option: str) -> str:
    """Return an option as sbatch reads it from a script: like a shell, but with double quotes."""
    if not any(sign in option for sign in " \t\"'#\\"):
        return option
    escaped = option.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
