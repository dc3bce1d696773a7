"""`unisono plan`: what it prints, what it counts, and what it refuses."""

import fcntl
import json
import re
import shlex
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
MODELS = PROGRAMS / "planned_models.py"
SIZES = "--ranks 2 --batch 32"
ALONE = "--ranks 1 --batch 32"
"""Those of tests that do not look at layouts: operators of several ranks are timed side by side for some seconds."""
COMMANDS = {
    "text": f"{MODELS}:build {SIZES} --offload",
    "four": f"{MODELS}:build --ranks 4 --batch 32 --json",
    "half": f"{MODELS}:build {ALONE} --micro-batch 2 --json",
    "real": f"{MODELS}:build {ALONE} --measure --json",
    "tight": f"{MODELS}:build {ALONE} --memory 1MB",
    "trained": f"{MODELS}:build {SIZES} --micro-batch 2 --train",
    "trained alone": f"{MODELS}:build {ALONE} --micro-batch 2 --train",
    "failing": f"{MODELS}:build_failing_in_steps {ALONE} --train",
    "too large to train": f"{MODELS}:build_large {ALONE} --train --json",
    "large": f"{MODELS}:build_large {ALONE} --memory 16GiB",
    "no file": f"{MODELS.with_name('planned_model.py')}:build {SIZES}",
    "no function": f"{MODELS}:biuld {SIZES}",
    "a number": f"{MODELS}:NOT_A_FUNCTION {SIZES}",
    "no module": f"planned_modells:build {SIZES}",
    "three": f"{MODELS}:build_three {SIZES}",
    "broken": f"{MODELS}:build_broken {SIZES}",
    "branching": f"{MODELS}:build_branching {SIZES}",
    "sparse": f"{MODELS}:build_sparse {SIZES}",
    "no loss": f"{MODELS}:build_without_loss {SIZES}",
    "other optimizer": f"{MODELS}:build_other_optimizer {SIZES}",
    "size": f"{MODELS}:build {SIZES} --memory lots",
    "ranks": f"{MODELS}:build --ranks 16 --batch 32",
    "batch": f"{MODELS}:build --ranks 2 --batch 4",
}
PLANNED, TRAINED = (
    ("text", "four", "half", "real", "tight", "large"),
    ("trained alone", "failing", "too large to train"),
)
GROUPS = (
    PLANNED,
    TRAINED,
    ("trained",),
    tuple(name for name in COMMANDS if name not in {*PLANNED, *TRAINED, "trained"}),
)
"""Those of a group run in one process, when a test asks for the first of them: all take 50 s on a quiet machine."""
PARAMETERS = 4 * (64 * 64 + 64)


