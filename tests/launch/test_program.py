"""The user's program finds itself run as Python runs it."""

import json
import py_compile
import shutil
import subprocess
import sys
import zipapp
import zipfile
from pathlib import Path

import pytest


def test_arguments_after_the_script_are_the_scripts(warm_launcher):
    warm_launcher.write("lib/helper.py", "WORD = 'found'")
    script = warm_launcher.write(
        "lib/script.py",
        """
        import json, sys
        import __main__, helper
        print(json.dumps([sys.argv, __name__, __main__.__file__, helper.WORD, __spec__, sys.stdin.read()]))
        """,
    )
    result = warm_launcher.run("run", "--nproc_per_node", "1", script, "-n", "3", "--help", "--", "-x=ü \udcff")
    expected = [[script, "-n", "3", "--help", "--", "-x=ü \udcff"], "__main__", str(warm_launcher.folder / script)]
    assert warm_launcher.values(result) == {0: [*expected, "found", None, ""]}, result.stderr


def test_a_module_runs_like_python_m(warm_launcher):
    warm_launcher.write("package/__init__.py", "")
    warm_launcher.write("package/part.py", "WORD = 'found'")
    warm_launcher.write(
        "package/__main__.py",
        """
        import json, sys
        from .part import WORD
        print(json.dumps([sys.argv, __name__, __package__, __spec__.name, WORD]))
        """,
    )
    result = warm_launcher.run("run", "-n", "1", "-m", "package", "-m", "x")
    path = str(warm_launcher.folder / "package/__main__.py")
    assert warm_launcher.values(result) == {0: [[path, "-m", "x"], "__main__", "package", "package.__main__", "found"]}


def test_objects_of_the_programs_classes_go_to_processes_that_start_afresh_and_come_back(warm_launcher):
    result = warm_launcher.run_script(
        """
        import json, multiprocessing, os, pickle

        class Item:
            def __init__(self, number):
                self.number = number

        class Items:
            def __len__(self):
                return 2

            def __getitem__(self, index):
                return Item(index)

        def put(queue):
            queue.put(Item(5))

        def found(batch):
            return batch[0]

        if __name__ == "__main__":
            from torch.utils.data import DataLoader

            assert type(pickle.loads(pickle.dumps(Items()))) is Items
            came = {}
            for method in ("spawn", "forkserver"):
                context = multiprocessing.get_context(method)
                # Queue.get raises in this thread; a Pool whose result cannot be read would wait for ever.
                queue = context.Queue()
                process = context.Process(target=put, args=(queue,))
                process.start()
                items = [queue.get(timeout=60)]
                process.join()
                queue.close()
                with context.Pool(1) as pool:
                    items += pool.map(Item, [6])
                    pool.close()
                    pool.join()
                if method == "spawn":
                    items += DataLoader(Items(), num_workers=1, multiprocessing_context=method, collate_fn=found)
                came[method] = [item.number for item in items if type(item) is Item]
            print(json.dumps(came))
        """,
        ranks=1,
    )
    assert (result.stderr, result.returncode) == ("", 0)
    assert warm_launcher.values(result) == {0: {"spawn": [5, 6, 0, 1], "forkserver": [5, 6]}}


def test_a_report_starts_in_the_users_code(warm_launcher):
    result = warm_launcher.run_script("def divide(x):\n    return x / 0\n\ndivide(1)\n", ranks=1)
    lines = [line.rstrip() for line in result.stderr.splitlines()]
    assert lines[:6] == [
        "unisono: rank 0 failed: ZeroDivisionError: division by zero",
        "",
        "  script.py:4 in <module>",
        "      divide(1)",
        "  script.py:2 in divide",
        "      return x / 0",
    ]
    assert lines[-1].split() == ["exit", "code", "1"]


