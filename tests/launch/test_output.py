"""What ranks print arrives whole, in order and with the rank in front."""

import os
import socket

from unisono.launch.output.streams import Prefixes, Sink, wants_colour


def test_colour_is_for_terminals():
    assert Prefixes(colour=True).of({0}) == b"\x1b[36m[0]\x1b[0m "
    assert Prefixes(colour=True).of({0, 1, 2}) == b"\x1b[1m[0-2]\x1b[0m "
    assert not wants_colour({}, terminal=False)
    assert not wants_colour({"TERM": "dumb"}, terminal=True)
    assert wants_colour({"NO_COLOR": ""}, terminal=True)


def test_lines_begin_as_a_template_says(run_ranks):
    program = "import os\nprint('own', os.environ['RANK'])\n"
    template = "${hostname} ${role_name}${local_rank} ${rank} $5 ${unknown}> "
    job = run_ranks(2, program, flags=["--role", "actor", "--log-line-prefix-template", template])
    assert set(job.out.splitlines()) == {
        f"{socket.gethostname()} actor{rank} {rank} $5 ${{unknown}}> own {rank}" for rank in range(2)
    }


def test_a_template_comes_from_torchruns_variable_too(run_ranks, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "rank ${rank}: ")
    lines = run_ranks(2, "import os\nprint('own', os.environ['RANK'])\n").out.splitlines()
    assert sorted(lines) == ["rank 0: own 0", "rank 1: own 1"]


def test_local_ranks_of_a_template_count_from_0_on_each_host():
    prefixes = Prefixes(colour=True, template="${local_rank}/${rank} ", number_of=lambda rank: rank - 4)
    assert prefixes.of({4, 5}) == b"\x1b[1m0-1/4-5 \x1b[0m"


def test_a_stream_that_is_not_read_does_not_block():
    read, write = os.pipe()
    sink = Sink(write)
    data = b"".join(b"%d\n" % number for number in range(300_000))
    sink.write(data)
    assert sink.waiting and sink.full
    received = b""
    while sink.waiting:
        received += os.read(read, 1 << 16)
        sink.pump()
    os.close(write)
    while piece := os.read(read, 1 << 16):
        received += piece
    os.close(read)
    assert received == data


def test_a_stream_without_reader_is_broken():
    read, write = os.pipe()
    os.close(read)
    sink = Sink(write)
    sink.write(b"a\n")
    assert sink.broken and not sink.waiting
    sink.write(b"b\n")
    os.close(write)


def test_lines_of_four_ranks_are_whole_and_in_order(warm_launcher):
    result = warm_launcher.run_script(
        """
        import os, sys
        rank = os.environ["RANK"]
        for number in range(2000):
            sys.stdout.write(f"{rank}:")
            if number % 100 == 0:
                sys.stdout.flush()
            print(number, "x" * (number % 200))
            if number % 2 == 0:
                print(rank, number, file=sys.stderr)
        os.write(1, b"bytes \\xff of %d\\n" % int(rank))
        os.write(2, b"no line end in %d" % int(rank))
        """,
        ranks=4,
    )
    assert result.returncode == 0
    out, err = result.stdout.splitlines(), result.stderr.splitlines()
    for rank in range(4):
        expected = [f"[{rank}] {rank}:{number} {'x' * (number % 200)}" for number in range(2000)]
        assert [line for line in out if line.startswith(f"[{rank}] ")] == [
            *expected,
            f"[{rank}] bytes \udcff of {rank}",
        ]
        expected = [f"[{rank}] {rank} {number}" for number in range(0, 2000, 2)]
        assert [line for line in err if line.startswith(f"[{rank}] ")] == [*expected, f"[{rank}] no line end in {rank}"]
    assert (len(out), len(err)) == (4 * 2001, 4 * 1001)


def test_a_print_appears_at_once(warm_launcher):
    script = warm_launcher.write("script.py", "import sys, time\nprint('here')\ntime.sleep(100)")
    with warm_launcher.start("run", script) as job:
        assert job.stdout.readline() == b"[0] here\n"
        job.terminate()
        assert job.wait(timeout=30) == 143


def test_the_job_ends_with_the_reader_of_its_output(warm_launcher):
    script = warm_launcher.write("script.py", "import time\nwhile True:\n    print('line')\n    time.sleep(0.001)")
    with warm_launcher.start("run", "-n", "2", script) as job:
        job.stdout.readline()
        job.stdout.close()
        assert job.stderr.read() == b"unisono: standard output was closed; 2 ranks ended\n"
        assert job.wait(timeout=30) == 141
