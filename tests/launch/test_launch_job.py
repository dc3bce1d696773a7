"""What is wrong with a job is said before any process starts."""

import os
from pathlib import Path

import pytest

from unisono.errors import LaunchError
from unisono.launch import LaunchJob, check_target
from unisono.launch.launch_job import Output


@pytest.mark.parametrize("ranks", [0, -1])
def test_a_job_has_ranks(ranks):
    with pytest.raises(ValueError, match=f"ranks={ranks}: a job has at least one rank"):
        LaunchJob(target="x.py", ranks=ranks)


@pytest.mark.parametrize("field", ["shutdown_timeout_s", "hang_report_s", "hang_abort_s"])
@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_times_are_finite(field, seconds):
    with pytest.raises(ValueError, match=f"{field}=.*finite number of seconds"):
        LaunchJob(target="x.py", **{field: seconds})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"master_port": 65536}, "master_port=65536"),
        ({"hang_abort_s": 0.0}, "above 0, or None"),
        ({"start_method": "thread"}, "must be 'fork' or 'spawn'"),
        ({"module": True, "python": False}, "exclude each other"),
        ({"preload": ("json",), "start_method": "spawn"}, "with --start-method spawn none is"),
        ({"preload": ("json",), "python": False}, "with --no-python none is"),
        ({"run_id": "../x", "output": Output(directory=Path("logs"))}, "cannot be the name of a log folder"),
    ],
)
def test_what_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        LaunchJob(target="x.py", **fields)


def test_a_name_of_a_job_is_free_without_log_files():
    assert LaunchJob(target="x.py", run_id="team/seven").run_id == "team/seven"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("trian.py", r"no such file: 'trian.py' .*did you mean 'train.py'\?"),
        ("nothing/at/all.py", "check the path"),
        ("package.train", "add -m if this is a module"),
        ("folder", "no __main__.py in the directory 'folder'; name a script inside it"),
        ("binary", "null bytes|cannot contain null"),
        ("train.py/inside", r"no such file: 'train.py/inside'"),
        ("pipe", "not a regular file, and every rank has to read it"),
        ("x" * 300, "cannot read .*File name too long"),
        ("train\0.py", "cannot read .*null"),
    ],
)
def test_a_script_that_cannot_run_is_named_with_a_remedy(tmp_path, monkeypatch, target, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(b"\0\0")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises((LaunchError, SyntaxError), match=message):
        check_target(LaunchJob(target=target))


@pytest.mark.parametrize(
    ("name", "message"),
    [("no_such_package.train", "no module named 'no_such_package'"), ("train.py", "leave out -m"), ("", "no module")],
)
def test_a_missing_module_is_named_with_a_remedy(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with pytest.raises(LaunchError, match=message):
        check_target(LaunchJob(target=name, module=True))


def test_a_module_is_looked_for_where_the_job_starts(tmp_path, monkeypatch):
    (tmp_path / "package_of_mine").mkdir()
    (tmp_path / "package_of_mine/train.py").touch()
    monkeypatch.chdir(tmp_path)
    check_target(LaunchJob(target="package_of_mine.train", module=True))
    with pytest.raises(LaunchError, match="no module named 'package_of_mine'"):
        check_target(LaunchJob(target="json.tool", module=True, preload=("package_of_mine",)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_script_that_may_not_be_read_is_named(tmp_path):
    script = tmp_path / "train.py"
    script.touch(mode=0o200)
    with pytest.raises(LaunchError, match=r"cannot read .*Permission denied"):
        check_target(LaunchJob(target=str(script)))


def test_a_program_that_is_not_python_is_not_compiled(tmp_path):
    (tmp_path / "train.sh").write_text("if [ 1 ]; then :; fi\n")
    check_target(LaunchJob(target=str(tmp_path / "train.sh"), python=False))


def test_a_good_target_passes(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import warnings\nassert (1, 'always true, which Python warns about')\n")
    check_target(LaunchJob(target=str(script)))
    check_target(LaunchJob(target="json.tool", module=True))