def test_a_module_that_fails_to_import_shows_the_users_frames_only(warm_launcher):
    warm_launcher.write("package/__init__.py", "import no_such_thing")
    warm_launcher.write("package/__main__.py", "")
    result = warm_launcher.run("run", "-m", "package")
    lines = [line.rstrip() for line in result.stderr.splitlines()]
    assert lines[:4] == [
        "unisono: rank 0 failed: ModuleNotFoundError: No module named 'no_such_thing'",
        "",
        "  package/__init__.py:1 in <module>",
        "      import no_such_thing",
    ]
    assert not any("unisono/" in line for line in lines)


def test_a_missing_submodule_is_reported(warm_launcher):
    result = warm_launcher.run("run", "-n", "2", "-m", "json.nothing")
    assert result.returncode == 2
    # One rank may fail, and end the job, before the other has come so far.
    said = result.stderr.replace("all 2 ranks", "rank 0").replace("rank 1", "rank 0")
    assert said.startswith("unisono: rank 0 failed: ModuleNotFoundError: no module named 'json.nothing'")


def test_a_syntax_error_is_said_once_in_pythons_words(warm_launcher):
    result = warm_launcher.run_script("x = = 1\n")
    assert result.returncode == 1
    path = warm_launcher.folder / "script.py"
    assert result.stderr.splitlines() == [
        f'  File "{path}", line 1',
        "    x = = 1",
        "        ^",
        "SyntaxError: invalid syntax",
    ]


def test_ranks_differ_where_separate_processes_differ(warm_launcher):
    result = warm_launcher.run_script(
        """
        import atexit, json, os, random, sys
        import numpy as np
        import torch
        if os.environ["RANK"] == "0":
            assert os.getpgrp() == os.getpid() != os.getsid(0)
        atexit.register(lambda: print(json.dumps([random.random(), np.random.rand(), os.getpid()])))
        sys.exit()
        """
    )
    assert (result.returncode, result.stderr) == (0, "")
    first, second = warm_launcher.values(result).values()
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_modules_are_preloaded_once(warm_launcher):
    warm_launcher.write("heavy.py", "import os\nPID = os.getpid()")
    warm_launcher.environment["PYTHONPATH"] = str(warm_launcher.folder)
    script = warm_launcher.write("script.py", "import heavy, os, json\nprint(json.dumps([heavy.PID, os.getpid()]))")
    result = warm_launcher.run("run", "-n", "2", "--preload", "heavy", script)
    (first, own), (second, other) = warm_launcher.values(result).values()
    assert first == second and first not in (own, other)


IMPORTED = "import sys\nprint(*(name in sys.modules for name in ('torch._dynamo', 'unisono.trainer')))"


@pytest.mark.soak  # with a trainer, test_fresh_job.py has it
@pytest.mark.parametrize(
    ("module", "text", "preloaded"), [(False, "torch.optim", "True False"), (True, "unisono.Trainer", "True True")]
)
def test_what_all_ranks_would_import_is_imported_once(fresh_launcher, module, text, preloaded):
    fresh_launcher.write("script.py", f"{IMPORTED}  # {text}")
    result = fresh_launcher.run("run", "-n", "2", *(("-m", "script") if module else ("script.py",)))
    assert {line.split("] ")[-1] for line in result.stdout.splitlines()} == {preloaded}


@pytest.mark.parametrize(("text", "set_to"), [("unisono.Trainer(model)", "1"), ("Trainer(model)", "None")])
def test_large_tensors_lie_on_huge_pages_where_a_trainer_keeps_freed_memory(warm_launcher, text, set_to):
    source = f"import os\nprint(os.environ.get('THP_MEM_ALLOC_ENABLE'))  # {text}"
    result = warm_launcher.run("run", warm_launcher.write("script.py", source))
    assert result.stdout.split()[-1] == set_to


