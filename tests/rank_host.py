"""A process that has imported what ranks import, and forks the ranks of each job that a test asks for.

Most tests are about what ranks do, and not about how they are started: torch then need not be imported for each job.
It reads one job a line from standard input, as JSON, and answers with how each rank ended. The interpreter runs what
`serve` returns at its top level. What a rank starts does not import torch anew either: agents of `unisono.spawn` are
forked by a process of the rank's own (spawn_agents.py), and processes of `mp.spawn` from the rank itself.

With SLOW_RANKS=SEED in the environment each rank sleeps now and then, at random calls: a test that passes only if some
rank is faster than another fails for some seeds.
"""

import atexit
import faulthandler
import gc
import importlib
import json
import os
import random
import re
import runpy
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from kernel import use_huge_pages, wait_for_any
from launch_host import import_all
from spawn_agents import become_caller

_GRACE_S = 10.0

_FAILED_STAYS_S = 0.3
"""How long a rank that has failed is there for the others, as while the interpreter takes itself down: rank 0 has their
store, in which they look for what went wrong."""

_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
"""What ranks have besides what they are given. transformers reads its own when this process imports it."""

_SHOW_STACKS = signal.SIGRTMAX - 3
"""Makes a rank, and each process that it has forked, write its stacks to standard error."""

_IMPORTED_BY = {
    "sklearn": "sklearn.datasets",
    "import pytest": "pytest",
    "sklearn.linear_model": "sklearn.linear_model",
    "import torchmetrics": "torchmetrics",
    "import transformers": "transformers.models.llama.modeling_llama",
    "from transformers import": "transformers.models.llama.modeling_llama",
    "import BertConfig": "transformers.models.bert.modeling_bert",
    "transformers.T5Config": "transformers.models.t5.modeling_t5",
    "torch.compile(": "torch._inductor.compile_fx",
}
"""What scripts with a word in them import that takes each rank long, 0.2 seconds or more."""


def _serve() -> dict | None:
    """Fork ranks and wait for them, until there are no more jobs. Returns: in a rank, its job."""
    for line in iter(sys.stdin.readline, ""):
        job = json.loads(line)
        _import_for(Path(job["cwd"], job["script"]))
        pids = {}
        for rank in range(job["ranks"]):
            pid = os.fork()
            if not pid:
                return {**job, "rank": rank}
            pids[pid] = rank
        print(json.dumps(_wait(pids, watched=job["watched"], end_s=time.monotonic() + job["timeout_s"])), flush=True)
    return None


def _import_for(script: Path) -> None:
    """Import what ranks of the script would, as far as it takes long, for them and for those of later jobs."""
    source = _source(script)
    wanted = [name for word, name in _IMPORTED_BY.items() if word in source]
    if missing := [name for name in wanted if name not in sys.modules]:
        gc.disable()
        for name in missing:
            with suppress(ImportError):  # the ranks say so
                importlib.import_module(name)
        threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        assert len(threads) == 1, f"{missing} start threads, which forked ranks lack: {threads}"
        gc.enable()
        gc.collect()
        gc.freeze()
        use_huge_pages()


def _source(script: Path) -> str:
    """Return the text of a script with that of the modules beside it from which it imports."""
    text = script.read_text() if script.exists() else ""
    beside = [script.with_name(f"{name}.py") for name in re.findall(r"^from (\w+) import", text, re.MULTILINE)]
    return "\n".join([text, *(path.read_text() for path in beside if path.exists())])


