"""Ranks that a real mpirun starts, of Open MPI and MPICH, find each other and train what one process trains."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = """
import torch
import torch.nn.functional as F
import unisono
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(6, 33), torch.nn.Tanh(), torch.nn.Linear(33, 3))
data = torch.utils.data.TensorDataset(torch.randn(24, 6), torch.randint(0, 3, (24,)))
trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=4, seed=5)
for epoch in trainer.epochs(2):
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"), batch)
trainer.print("weights sha256:", trainer.digest())
"""

MEET = """
import torch
import unisono
job = unisono.init()
total = torch.tensor(10**job.rank)
torch.distributed.all_reduce(total)
with open(f"place{job.rank}", "w") as file:  # mpirun mixes what ranks print, also within a line
    file.write(f"{job.launcher} {job.rank} {job.local_rank} {job.world_size} {int(total)}")
"""


def mpirun(kind: str, ranks: int) -> list[str]:
    """The command of one of the two, as Debian names them; the test is skipped where it is not installed."""
    program = shutil.which(f"mpirun.{kind}")
    if program is None:
        pytest.skip(
            f"there is no program 'mpirun.{kind}' (Debian's {'openmpi-bin' if kind == 'openmpi' else kind} has it)"
        )
    oversubscribe = ["--oversubscribe"] if kind == "openmpi" else []
    return [program, *oversubscribe, "-n", str(ranks), sys.executable]


def run(command: list[str], folder: Path, script: str) -> str:
    (folder / "script.py").write_text(script)
    allow_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "OMPI", "PMI"))}
    done = subprocess.run(
        [*command, "script.py"],
        cwd=folder,
        env={**clean, **allow_root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["openmpi", pytest.param("mpich", marks=pytest.mark.soak)])
def test_ranks_of_mpirun_find_their_places_and_each_other(kind, tmp_path):
    printed = run(mpirun(kind, 2), tmp_path, MEET)
    places = [path.read_text() for path in sorted(tmp_path.glob("place*"))]
    assert places == ["mpirun 0 0 2 11", "mpirun 1 1 2 11"], printed


# That ranks with mpirun's variables train what one process trains is in test_placement.
@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_ranks_of_mpirun_train_what_one_process_trains(kind, ranks, tmp_path, run_ranks, monkeypatch):
    folder = tmp_path / kind
    folder.mkdir()
    printed = run(mpirun(kind, ranks), folder, TRAIN + MEET)
    monkeypatch.chdir(tmp_path)
    one = run_ranks(1, TRAIN)
    assert re.findall(r"weights sha256: ([0-9a-f]{64})", printed) == [one.sha()], printed
    places = sorted(path.read_text().rpartition(" ")[0] for path in folder.glob("place*"))
    assert places == [f"mpirun {rank} {rank} {ranks}" for rank in range(ranks)], printed
