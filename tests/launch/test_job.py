"""What is wrong with a job is said before any process starts."""

import pytest

from unisono.errors import LaunchError
from unisono.launch import Job, check_target


@pytest.mark.parametrize("ranks", [0, -1])
def test_a_job_has_ranks(ranks):
    with pytest.raises(ValueError, match=f"ranks={ranks}: a job has at least one rank"):
        Job(target="x.py", ranks=ranks)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_shutdown_takes_a_finite_time(seconds):
    with pytest.raises(ValueError, match="finite number of seconds"):
        Job(target="x.py", shutdown_timeout_s=seconds)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("trian.py", r"no such file: 'trian.py' .*did you mean 'train.py'\?"),
        ("nothing/at/all.py", "check the path"),
        ("package.train", "add -m if this is a module"),
        ("folder", r"'folder' is a directory.*run 'folder/__main__.py'"),
        ("binary", "null bytes|cannot contain null"),
    ],
)
def test_a_script_that_cannot_run_is_named_with_a_remedy(tmp_path, monkeypatch, target, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/__main__.py").touch()
    (tmp_path / "binary").write_bytes(b"\0\0")
    with pytest.raises((LaunchError, SyntaxError), match=message):
        check_target(Job(target=target))


@pytest.mark.parametrize(
    ("name", "message"),
    [("no_such_package.train", "no module named 'no_such_package'"), ("train.py", "leave out -m"), ("", "no module")],
)
def test_a_missing_module_is_named_with_a_remedy(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with pytest.raises(LaunchError, match=message):
        check_target(Job(target=name, module=True))


def test_a_good_target_passes(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import warnings\nassert (1, 'always true, which Python warns about')\n")
    check_target(Job(target=str(script)))
    check_target(Job(target="json.tool", module=True))
