"""The live look: one row at the foot of a terminal, seen on a small terminal of our own."""

import io
import os
import pty
import re
import subprocess
import sys

import pytest
from replay import ACCURACY, LOSS, Script, bar, text_of

CONTROL = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])")


class Screen:
    """The little of a terminal that the live look uses."""

    def __init__(self, output, width):
        self.lines, self.row, self.column, self.cursor = [""], 0, 0, True
        self.wrapped = False
        place = 0
        while place < len(output):
            control = CONTROL.match(output, place)
            if control:
                self.control(*control.groups())
                place = control.end()
            else:
                self.put(output[place])
                place += 1
        self.wrapped = any(len(line) > width for line in self.lines)

    def control(self, argument, letter):
        if letter == "K":
            assert argument == "2"
            self.lines[self.row] = ""
        elif letter == "A":
            self.row -= int(argument)
        elif letter in "lh":
            assert argument == "?25"
            self.cursor = letter == "h"
        else:
            assert letter == "m"

    def put(self, sign):
        if sign == "\r":
            self.column = 0
        elif sign == "\n":
            self.row, self.column = self.row + 1, 0
            self.lines += [""] * (self.row + 1 - len(self.lines))
        else:
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + sign + line[self.column + 1 :]
            self.column += 1

    @property
    def text(self):
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n")


@pytest.fixture
def live(monkeypatch):
    def start(width):
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.delenv("NO_COLOR", raising=False)
        script = Script(io.StringIO(), interactive=True)
        script.screen = lambda: Screen(text_of(script), width)
        scripts.append(script)
        return script

    scripts = []
    yield start
    for script in scripts:
        script.progress.close()


def play(script):
    script.run()
    script.epoch(0)
    script.steps(0, range(12))
    script.evaluation(0, accuracy=ACCURACY, loss=LOSS)
    script.epoch(1)
    script.steps(1, range(8), step_s=1.0, loss=0.4132, samples=8412)
    return script


def test_live_look_at_80_columns(live):
    assert play(live(80)).screen().text == (
        "unisono  2 ranks · 8 virtual ranks · 27,098 parameters · cpu · runs/digits\n"
        "epoch 1/5  12/12  loss 0.8123    1,000 samples/s    1.2 s  lr 0.1\n"
        "           accuracy 0.9111 (328/360)  loss 2.1034\n"
        "epoch 2/5   8/12  loss 0.4132    8,412 samples/s  0:00:04 left  ━━━━━━━━╸━━━━"
    )


def test_live_look_at_60_columns_breaks_between_figures(live):
    screen = play(live(60)).screen()
    assert not screen.wrapped
    assert screen.text == (
        "unisono  2 ranks · 8 virtual ranks · 27,098 parameters · cpu\n"
        "         runs/digits\n"
        "epoch 1/5  12/12  loss 0.8123    1,000 samples/s    1.2 s\n"
        "           accuracy 0.9111 (328/360)  loss 2.1034\n"
        "epoch 2/5   8/12  loss 0.4132    8,412 samples/s  ━━━━╸━━"
    )


@pytest.mark.parametrize("width", [20, 30, 40, 50, 70, 100, 120, 200])
def test_the_live_row_fits_any_width_and_leaves_room_for_an_echo(live, width):
    script = play(live(width))
    script.checkpoint(20)
    script.steps(1, [8], step_s=1.0)
    screen = script.screen()
    assert len(screen.lines[-1].rstrip()) <= width - 3
    assert screen.lines[-1].startswith("epoch 2/5   9/12"[: width - 3])


def test_a_checkpoint_shows_for_a_moment(live):
    script = play(live(120))
    script.checkpoint(20)
    script.steps(1, [8], step_s=1.0)
    assert script.screen().text.endswith("left  ━━━━━━━━━━━━━━━━━━━━━━╸━━━━━━━  saved step 20")
    script.steps(1, [9], step_s=3.0)
    assert "saved" not in script.screen().text


def test_a_checkpoint_takes_the_place_of_the_bar_where_there_is_no_room(live):
    script = play(live(80))
    script.checkpoint(20)
    script.steps(1, [8], step_s=1.0)
    assert script.screen().text.splitlines()[-1] == (
        "epoch 2/5   9/12  loss 0.4138    7,488 samples/s  0:00:03 left  saved step 20"
    )


def test_a_wide_terminal_has_room_for_all_figures(live):
    script = live(140)
    script.epoch(0, run_steps=60)
    script.steps(0, range(8), step_s=1.0, lr=3e-4, grad_norm=0.5, memory=366_000_000)
    row = "epoch 1/5   8/12  loss 0.8123      100 samples/s"
    assert script.screen().text == f"{row}  0:00:52 left  {'━' * 30}  lr 0.0003  norm 0.5000  366 MB"
    script.progress.close()
    assert script.screen().text == f"{row}    8.0 s  lr 0.0003  norm 0.5000  366 MB"


