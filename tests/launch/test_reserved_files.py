"""The launcher's files in a rank and the program's own do not get into each other's way."""

import pytest


@pytest.mark.parametrize(("method", "highest"), [("spawn", 1000), ("fork", "os.sysconf('SC_OPEN_MAX')")])
def test_a_rank_that_closes_all_files_fails_under_its_own_name(warm_launcher, method, highest):
    script = warm_launcher.write(
        "script.py",
        f"""
        import ctypes, os, sys, time
        if os.environ["RANK"] == "1":
            os.closerange(3, {highest})
            files = [open(f"mine{{number}}", "w") for number in range(100)]
            if sys.argv[1] == "crash":
                ctypes.string_at(0)
            raise ValueError("of rank 1")
        time.sleep(1000)
        """,
    )
    for how, said, code in (
        ("raise", "unisono: rank 1 failed: ValueError: of rank 1\n", 1),
        ("crash", "unisono: rank 1 was killed by SIGSEGV", 139),
    ):
        result = warm_launcher.run("run", "-n", "2", "--start-method", method, script, how)
        assert result.returncode == code
        assert result.stderr.startswith(said)
        assert "forkserver" not in result.stderr
        assert {(warm_launcher.folder / f"mine{number}").read_text() for number in range(100)} == {""}
        if highest == 1000 and how == "crash":
            assert "ctypes.string_at(0)" in result.stderr  # the fault handler's file was still open