class Answers(dict):
    """What commands print. Those of a group are run once, for all processes of tests."""

    def __init__(self, run, folder):
        self.run, self.folder = run, folder

    def __missing__(self, name):
        number, group = next((number, group) for number, group in enumerate(GROUPS) if name in group)
        path, known = self.folder / f"commands-{number}", self.folder / f"answers-{number}.json"
        with (self.folder / f"lock-{number}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not known.exists():
                path.write_text("".join(f"plan {shlex.join(shlex.split(COMMANDS[each]))}\n" for each in group))
                known.write_text(json.dumps([*map(json.loads, self.run(PROGRAMS / "command.py", path))]))
        self.update(zip(group, json.loads(known.read_text()), strict=True))
        return self[name]


@pytest.fixture(scope="module")
def answers(fork_python, tmp_path_factory, worker_id):
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "plan"
    folder.mkdir(exist_ok=True)
    return Answers(fork_python, folder)


def test_the_table_has_80_columns_and_ends_with_what_to_type(answers):
    lines = answers["text"]["out"].splitlines()
    assert answers["text"]["code"] == 0 and answers["text"]["err"] == ""
    assert lines[:2] == ["Sequential: 16,640 parameters, AdamW", "batch 32 = 8 virtual ranks x 4 samples"]
    rows = [re.split(r"  +| +(?=\d+ +\d+ )", line)[0] for line in lines[4:13]]
    assert rows[:4] == ["one process", "2 ranks, shared memory", "2 replicas", "2 ranks, zero=1"]
    assert rows[4:] == ["2 shards", "2 shards by size", "2 shards, sums divided", "2 stages", "4 stages on 2 ranks"]
    assert max(map(len, lines[:-2])) <= 80
    assert re.search(r"\n2 shards, offload +\d+ +\d+\ntensors at most in steps", answers["text"]["out"])
    assert "unisono.Trainer(model, optimizer, virtual_ranks=8" in lines[-2]
    assert lines[-1].strip() in ("python train.py", "unisono run -n 2 train.py")


def test_sizes_are_those_of_the_model(answers):
    found = json.loads(answers["four"]["out"])
    profile = found["profile"]
    assert profile["num_parameters"] == PARAMETERS
    assert profile["parameters_nbytes"] == profile["gradients_nbytes"] == 4 * PARAMETERS
    assert profile["optimizer_nbytes"] == 8 * PARAMETERS + 4 * 8  # two averages, and a step for each parameter
    # 4 samples: what ReLU keeps, 4 layers; the targets and the probabilities
    assert profile["kept_nbytes"] >= 4 * 4 * 64 * 4
    by_name = {layout["name"]: layout for layout in found["layouts"]}
    # 2 shares of a rank are a node of the tree: it sends all but its part of one sum, and that of all to three others.
    assert by_name["4 replicas"]["sent_nbytes"] == 4 * PARAMETERS * 2 * 3 // 4
    assert by_name["4 ranks, shared memory"]["sent_nbytes"] == 0


def test_layouts_between_replicas_and_shards_are_planned(answers):
    found = json.loads(answers["four"]["out"])
    layouts, weights = {layout["name"]: layout for layout in found["layouts"]}, 4 * PARAMETERS
    codes = {name: layout["code"] for name, layout in layouts.items()}
    assert codes["4 ranks, zero=1"] == "parallel=unisono.parallel.Shard(zero=1)"
    assert codes["2 x 2 shards"] == "parallel=unisono.parallel.Shard(replicas=2)"
    assert "4 x 1 shards" not in codes and codes["4 shards"] == 'parallel=unisono.parallel.Shard(by="block")'
    assert codes["4 shards by size"] == 'parallel=unisono.parallel.Shard(by="size")'
    assert codes["2 stages x 2, zero=1"].endswith(", zero=1)")
    assert layouts["2 stages x 2, zero=1"]["memory"]["copies"] == 0  # a rank that dies is not replaced there
    assert layouts["2 stages x 2 replicas"]["memory"]["copies"] > 0
    assert codes["4 stages on 2 x 2"].endswith(', schedule="interleaved", replicas=2)')
    assert [each["stages"] for each in found["uncut"]] == [8]  # there are 4 blocks, and 4 ranks would have 2 each
    # It sends all but its part of its sum of gradients, and its part of the weights to three others.
    assert layouts["4 ranks, zero=1"]["sent_nbytes"] == 2 * weights * 3 // 4
    sent = [layouts[name]["sent_nbytes"] for name in ("2 x 2 shards", "4 shards")]
    assert sent[0] < sent[1]  # weights travel to one rank, and not to three
    # Exchanges take time even if they carry little: those of weights for each share, besides those of sums.
    assert layouts["4 shards"]["step_s"] > layouts["4 ranks, zero=1"]["step_s"]


def test_a_model_that_is_built_has_the_sizes_of_one_that_is_not(answers):
    fake, real = (json.loads(answers[name]["out"])["profile"] for name in ("four", "real"))
    for key in fake:
        if key.endswith("_nbytes"):
            assert fake[key] == real[key], key


def test_micro_batches_have_less_to_keep(answers):
    whole, half = (json.loads(answers[name]["out"])["profile"] for name in ("four", "half"))
    assert half["micro_batch"] == 2 and half["inputs_nbytes"] * 2 == whole["inputs_nbytes"]
    assert half["kept_nbytes"] < whole["kept_nbytes"]


def test_a_limit_that_nothing_keeps_is_told_with_what_takes_most(answers):
    out = answers["tight"]["out"]
    assert out.count("too large") == 1
    assert re.search(r"Nothing fits 1\.00 MB\. .+ needs least, \d+ MB, most of it for\n\w+: .+", out)


@pytest.mark.parametrize(("name", "count"), [("trained alone", 1), pytest.param("trained", 8, marks=pytest.mark.soak)])
def test_layouts_are_trained_and_what_is_recommended_is_what_to_type(answers, fork_python, tmp_path, name, count):
    lines = answers[name]["out"].splitlines()
    assert answers[name]["code"] == 0 and answers[name]["err"] == ""
    assert max(map(len, lines[:-4])) <= 80
    first = lines.index(f"{'trained here':<22}{'MB':>8}{'step':>8}")
    rows = [
        re.fullmatch(r"(.{22}) +(\d+) +([\d.]+) (ms|s)  (\d+) steps", line)
        for line in lines[first + 1 : first + 1 + count]
    ]
    assert [row[1].strip() for row in rows] == [line.split("  ")[0] for line in lines[4 : 4 + count]]
    recommended = re.fullmatch(r"Recommended: (.+), (\d+) MB a rank, ([\d.]+) m?s a step.*", lines[first + 2 + count])
    (chosen,) = [row for row in rows if row[1].strip() == recommended[1]]
    assert chosen[3] == recommended[3] and abs(int(chosen[2]) - int(recommended[2])) <= 1
    assert all(200 < int(row[2]) < 2000 for row in rows)
    advice = [line.strip() for line in lines[first + 3 + count : -1]]
    assert advice[1:] == ["trainer.batches(data, batch_size=32, micro_batch_size=2)"]
    program = tmp_path / "typed.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(PROGRAMS)!r})\nimport unisono, planned_models\n"
        "model, optimizer, loss, data = planned_models.build()\ndata = data * 32\n"
        f"{advice[0]}\nfor batch in {advice[1]}:\n    trainer.step(loss, batch)\nprint(trainer.steps_done)\n"
    )
    assert fork_python(program) == ["1"]


