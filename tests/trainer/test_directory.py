"""One directory is one run of one job: who holds it, that it has ended, and what its checkpoints overrule."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.errors import CheckpointError

DATA = TensorDataset(torch.randn(20, 6, generator=torch.Generator().manual_seed(0)))


def loss(model, batch):
    return model(batch[0]).square().sum(1)


def make_trainer(directory, *, lr=0.1, optimizer=torch.optim.SGD, model=None, **options):
    torch.manual_seed(0)
    model = nn.Linear(6, 3) if model is None else model
    made = optimizer(model.parameters(), lr=lr)
    if "scheduler" in options:
        options["scheduler"] = options["scheduler"](made)
    events = []
    trainer = unisono.Trainer(
        model, made, virtual_ranks=2, directory=directory, progress=False, listeners=[events.append], **options
    )
    trainer.seen = events
    return trainer


def fit(trainer, epochs=1, **options):
    return trainer.fit(loss, DATA, batch_size=10, epochs=epochs, **options)


HOLDER = """
import sys, torch, unisono
from torch.utils.data import TensorDataset
torch.manual_seed(0)
model = torch.nn.Linear(6, 3)
trainer = unisono.Trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=2, directory=sys.argv[1], progress=False
)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_directory_is_held_by_one_job_and_free_when_it_dies(tmp_path, monkeypatch):
    monkeypatch.setattr("unisono.state.lock._PATIENCE_S", 0.0)
    told, tell = os.pipe()
    holder = os.fork()
    if not holder:
        try:
            trainer = make_trainer(tmp_path / "run")
            os.write(tell, f"held {trainer.steps_done}".encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(tell)
    try:
        assert os.read(told, 10) == b"held 0"
        with pytest.raises(CheckpointError, match=rf"is in use: process {holder} on \S+, since .* Wait for it"):
            make_trainer(tmp_path / "run")
    finally:
        os.close(told)
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    assert len(fit(make_trainer(tmp_path / "run"))) == 1


def test_trainers_of_one_process_take_over(tmp_path):
    first = make_trainer(tmp_path)
    fit(first)
    second = make_trainer(tmp_path)
    fit(second, epochs=2)
    with pytest.raises(CheckpointError, match="a later Trainer of this process"):
        fit(first, epochs=2)
    assert make_trainer(tmp_path).steps_done == 4


def test_a_loop_that_is_over_gives_its_directory_back(fork_python, tmp_path, monkeypatch):
    monkeypatch.setattr("unisono.state.lock._PATIENCE_S", 0.0)
    first = make_trainer(tmp_path)
    fit(first)
    holder = tmp_path / "holder.py"
    holder.write_text(HOLDER)
    assert fork_python(holder, tmp_path) == ["held"]
    assert len(fit(first, epochs=2)) == 2  # nobody has gone on with it
    child = os.fork()
    if not child:  # a worker that outlives its parent does not keep the lock
        signal.pause()
    try:
        del first
        assert make_trainer(tmp_path).steps_done == 4
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_run_that_is_over_says_so(tmp_path, capsys):
    results = fit(make_trainer(tmp_path), epochs=2)
    assert len(results) == 2
    again = make_trainer(tmp_path)
    assert fit(again, epochs=2) == results
    (over,) = [event for event in again.seen if event["event"] == "over"]
    assert (over["epoch"], over["total_steps"], over["epochs"]) == (2, 4, 2)
    display = unisono.watch.Progress(sys.stdout, interactive=False)
    for event in again.seen:
        display.handle(event)
    assert "nothing to do: this run ended at step 4, after 2 epochs; asked for: 2 epochs" in capsys.readouterr().out


def test_settings_that_the_checkpoint_overrules_are_named(tmp_path):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    fit(make_trainer(tmp_path, scheduler=schedule))
    calm = make_trainer(tmp_path, scheduler=schedule)
    assert [event["event"] for event in calm.seen] == ["run", "resume"]
    changed = make_trainer(tmp_path, lr=0.5, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 3, gamma=0.5))
    (warning,) = [event["message"] for event in changed.seen if event["event"] == "warning"]
    assert "lr 0.025, at first 0.1 (the script says 0.5)" in warning
    assert "step_size of scheduler/ 1 (the script says 3)" in warning
    assert "write to optimizer.param_groups" in warning
    assert changed.optimizer.param_groups[0]["lr"] == 0.025


