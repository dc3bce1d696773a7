"""The command line is quick, and what the user got wrong is one line."""

import os
import socket
import subprocess
import sys

import pytest

from launcher import Launcher


def unisono(*arguments, python=(), folder=None, **variables):
    return subprocess.run(
        [sys.executable, *python, "-m", "unisono", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=folder,
        env={**os.environ, **variables},
    )


@pytest.mark.parametrize("arguments", [[], ["--help"], ["run", "--help"]])
def test_help_needs_neither_torch_nor_rich(arguments):
    result = unisono(*arguments, python=["-X", "importtime"])
    assert result.returncode == 0
    assert result.stdout.startswith("Usage: unisono")
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "click" in imported
    assert not imported & {"torch", "rich", "numpy"}


def test_the_version_is_the_packages():
    result = unisono("--version")
    assert result.returncode == 0
    assert result.stdout.startswith("unisono ")


MISTAKES = [
    (["run"], "no program given"),
    (["run", "-n", "0", "x.py"], "-n '0' is not a number of ranks: give 1 or more"),
    (["run", "-n", "two", "x.py"], "-n 'two' is not a number of ranks"),
    (["run", "--nproc_per_node=-3", "x.py"], "--nproc-per-node '-3' is not a number of ranks"),
    (["run", "--ranks", "2", "x.py"], "no flag --ranks: did you mean --nproc-per-node?"),
    (["run", "--nprok", "2", "x.py"], "no flag --nprok: did you mean --nproc-per-node?"),
    (["run", "--max_restart_s=2", "x.py"], "no flag --max-restart-s: did you mean --max-restarts?"),
    (["run", "--lr", "2", "x.py"], "no flag --lr: flags of the program go behind it"),
    (["run", "--rdzv", "c10d", "x.py"], "--rdzv-endpoint, --rdzv-id or --rdzv-token-file"),
    (["run", "--role"], "'--role' requires an argument"),
    (["run", "--nnodes", "2", "x.py"], "--nnodes 2 needs to know where hosts meet"),
    (["run", "--nnodes", "4:2", "x.py"], "--nnodes '4:2' is an empty range: write MIN:MAX"),
    (["run", "--nnodes", "2", "--rdzv-endpoint", "10.0.0.256:1", "-m", "json"], "cannot be resolved"),
    (["run", "--nnodes", "2", "--standalone", "--rdzv-endpoint", "a:1", "x.py"], "--standalone is for one machine"),
    (
        ["run", "--nnodes", "2", "--rdzv-endpoint", "a:1", "--servers", "1", "x.py"],
        "--servers 1 is for one machine, and a job on several shares no memory with servers of tables: leave it out",
    ),
    (["run", "--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "a:1", "x.py"], "--node-rank 2 is no number of 2"),
    (
        ["run", "--nnodes", "2", "--rdzv-endpoint", "a:1", "--rdzv-conf", "jointimeout=3", "x.py"],
        "none of join_timeout",
    ),
    (["run", "--node-rank", "1", "x.py"], "--node-rank 1 is not 0"),
    (["run", "--master-addr", "192.0.2.1", "x.py"], "--master-addr '192.0.2.1' is not this machine"),
    (["run", "--rdzv-endpoint", "192.0.2.1:1", "x.py"], "'192.0.2.1' is not this machine"),
    (["run", "--rdzv-endpoint", "localhost:port", "x.py"], "is not a port"),
    (["run", "--rdzv-backend", "etcd", "x.py"], "--rdzv-backend 'etcd' is neither c10d nor static"),
    (["run", "--master-port", "65536", "x.py"], "--master-port '65536' is not a port"),
    (["run", "--start-method", "thread", "x.py"], "--start-method"),
    (["run", "--max-restarts", "-1", "x.py"], "--max-restarts '-1' is not a count"),
    (["run", "--shutdown-timeout", "-1", "x.py"], "--shutdown-timeout '-1' is not a number of seconds"),
    (["run", "--hang-report", "nan", "x.py"], "--hang-report 'nan' is not a number of seconds"),
    (["run", "--hang-abort", "0", "x.py"], "--hang-abort 0 would end every job"),
    (["run", "--stuck-timeout", "0", "x.py"], "--stuck-timeout 0 would kill every rank"),
    (["run", "--signals-to-handle", "SIGTRM", "x.py"], "did you mean SIGTERM?"),
    (["run", "--signals-to-handle", "SIGKILL", "x.py"], "no process can handle"),
    (["run", "--redirects", "4", "x.py"], "--redirects '4' is not a choice of streams"),
    (["run", "--cpu-backend", "mpi", "x.py"], "'mpi' is not one of 'gloo', 'shm'"),
    (["run", "--cpu-backend", "shm", "--no-python", "ls"], "--cpu-backend shm changes torch within ranks: leave out"),
    (["run", "-t", "0:1;1:2", "x.py"], "-t '0:1;1:2' is not a choice of streams"),
    (["run", "--local-ranks-filter", "0-3", "x.py"], "'0-3' is not a list of ranks"),
    (["run", "--numa-binding", "core", "x.py"], "--numa-binding"),
    (["run", "--logs-specs", "mine", "x.py"], "a plugin of torchrun"),
    (["run", "-m", "--no-python", "x"], "exclude each other"),
    (
        ["run", "--start-method", "spawn", "--preload", "json", "x.py"],
        "--preload imports modules before ranks are forked",
    ),
    (["run", "--log-dir", "logs", "--rdzv-id", "a/b", "x.py"], "run_id='a/b' cannot be the name of a log folder"),
    (["run", "no_such_script.py"], "no such file: 'no_such_script.py'"),
    (["run", "/"], "there is no __main__.py in the directory '/'"),
    (["run", os.devnull], "is not a regular file"),
    (["run", "-m", "no_such_module"], "no module named 'no_such_module'"),
    (["run", "--no-python", "no_such_program"], "no program named 'no_such_program'"),
    (["walk"], "walk"),
]


@pytest.mark.parametrize(("arguments", "part"), MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES])
def test_a_mistake_is_one_line_with_exit_code_2(arguments, part, tmp_path, launch_host):
    result = Launcher(tmp_path, launch_host).run(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("unisono: ") and result.stderr.count("\n") == 1
    assert part in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_in_a_variable_names_the_variable():
    result = unisono("run", "x.py", PET_NPROC_PER_NODE="two")
    assert result.returncode == 2
    assert "variable PET_NPROC_PER_NODE 'two' is not a number of ranks" in result.stderr


@pytest.fixture
def script(tmp_path):
    """A program that tells whether it was started."""
    path = tmp_path / "script.py"
    path.write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\nprint('out')\n")
    return path


@pytest.mark.parametrize("flags", [["--master-port", "{}"], ["--rdzv-endpoint", "localhost:{}"]])
def test_a_busy_port_is_named_before_anything_starts(script, flags):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = unisono("run", *(flag.format(port) for flag in flags), str(script))
    assert result.returncode == 2
    assert f"port {port} of 127.0.0.1 is in use" in result.stderr and result.stderr.count("\n") == 1
    assert not (script.parent / "ran").exists()


def test_a_log_folder_that_cannot_be_written_is_named_before_anything_starts(script):
    for folder, reason in ((str(script), "it is a file"), (f"{script}/logs", "Not a directory"), ("/proc/logs", "")):
        result = unisono("run", "--log-dir", folder, str(script))
        assert result.returncode == 2
        assert f"cannot write into the log folder '{folder}': {reason}" in result.stderr
        assert result.stderr.count("\n") == 1
    assert not (script.parent / "ran").exists()


def test_more_ranks_than_gpus_are_refused_if_the_script_asks_for_nccl(script):
    script.write_text("import torch.distributed as dist\ndist.init_process_group('nccl')\n")
    result = unisono("run", "-n", "2", str(script), CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 2
    assert "asks for nccl" in result.stderr and "no GPU that torch can use, for 2 ranks" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_job_runs_with_closed_streams(script):
    command = ["sh", "-c", '"$0" -m unisono run -n 2 "$1" <&- >&- 2>&-', sys.executable, str(script)]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
    assert (script.parent / "ran").exists()


def test_a_shell_can_complete_flags(monkeypatch):
    monkeypatch.setenv("_UNISONO_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "unisono run --hang")
    monkeypatch.setenv("COMP_CWORD", "2")
    done = subprocess.run([sys.executable, "-m", "unisono"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["plain,--hang-report", "plain,--hang-abort"]
