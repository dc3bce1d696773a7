"""The plain look: what a file, a CI log and a dumb terminal get, line by line."""

import errno
import io
import subprocess
import sys

import pytest
from replay import ACCURACY, LOSS, Script, bar, text_of

from unisono.watch import EventLog, Progress


@pytest.fixture
def plain():
    return Script(io.StringIO(), interactive=False)


def test_plain_look_of_a_run(plain):
    plain.run()
    for epoch in range(2):
        plain.epoch(epoch, epochs=2)
        plain.steps(epoch, range(12), loss=0.8123 if epoch == 0 else 0.00012)
        plain.checkpoint(12 * epoch + 12)
        plain.evaluation(epoch, accuracy=ACCURACY, loss=LOSS)
    plain("end", total_steps=24, seconds=3.4)
    plain.progress.close()
    assert text_of(plain) == (
        "unisono: 2 ranks, 8 virtual ranks, 27,098 parameters, cpu, runs/digits\n"
        "epoch 1/2   12/12 steps   loss 0.8123       1,000 samples/s     1.2 s   lr 0.1\n"
        "epoch 1/2   accuracy 0.9111 (328/360)   loss 2.1034\n"
        "epoch 2/2   12/12 steps   loss 1.20e-04     1,000 samples/s     1.2 s   lr 0.1\n"
        "epoch 2/2   accuracy 0.9111 (328/360)   loss 2.1034\n"
        "finished at step 24 after 3.4 s, 1,000 samples/s\n"
    )


def test_plain_look_of_a_model_that_has_been_divided_into_stages(plain):
    division = {
        "stages": ["layers.3", "head"],
        "shares": [0.4, 0.35, 0.25],
        "nbytes": [1_200_000_000, 42_000_000, 950_000],
    }
    step = {"schedule": "1f1b", "micro_batches": 8, "step_s": 0.2104, "waiting": 0.2}
    plain("pipeline", **division, **step, least_step_s=0.2, advised_micro_batches=32, advised_waiting=0.06)
    plain("pipeline", **division, **step, least_step_s=0.2, advised_micro_batches=None, advised_waiting=None)
    assert text_of(plain).splitlines()[:3] == [
        "3 stages, of 40%, 35%, 25% of the time and 1.20 GB, 42.0 MB, 0.95 MB, beginning with layers.3, head",
        "1f1b: a step of 210 ms is expected, within 5% of the least possible; ranks wait 20% of it, or 6% with 32 "
        "micro-batches instead of 8 (more virtual ranks)",
        "3 stages, of 40%, 35%, 25% of the time and 1.20 GB, 42.0 MB, 0.95 MB, beginning with layers.3, head",
    ]
    assert text_of(plain).endswith("least possible; ranks wait 20% of it\n")


def test_plain_look_of_a_resumed_long_epoch_has_a_line_every_ten_seconds(plain):
    plain.run(directory=None, world_size=1)
    plain("resume", path="runs/digits/7", epoch=2, step=7, total_steps=31)
    plain.epoch(2, epochs=10, first_step=7)
    plain.steps(2, range(7, 12), step_s=6.0)
    plain("end", total_steps=36, seconds=31.0)
    assert text_of(plain) == (
        "unisono: 1 rank, 8 virtual ranks, 27,098 parameters, cpu\n"
        "resumed after step 31, in epoch 3: runs/digits/7\n"
        "epoch  3/10    9/12 steps   loss 0.8123        16.7 samples/s    12.0 s   0:00:18 left   lr 0.1\n"
        "epoch  3/10   11/12 steps   loss 0.8123        16.7 samples/s    24.0 s   0:00:06 left   lr 0.1\n"
        "epoch  3/10   12/12 steps   loss 0.8123        16.7 samples/s    30.0 s   lr 0.1\n"
    )