class Adapter(nn.Module):
    """Its state_dict leaves out the frozen base, as those of adapters do, and gives copies."""

    def __init__(self):
        super().__init__()
        self.base, self.low = nn.Linear(6, 3), nn.Linear(6, 3)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.base(x) + self.low(x)

    def state_dict(self, *args, **kwargs):
        found = super().state_dict(*args, **kwargs)
        return {name: value.clone() for name, value in found.items() if name.startswith("low")}


def test_a_resume_restores_what_an_overridden_state_dict_leaves_out(tmp_path):
    trainer = make_trainer(tmp_path, model=Adapter())
    fit(trainer)
    torch.manual_seed(5)
    resumed = make_trainer(tmp_path, model=Adapter())
    assert resumed.digest() == trainer.digest()
    assert torch.equal(resumed.model.base.weight, trainer.model.base.weight)
    assert not torch.equal(resumed.model.base.weight, Adapter().base.weight)


def test_state_that_only_state_dict_knows_is_refused_at_the_start(tmp_path):
    class Model(nn.Linear):
        def state_dict(self, *args, **kwargs):
            return {**super().state_dict(*args, **kwargs), "seen": torch.zeros(3)}

    with pytest.raises(CheckpointError, match=r"holds 'seen', a tensor of shape \[3\] that is no parameter"):
        make_trainer(tmp_path, model=Model(6, 3))


def test_an_object_that_refuses_its_state_leaves_the_weights_alone(tmp_path):
    class Counter:
        def state_dict(self):
            return {"n": 1}

        def load_state_dict(self, state):
            raise KeyError("m")

    fit(make_trainer(tmp_path, stateful={"counter": Counter()}))
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    before = model.weight.clone()
    with pytest.raises(CheckpointError, match=r"load_state_dict of 'stateful/counter' refused .* \(KeyError: 'm'\)"):
        make_trainer(tmp_path, model=model, stateful={"counter": Counter()})
    assert torch.equal(model.weight, before)


LAST = """
import sys, json, torch, unisono
from pathlib import Path
from torch.utils.data import TensorDataset
torch.manual_seed(0)
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
full = len(sys.argv) > 2
trainer = unisono.Trainer(
    model, optimizer, virtual_ranks=2, directory=sys.argv[1], progress=False, engine="collective"
)
data = TensorDataset(torch.randn(20, 6))
if full and trainer.is_main:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    import signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    trainer.fit(lambda m, b: m(b[0]).square().sum(1), data, batch_size=10, epochs=1)
    print(*sorted(path.name for path in Path(sys.argv[1], "checkpoints").glob("step-*")))
except unisono.errors.CheckpointError as error:
    print("refused", "was not written" in str(error))
"""


def test_all_ranks_leave_the_loop_when_the_last_checkpoint_is_there_or_has_failed(fork_ranks, tmp_path):
    job = fork_ranks(2, LAST, tmp_path / "good")
    assert [job.lines(rank) for rank in range(2)] == [["step-000000002"]] * 2
    job = fork_ranks(2, LAST, tmp_path / "full", "full")
    assert [job.lines(rank) for rank in range(2)] == [["refused True"]] * 2


def test_a_listener_that_raises_is_heard_and_the_checkpoint_stays(tmp_path):
    heard = []

    def listen(event):
        heard.append(event["event"])
        if event["event"] == "checkpoint":
            raise KeyError("mine")

    model = nn.Linear(6, 3)
    trainer = unisono.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        virtual_ranks=2,
        directory=tmp_path,
        checkpoints=unisono.Checkpoints(keep=1),
        progress=False,
        listeners=[listen],
    )
    raised = 0
    while trainer.epoch < 3:
        try:
            fit(trainer, epochs=3)
        except KeyError as error:
            assert error.args == ("mine",)
            raised += 1
    assert 1 <= raised <= heard.count("checkpoint")
    assert "warning" not in heard
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000006"]


def test_a_directory_that_is_gone_is_told(tmp_path):
    trainer = make_trainer(tmp_path / "run")
    fit(trainer)
    shutil.rmtree(tmp_path / "run")
    for call in (trainer.save, lambda: fit(trainer, epochs=2)):
        with pytest.raises(CheckpointError, match=r"of this run cannot be used any more: No such file .* Put it back"):
            call()


