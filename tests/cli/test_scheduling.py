"""`unisono run --on`: the batch script decides as it should, the manifest fits Kubernetes, and mistakes are refused."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from late_imports import LateModule
from unisono.cli.main import cli
from unisono.errors import LaunchError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """A working directory with a program."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('trained')\n")
    return tmp_path


def printed(capsys, *words: str) -> str:
    """What a dry run prints."""
    assert cli.main(["run", "--dry-run", *words], standalone_mode=False) == 0
    return capsys.readouterr().out


def refusal(*words: str) -> str:
    with pytest.raises((click.UsageError, LaunchError)) as caught:
        cli.main(["run", *words], standalone_mode=False)
    return str(caught.value.format_message() if isinstance(caught.value, click.UsageError) else caught.value)


# Slurm


def test_the_script_asks_for_machines_and_starts_one_launcher_on_each(capsys, folder):
    words = (
        "--on",
        "slurm",
        "--nnodes",
        "2:4",
        "-n",
        "8",
        "--time",
        "1-12",
        "--gpus-per-node",
        "8",
        "--cpus-per-node",
        "16",
    )
    script = printed(
        capsys, *words, "--sbatch=--qos=a b", "--preload", "json", "--preload=csv", "train.py", "--lr", "a 'b'"
    )
    options = re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)
    assert options == [
        "--job-name=train", "--nodes=2-4", "--ntasks-per-node=1", "--output=train-%j.log", "--open-mode=append",
        "--requeue", "--signal=TERM@120", "--cpus-per-task=16", "--gpus-per-node=8", "--time=1-12", f"--chdir={folder}",
        '"--qos=a b"',
    ]  # fmt: skip
    (step,) = (line for line in script.splitlines() if line.startswith("srun"))
    assert step == (
        f"srun --ntasks-per-node=1 --cpus-per-task=16 {sys.executable} -m unisono run --nproc-per-node 8 "
        """--preload json --preload csv --shutdown-timeout 110 train.py --lr 'a '"'"'b'"'"''"""
    )


def run_script(folder: Path, script: str, *, code: int, state: str, restarts: int = 0) -> tuple[int, list[str]]:
    """Run a batch script with programs in place of Slurm's; return its code and what it has asked scontrol for."""
    programs = folder / "bin"
    programs.mkdir()
    (folder / "state").write_text(state)
    for name, text in (
        ("srun", f"exit {code}"),
        ("scontrol", f'echo "$@" >> {folder}/asked\n[[ $1 != show ]] || cat {folder}/state'),
        ("sleep", ""),
    ):
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    variables = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
    done = subprocess.run(["bash"], input=script, text=True, env=variables, timeout=20, check=False)
    asked = (folder / "asked").read_text().splitlines() if (folder / "asked").exists() else []
    return done.returncode, [line for line in asked if not line.startswith("show")]


CALM = "   StartTime=2020-01-01T00:00:00 EndTime=2099-01-01T00:00:00 Deadline=N/A\n   PreemptTime=None\n"
PREEMPTED = CALM.replace("PreemptTime=None", "PreemptTime=2026-01-01T00:00:00")
AT_ITS_LIMIT = CALM.replace("2099", "2021")
WITHOUT_LIMIT = CALM.replace("2099-01-01T00:00:00", "Unknown")


@pytest.mark.parametrize(
    ("code", "state", "restarts", "requeued"),
    [
        (143, PREEMPTED, 0, True),
        (143, AT_ITS_LIMIT, 9, True),
        (143, AT_ITS_LIMIT, 10, False),
        (143, CALM, 0, False),  # somebody has sent SIGTERM
        (143, WITHOUT_LIMIT, 0, False),
        (1, AT_ITS_LIMIT, 0, False),  # the program has failed
        (0, PREEMPTED, 0, False),
    ],
)
def test_a_job_is_requeued_after_a_preemption_and_at_its_time_limit_only(
    capsys, folder, code, state, restarts, requeued
):
    script = printed(capsys, "--on", "slurm", "train.py")
    assert run_script(folder, script, code=code, state=state, restarts=restarts) == (
        code,
        ["requeue 7"] if requeued else [],
    )


def test_where_there_is_no_slurm_it_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "needs the program sbatch, which is not on this machine's PATH" in refusal("--on", "slurm", "train.py")


# Kubernetes


def check_model(value: Any, kind: str, path: str) -> None:
    """Compare a value with the published schema of a type, as the client's models state it."""
    if (inner := re.fullmatch(r"[lL]ist\[(.*)\]", kind)) is not None:
        assert isinstance(value, list), path
        for number, item in enumerate(value):
            check_model(item, inner[1], f"{path}[{number}]")
    elif (inner := re.fullmatch(r"[dD]ict[(\[]str, (.*)[)\]]", kind)) is not None:
        assert isinstance(value, dict), path
        for name, item in value.items():
            check_model(item, inner[1], f"{path}.{name}")
    elif kind in ("str", "int", "bool"):
        assert type(value).__name__ == kind, f"{path}: {value!r} is no {kind}"
    else:
        model = getattr(LateModule("kubernetes.client.models"), kind)
        names = {json_name: name for name, json_name in model.attribute_map.items()}
        assert isinstance(value, dict) and value.keys() <= names.keys(), f"{path}: {value.keys() - names.keys()}"
        arguments = {}
        for json_name, item in value.items():
            check_model(item, model.openapi_types[names[json_name]], f"{path}.{json_name}")
            arguments[names[json_name]] = item
        model(**arguments)  # raises ValueError where a required field is missing


