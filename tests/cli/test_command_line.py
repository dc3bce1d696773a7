"""The command line is quick, and what the user got wrong is one line."""

import subprocess
import sys

import pytest


def unisono(*arguments, python=()):
    return subprocess.run(
        [sys.executable, *python, "-m", "unisono", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("arguments", [[], ["--help"], ["run", "--help"]])
def test_help_needs_neither_torch_nor_rich(arguments):
    result = unisono(*arguments, python=["-X", "importtime"])
    assert result.returncode == 0
    assert result.stdout.startswith("Usage: unisono")
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "click" in imported
    assert not imported & {"torch", "rich", "numpy"}


def test_the_agent_of_a_running_job_does_not_import_torch(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import torch\n")
    result = unisono("run", str(script), python=["-X", "importtime"])
    assert result.returncode == 0
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "unisono" in imported
    assert not imported & {"torch", "rich", "numpy"}


def test_the_version_is_the_packages():
    result = unisono("--version")
    assert result.returncode == 0
    assert result.stdout.startswith("unisono ")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["run"], "no program given"),
        (["run", "-n", "0", "x.py"], "'0' is not a number of ranks: give 1 or more"),
        (["run", "-n", "two", "x.py"], "'two' is not a number of ranks"),
        (["run", "--ranks", "2", "x.py"], "--ranks"),
        (["run", "--shutdown-timeout", "-1", "x.py"], "shutdown_timeout_s=-1.0"),
        (["run", "no_such_script.py"], "no such file: 'no_such_script.py'"),
        (["run", "/"], "'/' is a directory"),
        (["run", "-m", "no_such_module"], "no module named 'no_such_module'"),
        (["walk"], "walk"),
    ],
)
def test_a_mistake_is_one_line_with_exit_code_2(arguments, part):
    result = unisono(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("unisono: ") and result.stderr.count("\n") == 1
    assert part in result.stderr


def test_a_job_runs_with_closed_streams(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\nprint('out')\n")
    command = ["sh", "-c", '"$0" -m unisono run -n 2 "$1" <&- >&- 2>&-', sys.executable, str(script)]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
    assert (tmp_path / "ran").exists()