def test_the_loss_is_the_mean_of_the_epoch_and_before_its_end_of_the_steps_since_the_last_line(plain):
    plain.epoch(0, epochs=1, steps=6)
    for step, loss in enumerate((8.0, 6.0, 4.0, 2.0, 1.0, 1.0)):
        plain.steps(0, [step], step_s=5.0, loss=loss, samples=20 if step else 40)
    losses = [line.split("loss ")[1].split()[0] for line in text_of(plain).splitlines()]
    assert losses == [f"{(40 * 8 + 20 * 6) / 60:.4f}", "3.0000", f"{(40 * 8 + 20 * 14) / 140:.4f}"]


def test_time_left_is_that_of_the_run_and_knows_where_it_is_to_end(plain):
    plain.epoch(0, epochs=3, run_steps=30)
    plain.steps(0, range(6), step_s=2.0)
    plain.steps(0, range(6, 12), step_s=2.0)
    plain.evaluation(0, accuracy=ACCURACY)  # takes 0.5 s
    plain.epoch(1, epochs=3, run_steps=30)
    plain.steps(1, range(6), step_s=2.0)
    plain.steps(1, range(6, 12), step_s=2.0)
    plain.epoch(2, epochs=3, run_steps=30)
    plain.steps(2, range(6), step_s=2.0)
    lines = [line.split("   lr")[0] for line in text_of(plain).splitlines()]
    assert lines[0].endswith("10.0 s   0:00:50 left")  # 25 steps of 2 s
    assert next(line for line in lines if line.startswith("epoch 2/3    5/12")).endswith(
        "0:00:27 left"
    )  # 13, and 0.5 s
    assert lines[-1].startswith("epoch 3/3   6/6 steps")


def test_several_optimizers_have_a_loss_each_and_samples_count_once(plain):
    plain.epoch(0, epochs=1)
    for step in range(12):
        plain.steps(0, [step], optimizer="judge", loss=0.5)
        plain.steps(0, [step], optimizer="generator", loss=2.0, lr=0.2, step_s=0.0)
    plain("end", total_steps=12, seconds=1.2)
    assert text_of(plain) == (
        "epoch 1/1   12/12 steps   judge 0.5000  generator 2.0000     1,000 samples/s     1.2 s   lr 0.2\n"
    )


def test_tokens_are_counted_where_the_loss_is_a_mean_over_tokens_and_the_rest_is_told(plain):
    plain.epoch(0, epochs=1)
    plain.steps(0, range(12), weight=51200.0, grad_norm=1.25, lr=3e-4, memory=1_310_720_000)
    plain.steps(1, range(1), weight=77.5)
    plain.progress.close()
    first, second = text_of(plain).splitlines()
    assert first == (
        "epoch 1/1   12/12 steps   loss 0.8123      512,000 tokens/s     1.2 s   lr 0.0003   norm 1.2500   1.31 GB"
    )
    assert "samples/s" in second  # weights that are no count


def test_plain_look_without_known_totals(plain):
    plain.epoch(0, epochs=None, steps=None)
    plain.steps(0, range(3))
    plain.evaluation(0, "validation", accuracy=ACCURACY)
    plain.epoch(1, epochs=None, steps=None)
    plain.steps(1, range(2), loss="nan")
    plain("warning", message="3 workers on 2 cores")
    plain.progress.close()
    assert text_of(plain) == (
        "epoch 1       3 steps   loss 0.8123       1,000 samples/s     0.3 s   lr 0.1\n"
        "epoch 1   validation   accuracy 0.9111 (328/360)\n"
        "warning: 3 workers on 2 cores\n"
        "epoch 2       2 steps   loss nan          1,000 samples/s     0.2 s   lr 0.1\n"
    )


def test_loops_of_the_users_own_in_the_plain_look(plain):
    bar(plain, 0)
    bar(plain, 30, 8.0)
    bar(plain, 31, 3.0, loss=0.25)
    bar(plain, 0, number=1, name="inner", total=None)
    bar(plain, 7, number=1, name="inner", total=None, ended=True, loss="nan")
    bar(plain, 40, 8.7, ended=True, loss=0.25)
    bar(plain, 3, number=2, name="cut off")
    plain.progress.close()
    plain.progress.close()
    assert text_of(plain) == (
        "copy   31/40 files   loss 0.2500          2.82 files/s    11.0 s   0:00:04 left\n"
        "inner       7 files   loss nan             70.0 files/s     0.1 s\n"
        "copy   40/40 files   loss 0.2500          2.01 files/s    19.9 s\n"
        "cut off    3/40 files                                         0.0 s\n"
    )