REFUSED = """
import os, shutil, sys, torch, unisono
from torch.utils.data import TensorDataset
from unisono.errors import UnisonoError
class Counter:
    fails = True
    def state_dict(self):
        if self.fails:
            raise OSError("mine")
        return {}
    def load_state_dict(self, state):
        pass
torch.manual_seed(0)
model, counter = torch.nn.Linear(6, 3), Counter()
trainer = unisono.Trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=2, directory=sys.argv[1], progress=False,
    engine="collective", stateful={"counter": counter},
    checkpoints=unisono.Checkpoints(every_epoch=False, every_steps=int(sys.argv[2]))
)
def fit(epochs):
    try:
        data = TensorDataset(torch.randn(20, 6))
        trainer.fit(lambda m, b: m(b[0]).square().sum(1), data, batch_size=10, epochs=epochs)
    except (UnisonoError, OSError) as error:
        print(type(error).__name__, error, flush=True)
fit(1)
if sys.argv[2] == "1":
    os._exit(0)  # gloo would wait
counter.fails = False
fit(2)
if trainer.is_main:
    shutil.rmtree(sys.argv[1])
fit(3)
print(trainer.steps_done)
"""


def test_all_ranks_learn_that_a_loop_cannot_begin_or_end(fork_ranks, tmp_path):
    job = fork_ranks(2, REFUSED, tmp_path / "run", 99)
    gone = f"the directory {tmp_path / 'run'} of this run cannot be used any more: No such file or directory"
    assert [job.lines(0)[0], job.lines(1)[0]] == ["OSError mine", "CheckpointError rank 0: OSError: mine"]
    for rank, words in enumerate((gone, f"rank 0: {gone}")):
        assert job.lines(rank)[1].startswith(f"CheckpointError {words}")
        assert job.lines(rank)[2] == "4"


def test_other_ranks_learn_of_a_failed_checkpoint_in_mid_run_at_their_next_call(fork_ranks, tmp_path):
    job = fork_ranks(2, REFUSED, tmp_path / "run", 1)
    assert job.lines(0) == ["OSError mine"]
    assert job.lines(1)[0].startswith("PeerError ")
    assert "rank 0" in job.lines(1)[0]


UNREADABLE = """
import torch, unisono
model = torch.nn.Linear(6, 3)
try:
    unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=2, directory="a\\0b")
except (ValueError, unisono.errors.PeerError) as error:
    print(type(error).__name__, error)
"""


def test_whatever_fails_while_rank_0_reads_is_told_to_all_ranks(fork_ranks):
    job = fork_ranks(2, UNREADABLE)
    assert job.lines(0) == ["ValueError embedded null byte"]
    assert job.lines(1)[0].endswith("what it finds: ValueError: embedded null byte")


def test_checkpoints_name_their_holder(tmp_path):
    trainer = make_trainer(tmp_path)
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert trainer.directory == tmp_path


RESUMED = """
import sys, torch, unisono
from pathlib import Path
from torch.utils.data import TensorDataset

def nbytes(field):
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(6)])
optimizer = torch.optim.AdamW(model.parameters())
Path("/proc/self/clear_refs").write_text("5")
before = nbytes("VmRSS")
trainer = unisono.Trainer(
    model, optimizer, virtual_ranks=2, directory=sys.argv[1], progress=False, engine="collective"
)
print(nbytes("VmHWM") - before)
trainer.fit(lambda m, b: m(b[0]).square().mean(1), TensorDataset(torch.randn(4, 1024)), batch_size=4, epochs=1)
"""


def test_a_resume_holds_a_checkpoint_once_on_each_rank(fork_ranks, tmp_path):
    fork_ranks(2, RESUMED, tmp_path / "run")
    (path,) = (tmp_path / "run" / "checkpoints").iterdir()
    nbytes = sum(file.stat().st_size for file in path.iterdir())
    assert nbytes > 70e6
    job = fork_ranks(2, RESUMED, tmp_path / "run")
    for rank in range(2):
        (peak,) = map(int, job.lines(rank))
        assert peak < 1.5 * nbytes, f"rank {rank} took {peak:,} bytes for {nbytes:,}"
