"""Loggers: every event of rank 0 is written once, beside the steps; a failing one ends no run."""

from __future__ import annotations

import contextlib
import csv
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.loggers import (
    CSVLogger,
    Logger,
    MLflowLogger,
    OpenTelemetryLogger,
    PrometheusLogger,
    TensorBoardLogger,
    WandbLogger,
    logger,
)

DATA = TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3)
_OF_THE_MACHINE = {"time", "train/step_s", "train/memory"}
STAND_INS = str(Path(__file__).parent / "stand_ins")


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def make_trainer(*listeners, directory=None, every=5):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoints = unisono.Checkpoints(every_steps=every, every_epoch=False)
    return unisono.Trainer(
        model,
        optimizer,
        virtual_ranks=4,
        progress=False,
        listeners=listeners,
        directory=directory,
        checkpoints=checkpoints,
    )


def train(trainer, *, epochs=2, stop=None):
    """Ten steps and an evaluation in each epoch; stop is the number of steps after which it raises."""
    for epoch in trainer.epochs(epochs):
        for batch in trainer.batches(DATA, batch_size=4):
            trainer.step(loss, batch)
            trainer.log(warmth=trainer.steps_done / 2)
            if trainer.steps_done == stop:
                raise RuntimeError("stopped")
        trainer.evaluate(loss, DATA, name="loss")
        trainer.log(late=epoch)


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table(path):
    """What a file says of the run, and not of the machine."""
    return [{name: cell for name, cell in row.items() if name not in _OF_THE_MACHINE} for row in rows(path)]


@pytest.fixture
def stand_ins(monkeypatch):
    """Modules that have the signatures of wandb and mlflow, and note their calls."""
    monkeypatch.syspath_prepend(STAND_INS)
    import mlflow
    import wandb

    wandb.calls.clear()
    mlflow.calls.clear()
    yield wandb, mlflow
    for name in ("wandb", "mlflow", "mlflow.entities"):
        sys.modules.pop(name, None)


def test_a_table_has_a_line_for_each_step(tmp_path):
    path = tmp_path / "new" / "metrics.csv"
    with CSVLogger(path) as listener:
        seen = []
        train(make_trainer(listener, seen.append))
        found = rows(path)  # the end of the run has waited for it
    assert rows(path) == found
    steps = [event for event in seen if event["event"] == "step"]
    assert [int(row["step"]) for row in found] == list(range(1, 21))
    assert [int(row["epoch"]) for row in found] == [0] * 10 + [1] * 10
    assert [float(row["train/loss"]) for row in found] == [event["loss"] for event in steps]
    assert [float(row["time"]) for row in found] == [event["time"] for event in steps]
    assert [float(row["warmth"]) for row in found] == [step / 2 for step in range(1, 21)]
    assert [row["late"] for row in found] == [*[""] * 9, "0", *[""] * 9, "1"]
    values = [event["values"]["loss"]["value"] for event in seen if event["event"] == "evaluation"]
    assert [float(row["evaluation/loss"]) for row in found if row["evaluation/loss"]] == values
    assert not list(tmp_path.rglob(".*"))


def test_numbers_that_come_after_the_end_get_into_the_last_line(tmp_path):
    with CSVLogger(tmp_path / "x.csv") as listener:
        trainer = make_trainer(listener)
        train(trainer)
        trainer.log(final=7)
    assert len(rows(tmp_path / "x.csv")) == 20
    assert rows(tmp_path / "x.csv")[-1]["final"] == "7"


@pytest.mark.parametrize("tear", [False, True])
def test_a_resumed_run_goes_on_in_the_table_without_doubles(tmp_path, tear):
    path, whole = tmp_path / "metrics.csv", tmp_path / "whole.csv"
    with CSVLogger(whole) as listener:
        train(make_trainer(listener))
    with pytest.raises(RuntimeError, match="stopped"), CSVLogger(path) as listener:
        train(make_trainer(listener, directory=tmp_path / "run"), stop=13)
    assert len(rows(path)) == 13
    if tear:
        path.write_text(path.read_text()[:-5])
    with CSVLogger(path) as listener:
        trainer = make_trainer(listener, directory=tmp_path / "run")
        assert trainer.steps_done == 10
        trainer.log(early=1)
        train(trainer)
    found = table(path)
    early = [row.pop("early") for row in found]
    assert [int(row["step"]) for row in found] == list(range(1, 21))
    assert found == table(whole)
    assert early == [*[""] * 9, "1", *[""] * 10]