def test_layouts_that_cannot_be_trained_say_why(answers):
    assert re.search(r"one process +rank 0 failed: ValueError: in the second step\n", answers["failing"]["out"])
    assert answers["failing"]["out"].endswith("No layout could be trained here.\n")
    (layout,) = json.loads(answers["too large to train"]["out"])["layouts"]
    assert re.fullmatch(r"\d+ GB are needed, [\d.]+ [MG]B are free here", layout["trial"]["why_not"])


def test_a_model_larger_than_this_machine_is_planned(answers):
    assert "Sequential: 12.9 B parameters" in answers["large"]["out"], answers["large"]["err"]
    assert "Nothing fits 17.2 GB" in answers["large"]["out"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no file", r"there is no file '\S+planned_model\.py'; did you mean \S+planned_models\.py\?"),
        ("no function", r"has no function 'biuld'; did you mean 'build'\?"),
        ("a number", r"'NOT_A_FUNCTION' of \S+ is an int, where a function is due"),
        ("no module", r"there is no module 'planned_modells'"),
        ("three", r"the build function returned 3 values: return model, optimizer, loss, data"),
        ("sparse", r"'0' of the model has sparse gradients.*plan the model without it"),
        ("branching", r"planned_models\.py:\d+.* needs the values of a tensor.*--measure"),
        ("no loss", r"NoneType"),
        ("other optimizer", r"the optimizer has none of the model's parameters"),
        ("size", r"'lots' is no size of memory: give one such as 16GiB"),
        ("ranks", r"16 ranks share 8 virtual ranks, so some would have none: give --virtual-ranks 16 or more"),
        ("batch", r"a batch of 4 samples is not enough for 8 virtual ranks: give --batch 8 or more"),
    ],
)
def test_what_cannot_be_planned_is_refused(answers, name, words):
    answer = answers[name]
    assert answer["code"] == 2 and answer["out"] == ""
    assert re.search(words, answer["err"]), answer["err"]
    assert "Traceback" not in answer["err"]


def test_an_error_of_the_users_code_is_shown_without_ours(answers):
    err = answers["broken"]["err"]
    assert answers["broken"]["code"] == 2
    assert "planned_models.py" in err and "build_broken" in err and "TypeError" in err
    assert "src/unisono" not in err
    assert err.splitlines()[-1].endswith("planned_models.py:build_broken failed, see above")
