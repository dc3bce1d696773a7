"""A rank ends as its program would under Python: nothing that it does at its end is lost."""

import subprocess
import sys

import pytest

ENDINGS = """
    import atexit, ctypes, gzip, io, os, sys, threading, time, weakref
    import helper

    class Loud:
        def __init__(self, name):
            self.name = name
        def __del__(self):
            os.write(1, f"del {self.name}\\n".encode())

    class Upper(io.TextIOWrapper):
        def write(self, text):
            return super().write(text.upper())

    os.chdir(sys.argv[1])
    text = open("text", "w")
    text.write("text")
    packed = gzip.open("packed.gz", "wt")
    packed.write("packed")
    own = Upper(open("own", "wb"))
    own.write("own")
    raw = open("raw", "wb")
    raw.write(b"raw")
    sys.kept = open("kept", "w")
    sys.kept.write("kept elsewhere")
    circle = [open("circle", "w"), Loud("in a circle")]
    circle[0].write("in a circle")
    circle.append(circle)
    def in_a_frame():
        file = open("frame", "w")
        file.write("of a frame")
        raise SystemExit("a message")
    plain = Loud("plain")
    final = weakref.finalize(plain, lambda: os.write(1, b"finalized\\n"))
    atexit.register(lambda: print("exit function"))
    def late():
        time.sleep(0.1)
        print("thread")
    threading.Thread(target=late).start()
    ctypes.CDLL(None).puts(b"from C")
    if "replaced" in sys.argv:
        # What a program puts in place of functions, or of its output, may not work without its module.
        class Tee:
            def __init__(self, stream):
                self.stream = stream
            def write(self, text):
                os.fstat(1)
                return self.stream.write(text)
            def flush(self):
                os.fstat(1)
                self.stream.flush()
        sys.stdout = Tee(sys.stdout)
        exit_at_once = os._exit
        os._exit = lambda code: exit_at_once(time and code)
    in_a_frame()
"""
FILES = {"text", "packed.gz", "own", "raw", "kept", "circle", "frame", "helped"}


@pytest.mark.parametrize("more", [(), ("replaced",)], ids=["plain", "with functions replaced"])
def test_what_a_program_leaves_to_its_end_is_done_as_by_python(warm_launcher, more):
    warm_launcher.write("helper.py", "import os\nfile = open(os.environ['HELPED'], 'w')\nfile.write('helped')")
    script = warm_launcher.write("script.py", ENDINGS)
    found = {}
    for name in ("python", "unisono"):
        folder = warm_launcher.folder / name
        folder.mkdir()
        warm_launcher.environment["HELPED"] = str(folder / "helped")
        if name == "python":
            done = subprocess.run(
                [sys.executable, script, str(folder), *more],
                cwd=warm_launcher.folder, env=warm_launcher.environment, capture_output=True, text=True, check=False,
            )  # fmt: skip
            out, err = done.stdout.splitlines(), done.stderr
        else:
            done = warm_launcher.run("run", script, str(folder), *more)
            out, err = [line.removeprefix("[0] ") for line in done.stdout.splitlines()], done.stderr
            assert "exit code    1" in err
        assert "a message" in err
        assert done.returncode == 1
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        files["packed.gz"] = files["packed.gz"][10:]  # behind the header, which has the time
        assert set(files) == FILES
        found[name] = (files, sorted(out), out.index("thread") < out.index("exit function"))
    assert found["unisono"] == found["python"]


def test_threads_that_run_to_the_end_do_not_see_modules_without_content(warm_launcher):
    result = warm_launcher.run_script(
        """
        import threading, time
        def work():
            while True:
                time.sleep(0)
                max(abs(float(number)) for number in range(100))
        for _ in range(3):
            threading.Thread(target=work, daemon=True).start()
        file = open("file", "w")
        file.write("written")
        """,
        ranks=1,
    )
    assert (result.stdout, result.stderr, result.returncode) == ("", "", 0)
    assert (warm_launcher.folder / "file").read_text() == "written"


def test_the_interpreters_own_end_can_be_asked_for(warm_launcher):
    source = """
        import ctypes
        register = ctypes.PyDLL(None).Py_AtExit
        register.argtypes = [ctypes.c_void_p]
        # Called by C when the interpreter has been taken down.
        libc = ctypes.CDLL(None)
        assert register(ctypes.cast(libc.abort, ctypes.c_void_p)) == 0
    """
    assert warm_launcher.run_script(source, ranks=1).returncode == 0
    warm_launcher.environment["UNISONO_FULL_EXIT"] = "1"
    assert warm_launcher.run_script(source, ranks=1).returncode == 128 + 6


def test_standard_output_that_cannot_be_flushed_is_told(warm_launcher):
    keep_back = "sys.stdout.reconfigure(line_buffering=False, write_through=False)"
    result = warm_launcher.run_script(f"import os, sys\n{keep_back}\nsys.stdout.write('lost')\nos.close(1)", ranks=1)
    assert result.returncode == 120
