"""The systems whose recovery is compared: how each runs its script on ranks of one machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

__all__ = ["TORCHFT_MISSING", "System", "has_torchft", "torchft", "torchrun", "unisono"]

_SCRIPTS = Path(__file__).parent / "scripts"
TORCHFT_MISSING = "torchft is left out: `pip install torchft==0.2.0`, in the environment that runs the benchmarks"


class System(NamedTuple):
    """A launcher with a script."""

    name: str
    """For people."""
    launcher: tuple[str, ...]
    script: str
    arguments: tuple[str, ...] = ()
    """Of the script, after the folder and the number of steps."""
    variables: Mapping[str, str] = {}

    def command(self, folder: Path, steps: int) -> list[str]:
        """Return the command of a run."""
        return [*self.launcher, str(_SCRIPTS / self.script), str(folder), str(steps), *self.arguments]


def unisono(ranks: int, *, engine: str = "shared", spares: int = 0, stuck_timeout_s: float | None = None) -> System:
    """A Trainer under `unisono run`."""
    launcher = [sys.executable, "-m", "unisono", "run", "-n", str(ranks), "--spares", str(spares)]
    if stuck_timeout_s is not None:
        launcher += ["--stuck-timeout", f"{stuck_timeout_s:g}"]
    name = f"unisono, {engine} engine{', one spare' if spares else ''}"
    return System(name, tuple(launcher), "recovery_unisono.py", (engine,))


def torchrun(ranks: int, *, checkpoint_every: int, own_store: bool = True) -> System:
    """DistributedDataParallel over gloo under torchrun.

    Args:
        ranks: The number of ranks.
        checkpoint_every: Steps from one checkpoint to the next.
        own_store: Let each generation of ranks meet in a store of its own, not in that of torchrun.
    """
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=3")
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if own_store else {}
    name = f"torchrun, {'store of its own' if own_store else 'as it comes'}"
    return System(name, (sys.executable, *launcher), "recovery_ddp.py", (str(checkpoint_every),), variables)


def has_torchft() -> bool:
    """Return whether torchft is installed here."""
    return find_spec("torchft") is not None


def torchft(ranks: int) -> System:
    """Replica groups of one process each, with a torchrun for each."""
    launcher = (sys.executable, str(_SCRIPTS / "torchft_groups.py"), str(ranks))
    return System("torchft", launcher, "recovery_torchft.py")
