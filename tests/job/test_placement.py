"""Where a process stands, under every launcher; and that ranks meet under srun's and mpirun's environments."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict

import pytest

import unisono
from ports import free_port
from unisono.comm import detect_placement

MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"launcher": "none", "rank": 0, "world_size": 1, "rendezvous_url": ""}),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"},
            {"rank": 3, "world_size": 4, "local_rank": 1, "local_world_size": 2, "node_rank": 1, "rendezvous_url": "env://"},
        ),
        ({"RANK": "0", "WORLD_SIZE": "1"}, {"world_size": 1, "rendezvous_url": ""}),
        (
            {**SLURM, "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_LOCALID": "1",
             "SLURM_STEP_NODELIST": "gpu[003-004]", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
            {"launcher": "srun", "rank": 5, "world_size": 8, "local_rank": 1, "local_world_size": 4, "node_rank": 1,
             "rendezvous_url": "tcp://gpu003:20539"},
        ),
        ({**SLURM, "SLURM_NNODES": "1"}, {"rendezvous_url": "file:slurm-77.0.0", "local_world_size": 8}),
        ({**SLURM, "MASTER_ADDR": "h", "MASTER_PORT": "9"}, {"rendezvous_url": "tcp://h:9"}),
        # A shell inside salloc has the job's variables but is no step: one process.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, {"launcher": "none", "world_size": 1}),
        (
            {**MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "a.b@1"},
            {"launcher": "mpirun", "rank": 1, "local_rank": 1, "rendezvous_url": "file:mpi-a-b-1-42"},
        ),
        ({"PMI_RANK": "2", "PMI_SIZE": "3"}, {"launcher": "mpirun", "rank": 2, "rendezvous_url": "file:mpi-job-42"}),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "9"}, {"rendezvous_url": "tcp://h:9"}),
        # The number among all jobs' processes of a node is not the number of the node.
        (
            {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1", "MASTER_ADDR": "h",
             "MASTER_PORT": "9"},
            {"node_rank": 0, "numbered": False},
        ),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "GROUP_RANK": "1"}, {"node_rank": 1, "numbered": True}),
        ({"RANK": "1", "WORLD_SIZE": "2"}, {"numbered": False}),
        ({**SLURM, "SLURM_NODEID": "0", "SLURM_LOCALID": "1"}, {"numbered": True}),
    ],
)  # fmt: skip
def test_placement_is_read_from_the_launchers_environment(environ, expected):
    found = asdict(detect_placement(environ, parent="42"))
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "4", "WORLD_SIZE": "4"}, ["rank=4", "[0, 4)"]),
        ({"RANK": "x", "WORLD_SIZE": "4"}, ["RANK='x'", "whole number"]),
        ({"OMPI_COMM_WORLD_RANK": "1"}, ["OMPI_COMM_WORLD_SIZE"]),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ["4 ranks of which 2 are on this host", "MASTER_ADDR"]),
        ({**SLURM, "SLURM_NNODES": "2"}, ["SLURM_STEP_NODELIST=''", "MASTER_ADDR"]),
    ],
)
def test_environments_that_contradict_themselves_are_explained(environ, words):
    with pytest.raises(ValueError) as caught:
        detect_placement(environ, parent="42")
    for word in words:
        assert word in str(caught.value)


TRAIN = """
import torch, unisono
from torch.utils.data import TensorDataset
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=4, progress=False)
for batch in trainer.batches(TensorDataset(torch.arange(36.0).view(12, 3) / 36), batch_size=6):
    trainer.step(lambda m, b: m(b[0]).square().sum(1), batch)
print(trainer.rank, trainer.world_size, trainer.digest())
"""


@pytest.mark.parametrize(
    ("environ", "reads"),
    [({}, False), ({"RANK": "0", "WORLD_SIZE": "1"}, False), ({"PMI_RANK": "0", "PMI_SIZE": "1"}, True)],
    ids=["alone", "torchrun", "MPICH"],
)
def test_a_rank_is_asked_for_without_reading_files_except_under_mpirun(monkeypatch, environ, reads):
    for name in ("RANK", "WORLD_SIZE", "PMI_RANK", "PMI_SIZE", *MPI, *SLURM):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    unisono.is_main()  # imports what it needs
    opened = []
    is_on = [True]
    sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" and is_on[0] else None)
    try:
        assert unisono.is_main()
    finally:
        is_on[0] = False  # the hook itself cannot be removed
    assert (f"/proc/{os.getppid()}/stat" in map(str, opened)) == reads


@pytest.mark.parametrize("launcher", ["srun", "Open MPI", "MPICH", "torchrun's"])
def test_ranks_meet_under_every_launchers_environment(rank_host, tmp_path, launcher):
    port = free_port()
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "temporary").mkdir()

    def start(n: int) -> list[str]:
        environment = {
            "srun": {"SLURM_PROCID": "{rank}", "SLURM_NTASKS": str(n), "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"},
            "Open MPI": {"OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": str(n)},
            "MPICH": {"PMI_RANK": "{rank}", "PMI_SIZE": str(n)},
            "torchrun's": {"RANK": "{rank}", "WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        }[launcher]
        environment |= dict.fromkeys(("TMPDIR", "XDG_RUNTIME_DIR"), str(tmp_path / "temporary"))
        codes, _ = rank_host.run(n, tmp_path / "train.py", folder=tmp_path, environment=environment)
        errors = [(tmp_path / f"err{rank}").read_text() for rank in range(n)]
        assert codes == [0] * n, errors
        assert not any("destroy_process_group" in error for error in errors), errors
        return [(tmp_path / f"out{rank}").read_text().strip() for rank in range(n)]

    both = start(2)
    digests = {line.split()[2] for line in both}
    assert [line.split()[:2] for line in both] == [["0", "2"], ["1", "2"]]
    assert digests == {start(1)[0].split()[2]}
    assert [path for path in (tmp_path / "temporary").rglob("*") if path.is_file()] == []
