"""Log files: which streams have one, where they lie, and what a disk does to them."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.errors import LaunchError
from unisono.launch.launch_job import Output
from unisono.launch.output.logs import STREAMS, LogFile, RunLogs, make_run_folder, route


def fail(*arguments):
    raise AssertionError(arguments)


def test_streams_go_where_torchrun_sends_them(tmp_path):
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std

    parts = {"stdout": Std.OUT, "stderr": Std.ERR}
    choices = [Std.NONE, Std.OUT, Std.ERR, Std.ALL]

    def names(std):
        return frozenset(stream for stream, part in parts.items() if part in std)

    for redirected, teed, shown in itertools.product(choices, choices, [None, frozenset({0}), frozenset({1})]):
        if not redirected and not teed:
            continue  # torchrun then writes no files, also not with a folder
        # What is asked for holds for rank 0; rank 1 has the opposite of it.
        specs = DefaultLogsSpecs(
            str(tmp_path), {0: redirected, 1: Std.ALL & ~redirected}, {0: teed, 1: Std.ALL & ~teed}, shown
        )
        theirs = specs.reify({0: {}, 1: {}})
        output = Output(
            directory=tmp_path,
            redirected={0: names(redirected), 1: names(Std.ALL & ~redirected)},
            teed={0: names(teed), 1: names(Std.ALL & ~teed)},
            shown=shown,
        )
        for rank, (stream, files, tees) in itertools.product(
            range(2), [("stdout", theirs.stdouts, theirs.tee_stdouts), ("stderr", theirs.stderrs, theirs.tee_stderrs)]
        ):
            ours = route(output, rank, stream)
            assert ours.logged == files[rank].endswith(".log")
            assert ours.shown == (files[rank] == "" or rank in tees)


def test_a_folder_alone_means_everything_is_teed(tmp_path):
    ways = {(way.logged, way.shown) for way in (route(Output(directory=tmp_path), 5, stream) for stream in STREAMS)}
    assert ways == {(True, True)}


def test_the_null_device_means_no_files():
    everything = frozenset(STREAMS)
    output = Output(directory=Path(os.devnull), redirected={0: everything})
    assert not route(output, 0, "stdout").logged and route(output, 0, "stdout").shown
    assert RunLogs(output, run_id="run", complain=fail).folder is None


def test_the_folder_of_a_run_is_new(tmp_path):
    folders = [make_run_folder(tmp_path / "logs", "night").name for _ in range(3)]
    assert folders == ["night", "night-2", "night-3"]
    assert make_run_folder(tmp_path / "logs", "../../etc").parent == tmp_path / "logs"
    assert make_run_folder(tmp_path / "logs", "").name == "run"


@pytest.mark.parametrize("place", ["a file", "in a file", "in /proc"])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path, place):
    file = tmp_path / "file"
    file.touch()
    folder = {"a file": file, "in a file": file / "logs", "in /proc": Path("/proc/logs")}[place]
    with pytest.raises(LaunchError, match=r"cannot write log files in .*--log-dir"):
        make_run_folder(folder, "run")


def test_streams_without_a_folder_go_to_a_temporary_one(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said = []
    logs = RunLogs(Output(redirected={0: frozenset({"stdout"})}), run_id="run", complain=said.append)
    assert logs.folder.parent == tmp_path and str(logs.folder) in said[0]


def test_files_lie_by_attempt_and_rank(tmp_path):
    logs = RunLogs(Output(directory=tmp_path), run_id="night", complain=fail)
    for attempt, rank in itertools.product(range(2), range(2)):
        files = logs.open(rank, attempt)
        for name, file in files.items():
            file.write(b"%d %d " % (attempt, rank) + name.encode())
            file.close()
            file.write(b"too late")
    found = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.log")}
    assert found == {
        f"night/attempt_{attempt}/{rank}/{name}.log": f"{attempt} {rank} {name}"
        for attempt, rank, name in itertools.product(range(2), range(2), STREAMS)
    }


def test_a_full_disk_is_said_once_and_the_gap_is_marked(tmp_path):
    # A limit on the size of files stands for the disk; it is the process's own, so it needs one of its own.
    code = """
        import resource, sys
        from pathlib import Path
        from unisono.launch.launch_job import Output
        from unisono.launch.output.logs import RunLogs
        logs = RunLogs(Output(directory=Path(sys.argv[1])), run_id="run", complain=print)
        files = logs.open(0, 0)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        for size in (100, limit[0]):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
            files["stdout"].write(b"x" * 90)
            files["stdout"].write(b"y" * 90)
            files["stderr"].write(b"z" * 200)
    """
    done = subprocess.run(
        [sys.executable, "-c", "if True:" + code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.count("\n") == 1 and "File too large; the job goes on" in done.stdout
    text = (tmp_path / "run/attempt_0/0/stdout.log").read_text()
    note = "\n[unisono: 80 bytes are missing here, the disk did not take them]\n"
    assert text == "x" * 90 + "y" * 10 + note + "x" * 90 + "y" * 90


def test_a_file_that_is_there_is_not_written_over(tmp_path):
    (tmp_path / "stdout.log").write_text("kept")
    with pytest.raises(FileExistsError):
        LogFile(tmp_path / "stdout.log", complain=fail)