def play_values(script, values, *, epochs=2):
    for epoch in range(epochs):
        script.epoch(epoch)
        if epoch == epochs - 1:
            yield
        for step in range(12):
            script.steps(epoch, [step], step_s=1.0, values=values(step))
            if epoch == epochs - 1 and step in (7, 11):
                yield


def test_further_values_are_columns_behind_the_loss_of_all_rows(live):
    script = live(80)
    moments = play_values(script, lambda step: {"accuracy": step / 10, "margin": 2.0, "f1": 1.0})
    next(moments)
    row = "epoch 1/5  12/12  loss 0.8123  accuracy 0.5500  +2      100 samples/s   12.0 s"
    begun = "epoch 2/5   0/12" + " " * 55 + "━━━━━━"
    assert script.screen().text == f"{row}\n{begun}"
    next(moments)
    live_row = "epoch 2/5   8/12  loss 0.8123  accuracy 0.3500  +2      100 samples/s  ━━━━━━"
    assert script.screen().text == f"{row}\n{live_row}"
    next(moments)
    assert script.screen().text == f"{row}\n{row.replace('1/5', '2/5')}"


def test_further_values_of_the_live_row_are_those_of_the_last_seconds(live):
    script = live(80)
    script.epoch(0, steps=100)
    script.steps(0, range(60), step_s=1.0, values={"f1": 0.25})
    script.steps(0, range(60, 99), step_s=1.0, values={"f1": 0.75})
    assert "  f1 0.7500  " in script.screen().text
    script.steps(0, [99], step_s=1.0, values={"f1": 0.75})
    assert "  f1 0.4500  " in script.screen().text


@pytest.mark.parametrize(("width", "shown"), [(40, 0), (60, 0), (70, 0), (80, 1), (120, 3), (160, 6), (400, 20)])
def test_twenty_further_values_leave_the_table_whole(live, width, shown):
    script = live(width)
    moments = play_values(script, lambda step: {f"value {i}": i - 10.0 for i in range(20)})
    for moment in moments:
        assert moment is None
        screen = script.screen()
        rows = [line for line in screen.lines if line.startswith("epoch")]
        assert len(rows[-1].rstrip()) <= width and len(rows) == len(screen.text.splitlines())
        if width > 60 and " 0/12" not in rows[-1]:
            assert re.findall(r"value (\d+) ", rows[-1]) == [str(i) for i in range(shown)]
            assert (f"  +{20 - shown}  " in rows[-1]) == (0 < shown < 20)
            assert "100" in rows[-1]
    assert rows[0].replace("1/5", "2/5") == rows[1]


def test_a_value_that_grows_wider_keeps_the_column_that_wide(live):
    script = live(120)
    script.epoch(0)
    script.steps(0, range(12), values={"change": -1e-5, "f1": 0.5})
    script.epoch(1)
    script.steps(1, range(12), values={"change": 0.5, "f1": 0.5})
    assert [line[31:63] for line in script.screen().text.splitlines()] == [
        "change -1.00e-05  f1 0.5000    1",
        "change    0.5000  f1 0.5000    1",
    ]


def test_logged_numbers_come_before_other_figures_of_the_row(live):
    script = live(80)
    script.epoch(0, epochs=1)
    for step in range(12):
        script.log(0, weight_norm=step)
        script.steps(0, [step])
    assert script.screen().text == ("epoch 1/1  12/12  loss 0.8123    1,000 samples/s    1.2 s  weight_norm 11.000")


def test_live_look_without_known_totals(live):
    script = live(80)
    script.epoch(0, epochs=None, steps=None)
    script.steps(0, range(3), step_s=1.0)
    assert script.screen().text == "epoch 1      3 steps  loss 0.8123      100 samples/s  0:00:03       lr 0.1"


def test_a_loop_of_the_users_own_in_the_live_look(live):
    script = live(80)
    bar(script, 0)
    bar(script, 10, 1.0, loss=0.25, acc=0.5)
    assert script.screen().text == ("copy  10/40  loss 0.2500  acc 0.5000     10.0 files/s  0:00:03 left  ━━━━━━━━")
    bar(script, 40, 3.0, ended=True, loss=0.25, acc=0.5)
    assert script.screen().text == "copy  40/40  loss 0.2500  acc 0.5000     10.0 files/s    4.0 s"


def test_the_cursor_is_hidden_while_live_and_restored_by_close(live):
    script = play(live(80))
    assert not script.screen().cursor
    script.progress.close()
    screen = script.screen()
    assert screen.cursor
    assert screen.text.splitlines()[-1] == "epoch 2/5   8/12  loss 0.4132    8,412 samples/s    8.0 s  lr 0.1"


def test_steps_between_redraws_write_nothing(live):
    script = live(80)
    script.epoch(0, steps=1000)
    before = len(text_of(script))
    script.steps(0, range(100), step_s=0.001)
    assert len(text_of(script)) == before


