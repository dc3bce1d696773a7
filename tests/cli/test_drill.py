"""`unisono drill`: faults in a user's script, and whether its bits stay."""

import itertools
import json
import re

import pytest

from launcher import Launcher
from unisono.drill.differences import differences
from unisono.drill.fault_plan import KINDS, Change, Fault, draw_plan
from unisono.drill.job_log import EVENTS, JobLog

SCRIPT = """
import time, torch, unisono
torch.manual_seed(0)
x = torch.randn(160, 16)
data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
factor = {factor}
done = 0

def loss(model, batch):
    time.sleep(0.005)
    return factor() * torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, directory={directory!r})
for epoch in trainer.epochs(2):
    for batch in trainer.batches(data, batch_size=16):
        trainer.step(loss, batch)
        done += 1
    print("printed by the script")
"""


@pytest.fixture
def launcher(tmp_path, launch_host):
    launcher = Launcher(tmp_path, launch_host)
    launcher.environment["TMPDIR"] = str(tmp_path)  # for the runs of drills that fail
    yield launcher
    launcher.check_nothing_is_left()


@pytest.fixture
def drill(launcher):
    """Run a drill on a script with a factor of its loss; give its exit code and what it said."""

    def run(factor="lambda: 1", *flags, directory=None, script=SCRIPT):
        name = launcher.write("train.py", script.format(factor=factor, directory=directory))
        result = launcher.run("drill", "-n", "2", *flags, name)
        return result.returncode, " ".join(f"{result.stdout}\n{result.stderr}".split()), result.stdout

    return run