def test_another_run_does_not_write_into_the_table_of_the_first(tmp_path):
    path = tmp_path / "metrics.csv"
    for _ in range(3):
        with CSVLogger(path) as listener:
            train(make_trainer(listener), epochs=1)
    tables = [table(tmp_path / name) for name in ("metrics.csv", "metrics.1.csv", "metrics.2.csv")]
    assert [len(each) for each in tables] == [10, 10, 10]
    assert tables[0] == tables[1] == tables[2]


def test_a_file_of_somebody_else_is_left_alone(tmp_path, capfd):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    train(make_trainer(directory=tmp_path / "run"))
    with CSVLogger(tmp_path / "x.csv") as listener:
        train(make_trainer(listener, directory=tmp_path / "run"), epochs=3)
    assert (tmp_path / "x.csv").read_text() == "a,b\n1,2\n"
    assert "CSVLogger is off" in (said := capfd.readouterr().err)
    assert "x.csv is no file of CSVLogger: its first line is 'a,b'. Move it away" in said


def test_tensorboard_reads_the_curves_and_hides_what_is_done_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with pytest.raises(RuntimeError, match="stopped"), TensorBoardLogger(tmp_path / "tb") as listener:
        train(make_trainer(listener, directory=tmp_path / "run"), stop=13)
    time.sleep(1)  # the names of its files have seconds
    with TensorBoardLogger(tmp_path / "tb", flush_secs=5) as listener:
        seen = []
        train(make_trainer(listener, seen.append, directory=tmp_path / "run"))
    reader = EventAccumulator(str(tmp_path / "tb"))
    reader.Reload()
    losses = reader.Scalars("train/loss")
    assert [scalar.step for scalar in losses] == list(range(1, 21))
    again = [event for event in seen if event["event"] == "step"]
    assert [scalar.value for scalar in losses][-len(again) :] == pytest.approx([event["loss"] for event in again])
    assert [scalar.wall_time for scalar in losses][-len(again) :] == [event["time"] for event in again]
    # The checkpoint of step 10 is from before the evaluation, which is then done again.
    evaluations = reader.Scalars("evaluation/loss")
    assert [scalar.step for scalar in evaluations] == [10, 10, 20]
    assert evaluations[0].value == evaluations[1].value


def test_wandb_gets_steps_facts_and_an_end(stand_ins):
    wandb, _ = stand_ins
    with WandbLogger(project="digits", id="run7", resume="allow") as listener:
        seen = []
        train(make_trainer(listener, seen.append), epochs=1)
    first, second, *logged, last = wandb.calls
    assert first == ("init", {"project": "digits", "id": "run7", "resume": "allow"})
    assert second[:2] == ("config.update", {"allow_val_change": True})
    assert (
        second[2]["unisono"] | {"seed": 0, "virtual_ranks": 4, "parameters": 15, "world_size": 1}
        == second[2]["unisono"]
    )
    assert last == ("finish", {"exit_code": 0})
    assert [step for _, step, _ in logged] == sorted(step for _, step, _ in logged)
    losses = [values["train/loss"] for _, _, values in logged if "train/loss" in values]
    assert losses == [event["loss"] for event in seen if event["event"] == "step"]
    assert ("log", 3, {"epoch": 0, "warmth": 1.5}) in logged