def manifest(capsys, *words: str) -> list[dict[str, Any]]:
    text = printed(capsys, "--on", "kubernetes", "--image", "registry:5000/x:1", *words)
    objects = list(yaml.safe_load_all(text))
    for each in objects:
        check_model(each, f"V1{each['kind']}", each["kind"])
    return objects


def test_the_schema_finds_unknown_and_missing_fields():
    with pytest.raises(ValueError, match="template"):
        check_model({"completions": 1}, "V1JobSpec", "spec")
    with pytest.raises(AssertionError, match="completion"):
        check_model({"template": {}, "completion": 1}, "V1JobSpec", "spec")


def test_the_manifest_fits_the_schema_and_pods_find_each_other(capsys):
    words = ("--nnodes", "3", "-n", "4", "--gpus-per-node", "4", "--memory-per-node", "64Gi", "--cpus-per-node", "16")
    service, job = manifest(capsys, *words, "--volume", "runs:/runs", "/app/Train.py", "--note", "$(HOME) yes")
    assert (job["spec"]["completionMode"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Indexed", 3, 3)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # The names of pods follow from the Job's name, and their domain from the Service's.
    assert job["metadata"]["name"] == service["metadata"]["name"] == pod["subdomain"] == "train"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "train"}
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert container["command"] == ["unisono", "run"]
    assert container["args"] == [
        "--nnodes", "3", "--rdzv-endpoint", "train-0.train:29500", "--nproc-per-node", "4", "--shutdown-timeout", "110",
        "/app/Train.py", "--note", "$$(HOME) yes",
    ]  # fmt: skip
    (rank,) = container["env"]
    assert rank["name"] == "PET_NODE_RANK"
    assert container["resources"]["limits"] == {"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": "4"}
    assert {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]} == {
        "shm": "/dev/shm",
        "claim-0": "/runs",
    }


def test_preemptions_are_not_counted_and_ranks_have_time_to_save(capsys):
    (job,) = manifest(capsys, "--save-time", "300", "--requeues", "4", "-m", "package.train")
    pod = job["spec"]["template"]["spec"]
    assert job["metadata"]["name"] == "package-train"
    assert pod["terminationGracePeriodSeconds"] == 300
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy asks for it
    assert job["spec"]["backoffLimitPerIndex"] == 4
    ignored = [rule for rule in job["spec"]["podFailurePolicy"]["rules"] if rule["action"] == "Ignore"]
    assert ignored[0]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert ignored[1]["onExitCodes"]["values"] == [128 + 15]
    assert pod["containers"][0]["args"] == ["--module", "--shutdown-timeout", "290", "package.train"]
    assert "env" not in pod["containers"][0] and "subdomain" not in pod


# Mistakes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--time", "2:00:00", "train.py"], "--time is for a scheduler: give --on slurm, --on kubernetes or --on ray"),
        (["--dry-run", "train.py"], "--dry-run is for a scheduler"),
        (["--on", "slurm", "--time", "2h", "train.py"], "'2h' is not a time limit of Slurm"),
        (["--on", "slurm", "--image", "x", "train.py"], "--image is for --on kubernetes"),
        (["--on", "slurm", "--rdzv-endpoint", "a:1", "train.py"], "--rdzv-endpoint says where machines meet"),
        (["--on", "slurm", "--sbatch", "qos=a", "train.py"], "'qos=a' is not an option of sbatch"),
        (["--on", "slurm", "--save-time", "5", "train.py"], "'5' is not a time to save: give 20 to 65535"),
        (["--on", "slurm", "train2.py"], "no such file: 'train2.py'"),
        (["--on", "slurm", "--nnodes", "2", "--servers", "1", "train.py"], "--servers 1 is for one machine"),
        (["--on", "slurm", "--job-name", "A_b", "train.py"], "'A_b' is not a name for a job"),
        (["--on", "kubernetes", "train.py"], "--on kubernetes prints a manifest and starts nothing: add --dry-run"),
        (["--on", "kubernetes", "--dry-run", "train.py"], "--on kubernetes needs --image"),
        (
            ["--on", "kubernetes", "--dry-run", "--image", "x", "--nnodes", "2:4", "train.py"],
            "--nnodes 2:4 is a range, and a Job of Kubernetes has a fixed number of pods",
        ),
        (
            ["--on", "kubernetes", "--dry-run", "--image", "x", "--volume", "a:b", "train.py"],
            "'a:b' is not CLAIM:/PATH",
        ),
        (["--on", "pbs", "train.py"], "'pbs' is not one of 'slurm', 'kubernetes', 'ray'"),
        (["--on", "ray", "train.py"], "--on ray needs --num-workers, the number of ranks"),
        (["--on", "ray", "--num-workers", "0", "train.py"], "'0' is not a number of them"),
        (
            ["--on", "ray", "--num-workers", "2", "-n", "2", "train.py"],
            "--nproc-per-node says how many ranks",
        ),
        (["--on", "ray", "--num-workers", "2", "--nnodes", "2", "train.py"], "--nnodes says how many ranks are where"),
        (["--on", "ray", "--num-workers", "2", "--stdin", "0", "train.py"], "--stdin is for launchers that you start"),
        (["--on", "ray", "--num-workers", "2", "--dry-run", "train.py"], "--dry-run is for --on slurm and kubernetes"),
        (["--on", "slurm", "--num-workers", "2", "train.py"], "--num-workers is for --on ray, and this is --on slurm"),
        (
            ["--on", "ray", "--num-workers", "2", "--ray-address", "ray://a:1", "train.py"],
            "'ray://a:1' is an address for",
        ),
        (["--on", "ray", "--num-workers", "2", "other.py"], "no such file: 'other.py'"),
    ],
)
def test_a_mistake_is_refused_in_a_sentence(words, message):
    assert message in refusal(*words)