def test_a_plan_has_one_fault_in_each_window_and_every_kind_in_turn():
    faults = draw_plan(list(KINDS), ranks=4, steps=102, every=10, seed=3)
    assert [(fault.step - 1) // 10 for fault in faults] == [*range(10)]
    assert {fault.kind for fault in faults[:5]} == {fault.kind for fault in faults[5:]} == set(KINDS)
    assert {fault.rank for fault in faults} <= set(range(4)) and all(0 <= fault.fraction < 1 for fault in faults)
    assert faults == draw_plan(list(KINDS), ranks=4, steps=102, every=10, seed=3)
    assert faults != draw_plan(list(KINDS), ranks=4, steps=102, every=10, seed=4)


def test_changes_are_spread_over_the_run_and_a_single_rank_is_left_alone():
    plan = draw_plan(["kill"], ranks=2, steps=82, every=1, seed=5, sizes=[4, 1, 3])
    assert [(each.ranks, each.step) for each in plan if isinstance(each, Change)] == [(4, 21), (1, 41), (3, 61)]
    sizes = {range(21): 2, range(21, 41): 4, range(41, 61): 1, range(61, 82): 3}
    for steps, size in sizes.items():
        ranks = {each.rank for each in plan if isinstance(each, Fault) and each.step in steps}
        assert ranks == (set(range(size)) if size > 1 else set())


@pytest.mark.parametrize("every", [1, 2, 3])
def test_faults_lie_apart_and_neither_in_the_first_nor_in_the_last_step(every):
    for seed in range(20):
        steps = [fault.step for fault in draw_plan(["kill", "oom"], ranks=2, steps=20, every=every, seed=seed)]
        assert steps and steps[0] >= 1 and steps[-1] <= 18
        assert all(later - earlier >= 2 for earlier, later in itertools.pairwise(steps))


def test_a_drill_of_a_script_that_recovers_finds_the_same_bits(drill, tmp_path):
    directory, told = tmp_path / "run", tmp_path / "drill.json"
    flags = "--faults", "kill,term", "--every", "9", "--seed", "1", "--json", str(told)
    code, said, out = drill("lambda: 1", *flags, directory=str(directory))
    assert code == 0, said
    assert "same bits: 20 steps and the state at the end on 2 ranks" in said
    assert "printed by the script" not in said and "replaced" not in said
    assert not directory.exists()
    facts = json.loads(told.read_text())
    assert facts["equal"] and facts["planned"] == 2 and [run["steps"] for run in facts["runs"]] == [20] * 3
    assert {fault["fault"] for fault in facts["faults"]} == {"kill", "term"}
    for fault in facts["faults"]:
        assert fault["replaced"] == [fault["rank"]] and 0 < fault["noticed_s"] < fault["next_step_s"]
        assert 0 < fault["script_s"] < fault["next_step_s"] - fault["noticed_s"]
        assert fault["repeated"] in (0, 1) and fault["phase"]
    rows = [line.split() for line in out.splitlines() if line.startswith(("kill", "term"))]
    assert [row[:2] for row in rows] == [[fault["fault"], str(fault["rank"])] for fault in facts["faults"]]


def test_a_drill_finds_a_variable_that_begins_anew(drill):
    code, said, _ = drill("lambda: 0.9 ** done", "--faults", "kill", "--every", "20")
    assert code == 1
    assert "different bits: the disturbed run is not the calm one" in said
    assert re.search(r"step \d+ is the first that differs: loss [\d.]+, then [\d.]+", said)
    assert "the model at the end is another one" in said and "stateful" in said
    assert re.search(r"events and output of all runs are in (\S+)", said)


def test_a_script_that_is_not_deterministic_is_told_with_its_first_step(drill, tmp_path):
    kept = tmp_path / "kept"
    code, said, _ = drill("lambda: 1 + time.time() % 1 * (trainer.steps_done >= 3)", "--keep", str(kept))
    assert code == 1
    assert re.search(r"not deterministic: .*step 4 is the first that differs: loss [\d.]+, then [\d.]+", said)
    assert [*kept.glob("*-calm-run")] and str(kept) in said


PLAIN = SCRIPT.format(factor="lambda: 1", directory=None)
ODD = [
    ("print('no Trainer')", 2, "train.py has made no unisono.Trainer"),
    (PLAIN.replace("epochs(2)", "epochs(1, max_steps=2)"), 2, "train.py has 2 steps, and a drill needs 3"),
    (
        "import unisono; unisono.init(); unisono.comm.barrier()\n" + PLAIN,
        1,
        "no rank of this script can be replaced alone: the script has called collectives of its own before",
    ),
]


@pytest.mark.parametrize("script, code, words", ODD)
def test_a_script_without_a_drill_is_told_why(drill, script, code, words):
    found, said, _ = drill(script=script.replace("{", "{{").replace("}", "}}"))
    assert (found, words in said) == (code, True), said


WRONG = [
    (["drill", "-n", "2"], "no program given"),
    (["drill", "train.py"], "a drill needs at least 2 ranks"),
    (
        ["drill", "-n", "2", "--faults", "kill,fire", "train.py"],
        "has 'fire', which is no fault: give some of kill, stop",
    ),
    (["drill", "-n", "2", "--faults", "", "train.py"], "which is no fault"),
    (["drill", "-n", "2", "--every", "0", "train.py"], "--every '0' is not a number of steps: give 1 or more"),
    (["drill", "-n", "2", "--scale", "2,0", "train.py"], "--scale '2,0' is no list of numbers of ranks"),
    (["drill", "-n", "2", "--seed", "-1", "train.py"], "--seed '-1' is not a count"),
    (["drill", "-n", "2", "--stuck-timeout", "0", "train.py"], "--stuck-timeout 0 would kill every rank"),
    (["drill", "-n", "2", "--max-restarts", "3", "train.py"], "no flag --max-restarts"),
    (["drill", "-n", "2", "no.py"], "no such file: 'no.py'"),
    (["drill", "-n", "2", "--json", "no/such/folder", "train.py"], "--json 'no/such/folder' cannot be written"),
    (["drill", "-n", "2", "--keep", "/proc/drill", "train.py"], "the folder of the drill cannot be written"),
    (["drill", "-n", "2", "--keep", ".", "train.py"], "--keep '.' is not empty"),
]


@pytest.mark.parametrize("arguments, words", WRONG)
def test_a_wrong_command_is_one_sentence(launcher, arguments, words):
    launcher.write("train.py", "import unisono")
    result = launcher.run(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert words in result.stderr and result.stderr.count("\n") == 1


def log_of(folder, *losses, ends=()):
    folder.mkdir()
    events = [
        {"time": 1.0, "event": "step", "total_steps": i, "loss": loss, "samples": 4, "lr": 0.1, "step_s": 0.1}
        for i, loss in enumerate(losses, 1)
    ]
    (folder / EVENTS).write_text("".join(f"{json.dumps(event)}\n" for event in events if event["loss"] is not None))
    for rank, model in enumerate(ends):
        line = {"total_steps": len(losses), "digests": {"model": model}}
        (folder / f"end-{rank}.jsonl").write_text(f"{json.dumps(line)}\n")
    log = JobLog(folder)
    log.read()
    return log


def test_runs_are_compared_by_all_digits_and_all_ranks(tmp_path):
    calm = log_of(tmp_path / "calm", 0.5, 0.25, ends="aa")
    assert differences(calm, log_of(tmp_path / "same", 0.5, 0.25, ends="aa")) == []
    near = 0.25000000000000006
    found = differences(calm, log_of(tmp_path / "near", 0.5, near, ends="ab"))
    assert found == [
        f"step 2 is the first that differs: loss 0.25, then {near}",
        "the model at the end is another one on rank 1",
    ]
    lost = log_of(tmp_path / "lost", None, 0.25, ends="aa")
    assert differences(calm, lost) == ["the one run does 2 steps, and the other lacks step 1"]
    assert differences(calm, lost, may_miss=1) == []