def test_mlflow_gets_metrics_in_batches_parameters_and_an_end(stand_ins, monkeypatch):
    _, mlflow = stand_ins
    monkeypatch.setattr("unisono.loggers.mlflow_logger._MOST_METRICS", 7)
    with (
        pytest.raises(RuntimeError, match="stopped"),
        MLflowLogger("digits", run_name="first", tracking_uri="http://x", tags={"a": "b"}) as listener,
    ):
        trainer = make_trainer(listener)
        trainer.log(**{"a,b:c/d": 1})
        train(trainer, stop=9)
    first, asked, made, created, facts, *logged, last = mlflow.calls
    assert first == ("MlflowClient", "http://x")
    assert asked == ("get_experiment_by_name", "digits")
    assert made == ("create_experiment", "digits")
    assert created == ("create_run", "17", {"a": "b"}, "first")
    assert facts[:2] == ("log_batch", "r1")
    assert {(p.key, p.value) for p in facts[3]} == {
        ("unisono.virtual_ranks", "4"), ("unisono.seed", "0"), ("unisono.parameters", "15")
    }  # fmt: skip
    assert ("unisono.world_size", "1") in {(t.key, t.value) for t in facts[4]}
    assert all(len(call[2]) <= 7 for call in logged)
    metrics = [metric for call in logged for metric in call[2]]
    assert [m.step for m in metrics if m.key == "train/loss"] == list(range(1, 10))
    assert all(type(m.timestamp) is int and abs(m.timestamp / 1000 - time.time()) < 60 for m in metrics)
    assert metrics[0].key == "a_b_c/d"
    assert last == ("set_terminated", "r1", "FAILED")
    assert listener.run_id == "r1"
    mlflow.calls.clear()
    with MLflowLogger(run_id="r1") as listener:
        train(make_trainer(listener), epochs=1)
    assert mlflow.calls[:2] == [("MlflowClient", None), ("update_run", "r1", "RUNNING")]
    assert mlflow.calls[-1] == ("set_terminated", "r1", "FINISHED")


def test_texts_and_images_go_where_the_target_takes_them(stand_ins, tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    wandb, mlflow = stand_ins
    monkeypatch.chdir(tmp_path)
    listeners = [CSVLogger("x.csv"), TensorBoardLogger("tb"), WandbLogger(), MLflowLogger(), PrometheusLogger("x.prom")]
    with contextlib.ExitStack() as stack:
        for each in listeners:
            stack.enter_context(each)
        trainer = make_trainer(*listeners, directory="run")
        trainer.log(**{"a/b": "before the first step"})
        train(trainer, epochs=1)
        trainer.log(**{"a/b": "# said <b>", "dots": unisono.Image(torch.eye(9), caption="nine")})
        trainer.log(both="text", number=7)
    (file,) = Path("run/images").iterdir()
    reader = EventAccumulator("tb").Reload()
    (image,) = reader.Images("dots")
    assert (image.step, image.width, image.height) == (10, 0, 0)  # which TensorBoard takes from the file
    assert image.encoded_image_string == file.read_bytes()
    texts = reader.Tensors("a/b/text_summary")
    assert [(each.step, each.tensor_proto.string_val[0]) for each in texts] == [
        (0, b"before the first step"), (10, b"# said <b>")
    ]  # fmt: skip
    assert ("log", 10, {"epoch": 0, "both": "text", "number": 7}) in wandb.calls
    sent = {"a/b": "# said <b>", "dots": wandb.Image(str(file.absolute()), "nine")}
    assert ("log", 10, {"epoch": 0, **sent}) in wandb.calls
    assert ("log_text", "r1", "# said <b>", "texts/a_b/step-000000010.txt") in mlflow.calls
    assert ("log_artifact", "r1", str(file.absolute()), "images") in mlflow.calls
    lines = rows(Path("x.csv"))
    assert [int(line["step"]) for line in lines] == list(range(1, 11))
    assert lines[-1]["number"] == "7" and not {"a/b", "dots", "both"} & lines[0].keys()
    text = Path("x.prom").read_text()
    assert 'name="number"' in text and 'name="both"' not in text


@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard", "opentelemetry-api"])
def test_a_library_that_is_missing_is_named_with_the_command_that_installs_it(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wandb").mkdir()  # which wandb itself leaves behind, and Python takes for a package
    monkeypatch.syspath_prepend(str(tmp_path))
    if name == "tensorboard":
        for module in [key for key in sys.modules if key.startswith(("tensorboard", "torch.utils.tensorboard"))]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, name, None)
    if name == "opentelemetry-api":
        for module in [key for key in sys.modules if key.startswith("opentelemetry")]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, "opentelemetry", None)
    make = {
        "wandb": WandbLogger,
        "mlflow": MLflowLogger,
        "opentelemetry-api": OpenTelemetryLogger,
        "tensorboard": lambda: TensorBoardLogger("x"),
    }[name]
    with pytest.raises(
        ModuleNotFoundError, match=f"needs the package {name}, which is not installed: pip install {name}"
    ):
        make()
    sys.modules.pop("wandb", None)