def _wait(pids: dict[int, int], *, watched: bool, end_s: float) -> tuple[list[int | None], int | None]:
    """Wait for ranks; with `watched` all are ended when one fails.

    Returns: how each ended, None for those that had to be ended; and how the one ended that failed first.
    """
    codes: dict[int, int | None] = {}
    running, failures = dict(pids), []
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            codes[running.pop(pid)] = code = os.waitstatus_to_exitcode(status)
            if code:
                failures.append(code)
                end_s = min(end_s, time.monotonic() + _GRACE_S) if watched else end_s
        elif not pid:
            if time.monotonic() > end_s:
                break
            wait_for_any(running, end_s - time.monotonic())
    for pid in running:
        os.killpg(pid, _SHOW_STACKS)
    if running:
        time.sleep(0.5)
    for pid, rank in running.items():
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        codes[rank] = None
    ended = [codes[rank] for rank in range(len(pids))]
    return ended, (failures or ended if None in ended else failures or [0])[0]


def _become(job: dict) -> None:
    """Take a rank's place: its files, its environment, its arguments."""
    os.setsid()
    rank = job["rank"]
    for number, name in ((0, os.devnull), (1, f"{job['folder']}/out{rank}"), (2, f"{job['folder']}/err{rank}")):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC if number else os.O_RDONLY)
        os.dup2(file, number)
        os.close(file)
    faulthandler.register(_SHOW_STACKS)
    sys.stdin = open(0)  # noqa: SIM115  the old one is the host's
    os.environ.update({name: value.replace("{rank}", str(rank)) for name, value in job["environment"].items()})
    os.chdir(job["cwd"])
    sys.argv = [job["script"], *(argument.replace("{rank}", str(rank)) for argument in job["arguments"])]
    sys.path[0] = str(Path(job["script"]).parent)
    if seed := os.environ.get("SLOW_RANKS"):
        _slow_down(random.Random(f"{seed} {rank}"), str(Path(job["script"]).parent))


def _slow_down(rng: random.Random, folder: str) -> None:
    """Sleep for up to 0.3 s at some calls of functions of unisono and of the test's program.

    At three in a thousand at first, and at fewer the longer it has slept: a program of many calls has to end as well.
    """
    slept_s = 0.0

    def before(frame: FrameType, event: str, _: object) -> None:
        nonlocal slept_s
        file = frame.f_code.co_filename
        if event == "call" and ("unisono" in file or folder in file) and rng.random() < 0.003 / (1 + slept_s / 5):
            slept_s += (sleep_s := 0.3 * rng.random())
            time.sleep(sleep_s)

    threading.setprofile(before)
    sys.setprofile(before)


def _end(code: int) -> NoReturn:
    """End a rank in order, but leave what has been imported to the system: for that the interpreter takes 0.3 s."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (sys.__stdout__, sys.__stderr__):  # where the program has put others in their place
        if stream is not None and not stream.closed:
            stream.flush()
    if code:
        time.sleep(_FAILED_STAYS_S)
    os._exit(code & 0xFF)


def serve() -> str:
    """Fork ranks until there are no more jobs. Returns: what a rank goes on with."""
    gc.disable()  # what an import makes stays, and to look for garbage in it takes a sixth of the time
    import_all()
    import torch

    from unisono.launch.fast_exit import prepare

    assert threading.active_count() == 1
    torch.set_num_threads(1)
    prepare(programs=False)  # torch takes back none of its operators when a rank ends
    os.environ.update(_ENVIRONMENT)
    # What has been imported is not looked at by the collector of each rank, whose memory would be copied for it.
    gc.enable()
    gc.collect()
    gc.freeze()
    if not (found := _serve()):
        return ""
    torch.set_num_threads(1)  # a forked process makes its pool anew, which several threads must not do at once
    _become(found)
    source = _source(Path(sys.argv[0]))
    if "mp.spawn(" in source:
        torch.multiprocessing.spawn = partial(torch.multiprocessing.start_processes, start_method="fork")
    if "unisono.spawn(" in source:
        return become_caller()
    return "host.run()"


def run() -> NoReturn:
    """Run the program of a rank to its end, with the exit code that the interpreter gives its process."""
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except Exception as error:
        code = 1
        # They keep what the program's frames hold until the functions that run at the end have run.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(sys.last_type, sys.last_value, sys.last_traceback)
    _end(code)