def test_a_module_that_cannot_be_preloaded_stops_the_job(warm_launcher):
    script = warm_launcher.write("script.py", "print('ran')")
    result = warm_launcher.run("run", "--preload", "no_such_thing", script)
    assert (result.returncode, result.stdout) == (2, "")
    assert "no module named 'no_such_thing'" in result.stderr
    warm_launcher.write("broken.py", "raise RuntimeError('cannot be imported')")
    warm_launcher.environment["PYTHONPATH"] = str(warm_launcher.folder)
    result = warm_launcher.run("run", "--preload", "broken", script)
    assert (result.returncode, result.stdout) == (1, "")
    lines = result.stderr.splitlines()
    assert "RuntimeError: cannot be imported" in lines
    assert lines[-1].startswith("unisono: ")


def test_files_of_the_user_do_not_hide_modules_that_torch_needs_and_one_rank_imports_what_it_uses(fresh_launcher):
    fresh_launcher.write("random.py", "raise SystemExit('the wrong random')")
    script = fresh_launcher.write("elsewhere/script.py", f"{IMPORTED}  # unisono.Trainer")
    # The installed command: `python -m` looks into the working directory before anything of ours runs.
    command = Path(sys.executable).with_name("unisono")
    done = subprocess.run(
        [command, "run", script],
        cwd=fresh_launcher.folder, env=fresh_launcher.environment, capture_output=True, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (b"[0] False False\n", b"")


TELL = """
    import json, os, sys
    import helper
    spec = __spec__ and [__spec__.name, __spec__.origin, type(__spec__.loader).__name__]
    facts = [sys.argv, __name__, __package__, __file__, __cached__, spec, type(__loader__).__name__, helper.WORD]
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps([*facts, sys.path[0], sys.modules["__main__"].__dict__ is globals()]))
"""


def test_archives_folders_and_compiled_scripts_run_as_by_python(warm_launcher):
    folder = warm_launcher.folder / "app"
    warm_launcher.write("app/__main__.py", TELL)
    warm_launcher.write("app/helper.py", "WORD = 'found'")
    warm_launcher.write("plain/helper.py", "WORD = 'found'")
    warm_launcher.write("odd/helper.py", "WORD = 'found'")
    zipapp.create_archive(folder, warm_launcher.folder / "app.pyz")
    py_compile.compile(str(folder / "__main__.py"), str(warm_launcher.folder / "plain/main.pyc"), dfile="main.py")
    shutil.copy(warm_launcher.folder / "plain/main.pyc", warm_launcher.folder / "odd/compiled")
    script = warm_launcher.write("run.py", TELL)
    warm_launcher.write("helper.py", "WORD = 'found'")
    for target in ("app", "app/", str(folder), "app.pyz", "plain/main.pyc", "odd/compiled", script):
        done = subprocess.run(
            [sys.executable, target, "-x"],
            cwd=warm_launcher.folder,
            env=warm_launcher.environment,
            capture_output=True,
            check=True,
        )
        result = warm_launcher.run("run", target, "-x")
        assert (result.stderr, result.returncode) == ("", 0)
        assert warm_launcher.values(result) == {0: json.loads(done.stdout)}, target


def test_what_cannot_be_run_is_said_once(warm_launcher):
    (warm_launcher.folder / "empty").mkdir()
    zipapp.create_archive(warm_launcher.folder / "empty", warm_launcher.folder / "empty.pyz", main="nothing:main")
    (warm_launcher.folder / "old.pyc").write_bytes(b"\x00\x01\r\n" + bytes(12))
    with zipfile.ZipFile(warm_launcher.folder / "no_main.pyz", "w") as archive:
        archive.writestr("other.py", "")
    warm_launcher.write("wrong/__main__.py", "x = = 1")
    for target, said, code in (
        ("empty", "unisono: there is no __main__.py in the directory 'empty'; name a script inside it", 2),
        ("no_main.pyz", "unisono: there is no __main__.py in the archive 'no_main.pyz'", 2),
        ("old.pyc", "unisono: 'old.pyc' was compiled by another version of Python", 2),
        ("wrong", f'  File "{warm_launcher.folder}/wrong', 1),
    ):
        result = warm_launcher.run("run", "-n", "2", target)
        assert (result.stderr[: len(said)], result.returncode) == (said, code)