class Slow(Logger):
    def __init__(self):
        super().__init__()
        self.may_go, self.steps, self.ended = threading.Event(), [], False

    def write(self, rows):
        self.may_go.wait()
        self.steps += [row.step for row in rows if "train/loss" in row.values]

    def finish(self, *, failed):
        self.ended = True


def test_a_slow_logger_is_not_waited_for_by_steps_but_at_the_end(tmp_path):
    listener = Slow()
    trainer = make_trainer(listener)
    for batch in trainer.batches(DATA, batch_size=4):
        trainer.step(loss, batch)
    assert not listener.flush(0.01)
    assert listener.steps == []
    listener.may_go.set()
    listener.close()
    assert listener.steps == list(range(1, 11)) and listener.ended
    trainer.log(after=1)
    listener.close()


def test_a_logger_that_is_far_behind_leaves_out_steps_and_says_so(monkeypatch, capfd):
    monkeypatch.setattr(logger, "_MOST_EVENTS", 6)
    listener = Slow()
    trainer = make_trainer(listener)
    listener({"time": 0.0, "event": "step", "epoch": 0, "total_steps": 0, "loss": 1.0})
    for batch in trainer.batches(DATA, batch_size=4):
        trainer.step(loss, batch)
    trainer.evaluate(loss, DATA)
    listener.may_go.set()
    listener.close()
    assert 3 <= len(listener.steps) < 11
    assert capfd.readouterr().err.count("Slow is 6 events behind, and leaves out steps") == 1


def test_one_that_never_ends_does_not_keep_the_process(capfd):
    listener = Slow()
    make_trainer(listener).log(a=1)
    listener.close(timeout_s=0.7)
    assert "Slow did not end within 0.7 s: 2 events may be lost" in capfd.readouterr().err
    listener.may_go.set()


@pytest.mark.parametrize("method", ["begin", "write", "finish"])
def test_a_failing_logger_warns_once_and_the_run_goes_on(method, capfd):
    def fail(self, *args, **kwargs):
        raise ConnectionError("no route to host")

    listener = type("Broken", (Logger,), {method: fail})()
    seen = []
    train(make_trainer(listener, seen.append))
    listener.close()
    assert len([event for event in seen if event["event"] == "step"]) == 20
    said = capfd.readouterr().err
    assert said.count("Broken is off, and the run goes on without it: ConnectionError: no route to host") == 1


EXIT = """
import sys
import unisono
sys.path.insert(0, {folder!r})
from test_loggers import *
CSVLogger = unisono.loggers.CSVLogger
trainer = make_trainer(CSVLogger("metrics.csv"), directory="run")
train(trainer, stop=STOP)
"""


@pytest.mark.parametrize(
    "end", ["normal", "exception", pytest.param("launcher", marks=pytest.mark.soak), "launcher exception"]
)
def test_nothing_is_lost_when_the_process_exits(end, tmp_path, monkeypatch, run_ranks, fork_ranks):
    monkeypatch.chdir(tmp_path)
    script = EXIT.format(folder=str(Path(__file__).parent)).replace("STOP", "17" if "exception" in end else "None")
    n = 2 if "launcher" in end else 1
    (run_ranks if n == 2 else fork_ranks)(n, script, code=1 if "exception" in end else 0)
    assert [int(row["step"]) for row in rows(tmp_path / "metrics.csv")] == list(
        range(1, 18 if "exception" in end else 21)
    )


def test_the_package_is_there_without_torch():
    code = "import sys, unisono.loggers; sys.exit('torch' in sys.modules or 'tensorboard' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_log_is_an_event(tmp_path):
    trainer = make_trainer(directory=tmp_path)
    train(trainer, epochs=1)
    trainer.log(**{"a/b": torch.tensor([[2.5]], requires_grad=True)}, count=3, bad=float("nan"), flag=True)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    logged = [event for event in events if event["event"] == "log"]
    assert len(logged) == 12
    assert logged[2] == {
        "time": logged[2]["time"], "event": "log", "epoch": 0, "total_steps": 3, "values": {"warmth": 1.5}
    }  # fmt: skip
    assert logged[-1]["values"] == {"a/b": 2.5, "count": 3, "bad": "nan", "flag": 1}