def test_an_evaluation_within_an_epoch_says_where_and_once(plain):
    plain.epoch(0)
    plain.steps(0, range(6))
    plain.evaluation(0, accuracy=ACCURACY)
    plain.evaluation(0, "train", accuracy=ACCURACY)
    plain.steps(0, range(6, 12))
    lines = text_of(plain).splitlines()
    assert [line[:25].rstrip() for line in lines] == [
        "epoch 1/5    6/12 steps",
        "epoch 1/5   accuracy 0.91",
        "epoch 1/5   train   accur",
        "epoch 1/5   12/12 steps",
    ]


def test_an_evaluation_after_the_last_epoch_belongs_to_it(plain):
    plain.epoch(4)
    plain.evaluation(5, accuracy=ACCURACY)
    assert text_of(plain) == "epoch 5/5   accuracy 0.9111 (328/360)\n"


def test_a_run_that_is_cut_off_says_where_it_stood(plain):
    plain.epoch(0)
    plain.steps(0, range(4))
    plain.run()  # its process was replaced, there was no `end`
    plain.epoch(0)
    plain.steps(0, range(2))
    plain.progress.close()
    plain.progress.close()
    assert [line[:23] for line in text_of(plain).splitlines()] == [
        "epoch 1/5    4/12 steps",
        "unisono: 2 ranks, 8 vir",
        "epoch 1/5    2/12 steps",
    ]


@pytest.mark.parametrize("interactive", [False, True])
def test_unknown_kinds_and_missing_fields_do_no_harm(interactive):
    progress = Progress(io.StringIO(), interactive=interactive)
    progress.handle({})
    progress.handle({"event": "melody", "time": 3})
    kinds = ("run", "resume", "epoch", "step", "evaluation", "checkpoint", "warning", "end")
    for kind in (*kinds, *reversed(kinds)):
        progress.handle({"event": kind})
        progress.handle({"event": kind, "epoch": None, "steps": 0, "values": {"a": 0.5, "b": None, "c": {}}})
    progress.close()
    progress.handle({"event": "run"})
    progress.print("nobody listens")


def test_a_display_that_joins_late_shows_what_it_can(plain):
    plain.steps(3, range(5, 8))
    plain.progress.close()
    assert text_of(plain) == "epoch 4       8 steps   loss 0.8123       1,000 samples/s     0.3 s   lr 0.1\n"


def test_the_plain_look_does_not_import_rich(tmp_path):
    code = "import sys, unisono.watch as w; w.Progress(sys.stdout).close(); print('rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_lines_that_the_encoding_does_not_have_are_escaped():
    raw = io.BytesIO()
    progress = Progress(io.TextIOWrapper(raw, encoding="ascii"), interactive=False)
    progress.print("Größe \udcff")
    assert raw.getvalue() == b"Gr\\xf6\\xdfe \\udcff\n"


class Gone(io.StringIO):
    def write(self, text):
        raise self.error


@pytest.mark.parametrize("interactive", [False, True])
@pytest.mark.parametrize("error", [BrokenPipeError(errno.EPIPE, "pipe"), OSError(errno.EIO, "terminal")])
def test_a_lost_stream_mutes_the_display_and_no_more(interactive, error):
    stream = Gone()
    stream.error = error
    script = Script(stream, interactive=interactive)
    with EventLog(listeners=[script.progress.handle]) as log:
        log.emit("warning", message="lost")
    script.epoch(0)
    script.steps(0, range(12))
    script.progress.print("x")
    script.progress.close()


def test_a_closed_stream_mutes_the_display(plain):
    plain.stream.close()
    plain.epoch(0)
    plain.steps(0, range(12))
    plain.progress.close()