def test_lines_of_ranks_stand_above_the_row_untouched(live):
    script = play(live(60))
    line = "[bold]3.14[/bold] {'a': True} :smile: https://x.y \x1b[31mred\x1b[0m\ttab " + "long " * 20
    script.progress.print(line + "\n")
    assert line + "\n" in text_of(script)
    shown = script.screen().text.splitlines()
    assert shown[-2] == CONTROL.sub("", line).rstrip()
    assert shown[-1].startswith("epoch 2/5   8/12")


def test_remarks_and_warnings_stand_above_the_row(live):
    script = play(live(80))
    script("warning", message="[red]3 workers[/red] on 2 cores")
    script("resume", path="runs/7", epoch=1, step=8, total_steps=20)
    shown = script.screen().text.splitlines()
    assert shown[-3:-1] == [
        "warning: [red]3 workers[/red] on 2 cores",
        "resumed after step 20, in epoch 2: runs/7",
    ]
    assert shown[-1].startswith("epoch 2/5   8/12")


def test_an_epoch_becomes_a_row_in_one_write(live):
    script = play(live(80))
    script.steps(1, range(8, 11), step_s=1.0)
    writes = []
    write = script.stream.write
    script.stream.write = lambda text: (writes.append(text), write(text))
    script.steps(1, [11], step_s=1.0)
    assert CONTROL.sub("", writes[0]).strip().startswith("epoch 2/5  12/12")
    assert not any("━" in text for text in writes)


def test_two_runs_one_after_another(live):
    script = live(80)
    for _ in range(2):
        script.run()
        for epoch in range(2):
            script.epoch(epoch, epochs=2)
            script.steps(epoch, range(12))
        script("end", total_steps=24, seconds=2.4)
        assert script.screen().text.count("━") == 0
    row = "  12/12  loss 0.8123    1,000 samples/s    1.2 s  lr 0.1\n"
    one = (
        "unisono  2 ranks · 8 virtual ranks · 27,098 parameters · cpu · runs/digits\n"
        f"epoch 1/2{row}epoch 2/2{row}finished at step 24 after 2.4 s, 1,000 samples/s"
    )
    assert script.screen().text == f"{one}\n{one}"


def test_no_color_leaves_no_colour_and_a_readable_bar(live, monkeypatch):
    script = live(80)
    monkeypatch.setenv("NO_COLOR", "1")
    script = Script(io.StringIO(), interactive=True)
    play(script)
    codes = {code for sgr in re.findall(r"\x1b\[([\d;]*)m", text_of(script)) for code in sgr.split(";")}
    assert codes <= {"0", "1", "2", ""}
    assert text_of(script).rstrip(" ").endswith("━━━━━━━━╸")
    script.progress.close()


@pytest.fixture
def terminal(monkeypatch):
    """A stream to a pseudo-terminal, and a function that reads what it shows."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("CI", raising=False)
    master, slave = pty.openpty()
    with os.fdopen(slave, "w", buffering=1) as stream, os.fdopen(master, "rb", buffering=0) as reader:

        def screen():
            # The kernel passes bytes on when it likes: all have come when the mark has.
            stream.write("\0")
            stream.flush()
            output = b""
            while not output.endswith(b"\0"):
                output += reader.read(1 << 16)
            return Screen(output[:-1].decode().replace("\r\n", "\n"), 80)

        yield stream, screen


def test_prints_of_this_process_stand_above_the_row(terminal, monkeypatch):
    stream, screen = terminal
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    script = Script(stream)
    script.epoch(0, epochs=1)
    print("one\ntwo")
    print(".", end="", flush=True)
    print("done", file=sys.stderr)
    print(".")
    print("  5%\r 50%\r100% bar")
    print(" end", end="")
    script.steps(0, range(3), step_s=1.0)
    script.progress.close()
    print(" of the line")
    assert sys.stdout is stream
    assert sys.stderr is stream
    shown = screen()
    assert shown.cursor
    assert shown.text.splitlines() == [
        "one",
        "two",
        "done",
        "..",
        "100% bar",
        "epoch 1/1   3/12  loss 0.8123      100 samples/s    3.0 s  lr 0.1",
        " end of the line",
    ]


@pytest.mark.parametrize(("variable", "value"), [("TERM", "dumb"), ("CI", "true")])
def test_a_dumb_terminal_and_ci_get_the_plain_look(terminal, monkeypatch, variable, value):
    stream, screen = terminal
    monkeypatch.setenv(variable, value)
    Script(stream).run()
    assert screen().text.startswith("unisono: 2 ranks, ")


INTERRUPTED = """
import sys
from unisono.watch import Progress
progress = Progress(sys.stderr)
progress.handle({"time": 1.0, "event": "epoch", "epoch": 0, "epochs": 1, "steps": 9})
raise KeyboardInterrupt
"""


def test_an_interrupt_that_nobody_catches_restores_the_cursor(terminal):
    stream, screen = terminal
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], stdout=stream, stderr=stream, check=False)
    assert done.returncode != 0
    shown = screen()
    assert shown.cursor
    assert shown.text.splitlines()[-1] == "KeyboardInterrupt"
