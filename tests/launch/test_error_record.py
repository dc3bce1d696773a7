"""What a rank tells of the error that ends it: enough for the report, whatever the error is, and never too much."""

import json
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from unisono.launch.failure.error_record import record_error
from unisono.launch.failure.frames import frames_in, is_own

HERE = __file__
MOST_BYTES = 48 << 10


def account(function, *arguments):
    """The account of the error that a function raises, as the agent reads it."""
    try:
        function(*arguments)
    except BaseException as error:
        text = json.dumps(record_error(error))
        assert len(text) <= MOST_BYTES
        return json.loads(text)
    raise AssertionError("no error")


def fail(message="bad batch"):
    raise ValueError(message)


def test_an_error_is_told_with_its_place_and_source():
    told = account(fail)
    assert (told["type"], told["message"], told["code"]) == ("ValueError", "bad batch", 1)
    innermost = told["frames"][-1]
    assert (innermost["file"], innermost["function"]) == (HERE, "fail")
    assert innermost["source"] == "raise ValueError(message)"
    assert is_own(innermost)
    assert told["traceback"].endswith("ValueError: bad batch\n")


def test_frames_of_libraries_are_told_from_the_users():
    told = account(torch.nn.Linear(3, 4), torch.ones(2, 5))
    assert told["frames"][0]["library"] == ""
    assert {frame["library"] for frame in told["frames"][1:]} == {"torch"}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.11 and later know columns")
def test_the_failing_part_of_a_line_is_marked_also_behind_wide_characters():
    table = {}
    told = account(lambda: ("für", table["é"], "x"))
    frame = told["frames"][-1]
    start, end = frame["span"]
    assert frame["source"][start:end] == 'table["é"]'


def test_causes_and_contexts_are_told_nearest_first():
    def load():
        try:
            try:
                {}["lr"]
            except KeyError:
                int("x")
        except ValueError as error:
            raise RuntimeError("no settings") from error

    told = account(load)
    assert [(link["link"], link["type"]) for link in told["chain"]] == [
        ("cause", "ValueError"),
        ("context", "KeyError"),
    ]


def test_a_suppressed_context_is_not_told():
    def load():
        try:
            {}["lr"]
        except KeyError:
            raise RuntimeError("no settings") from None

    assert account(load)["chain"] == []


def test_a_circle_of_causes_ends():
    def circle():
        one, two = ValueError("one"), ValueError("two")
        one.__cause__, two.__cause__ = two, one
        raise one

    assert [link["message"] for link in account(circle)["chain"]] == ["two"]


class NastyError(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def test_an_error_that_cannot_be_printed_is_told():
    def fail_without_words():
        raise NastyError

    told = account(fail_without_words)
    assert told["type"].endswith("NastyError")
    assert told["message"] == "(its __str__ raised an error)"


@pytest.mark.parametrize("character", ["x", "é", "\U0001f3b5", "\udcff", "\x00"])
def test_the_longest_message_fits(character):
    told = account(fail, character * 200_000)
    assert len(told["message"]) < 50_000
    assert told["type"] == "ValueError"


def test_long_chains_with_long_messages_fit_and_keep_the_error_itself():
    def climb():
        error = ValueError("first")
        for number in range(20):
            following = RuntimeError(f"{number} " + "ü" * 20_000)
            following.__cause__ = error
            error = following
        raise error

    assert account(climb)["message"].startswith("19 ")


def test_endless_recursion_is_told_with_both_ends():
    def recurse(depth=0):
        return recurse(depth + 1)

    told = account(recurse)
    assert told["type"] == "RecursionError"
    assert told["frames"][0]["function"] == "account"
    assert told["frames"][-1]["function"] == "recurse"


def test_a_syntax_error_is_told_with_its_line(tmp_path):
    def load():
        compile("x = 1\ny = (3 +\n", str(tmp_path / "broken.py"), "exec")

    told = account(load)
    frame = told["frames"][-1]
    assert told["type"] == "SyntaxError"
    assert (frame["file"], frame["line"], frame["source"]) == (str(tmp_path / "broken.py"), 2, "y = (3 +")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.11 and later have groups and notes")
def test_groups_and_notes_are_told():
    def gather():
        group = ExceptionGroup("three files", [ValueError(f"file {number}") for number in range(3)])  # noqa: F821
        group.add_note("see the manual")
        raise group

    told = account(gather)
    assert told["members"] == 3
    assert [member["message"] for member in told["group"]] == ["file 0", "file 1", "file 2"]
    assert told["notes"] == ["see the manual"]


@pytest.mark.parametrize(("argument", "code"), [(3, 3), (None, 0), ("no data", 1), (-1, 255)])
def test_an_exit_is_told_with_its_code(argument, code):
    told = account(sys.exit, argument)
    assert (told["type"], told["code"]) == ("SystemExit", code)


class Broken(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            raise KeyError("sample 2")
        return torch.ones(1)


def test_the_error_of_a_data_loader_worker_is_told_as_the_workers():
    def read():
        try:
            for _ in DataLoader(Broken(), num_workers=1, multiprocessing_context="fork"):
                pass
        except KeyError as error:
            errors.append(error)
            raise

    errors = []
    remote = account(read)["remote"]
    # They hold the loader, which ends its worker when it goes; if the collector took both, it would wait 5 s for it.
    traceback.clear_frames(errors.pop().__traceback__)
    assert (remote["type"], remote["where"]) == ("KeyError", "DataLoader worker process 0")
    own = [frame for frame in remote["frames"] if is_own(frame)]
    assert [(frame["function"], frame["source"]) for frame in own] == [("__getitem__", 'raise KeyError("sample 2")')]


def test_the_error_of_a_pools_process_is_told_as_that_ones():
    def work():
        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
            pool.submit(fail, "bad piece").result()

    told = account(work)
    assert told["remote"]["message"] == "bad piece"
    assert told["remote"]["frames"][-1]["function"] == "fail"
    assert told["chain"] == []


def test_the_launchers_own_frames_are_left_out(tmp_path):
    import unisono.launch

    code = compile("def call(f):\n    f()\n", str(Path(unisono.launch.__path__[0]) / "recorder.py"), "exec")
    scope = {}
    exec(code, scope)
    told = account(scope["call"], fail)
    assert [frame["function"] for frame in told["frames"]] == ["account", "fail"]


def test_frames_are_read_back_from_what_python_prints():
    try:
        fail()
    except ValueError as error:
        printed = frames_in("".join(traceback.format_exception(type(error), error, error.__traceback__)))
        keys = ("file", "line", "function", "source")
        told = [[frame[key] for key in keys] for frame in record_error(error)["frames"]]
        assert [[frame[key] for key in keys] for frame in printed] == told