def test_logged_numbers_stand_at_the_end_of_the_row_or_below_it(plain):
    plain.run()
    for epoch in range(2):
        plain.epoch(epoch, epochs=2)
        plain.log(epoch, early=3)
        for step in range(12):
            plain.steps(epoch, [step])
            plain.log(epoch, warmth=step / 2)  # also behind the last step, when the row stands
        plain.evaluation(epoch, accuracy=ACCURACY)
        plain.log(epoch, f1=0.25, recall=float("nan"))
    rows = text_of(plain).splitlines()[1:]
    assert [row.rpartition(" s   ")[2] for row in rows] == [
        "early 3.0000   warmth 5.0000   lr 0.1",  # of the step before the last one
        "epoch 1/2   accuracy 0.9111 (328/360)",
        "epoch 1/2   f1 0.2500   recall nan",
        "early 3.0000   warmth 5.0000   lr 0.1",
        "epoch 2/2   accuracy 0.9111 (328/360)",
        "epoch 2/2   f1 0.2500   recall nan",
    ]


def test_further_values_are_means_as_the_loss_is_and_stand_behind_the_columns(plain):
    plain.epoch(0, epochs=1, steps=5)
    for step, (samples, accuracy, rare) in enumerate(
        [(300, 0.5, "nan"), (100, 0.9, 4.0), (100, 0.1, "nan"), (100, 0.3, "nan"), (200, 0.5, 7.0)]
    ):
        values = {"accuracy": accuracy, "rare": rare, "text": "x"}
        plain.steps(0, [step], samples=samples, step_s=6.0, values=values)
        plain.log(0, warmth=2)
    rows = [row.partition("accuracy ")[2] for row in text_of(plain).splitlines()]
    assert rows == [
        "0.6000   rare 4.0000   warmth 2.0000   lr 0.1",
        "0.2000   rare 4.0000   warmth 2.0000   lr 0.1",  # of the steps since, and of all where those have none
        f"{(150 + 90 + 10 + 30 + 100) / 800:.4f}   rare 6.0000   warmth 2.0000   lr 0.1",
    ]
    assert (
        text_of(plain)
        .splitlines()[-1]
        .startswith("epoch 1/1   5/5 steps   loss 0.8123        26.7 samples/s    30.0 s   accuracy ")
    )


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_names_of_numbers_are_clipped_and_stay_on_one_line(encoding):
    raw = io.BytesIO()
    script = Script(io.TextIOWrapper(raw, encoding=encoding), interactive=False)
    script.epoch(0, epochs=1, steps=1)
    values = {"entropy_of_attention_in_layer_1": 0.25, "entropy_of_attention_of_layer_1": 0.75, "a\nb\x1b": 1.0}
    script.log(0, **{"norm_of_the_weights_of_layer_1": 2, "norm_of_the_weights_in_layer_1": 3})
    script.steps(0, [0], values=values)
    (row,) = raw.getvalue().decode(encoding).splitlines()
    cut = "…" if encoding == "utf-8" else "~"
    assert row.endswith(
        f" s   entropy_o{cut}n_layer_1 0.2500   entropy_o{cut}f_layer_1 0.7500   a b  1.0000"
        f"   norm_of_t{cut}f_layer_1 2.0000   norm_of_t{cut}n_layer_1 3.0000   lr 0.1"
    )


def test_further_values_of_several_optimizers_are_told_apart(plain):
    plain.epoch(0, epochs=1)
    for step in range(12):
        plain.steps(0, [step], optimizer="judge", values={"real": 0.5})
        plain.steps(0, [step], optimizer="generator", step_s=0.0, values={"real": 0.25})
    plain("end", total_steps=12, seconds=1.2)
    assert text_of(plain).endswith("1.2 s   judge/real 0.5000   generator/real 0.2500   lr 0.1\n")


def test_numbers_that_are_logged_without_epochs_have_a_line(plain):
    plain("log", epoch=0, total_steps=0, values={"start": 2})
    plain("log", epoch=0, total_steps=0, values={"bad": "text"})
    plain("log", epoch=0, total_steps=0, values=None)
    assert text_of(plain) == "epoch 1   start 2.0000\n"
