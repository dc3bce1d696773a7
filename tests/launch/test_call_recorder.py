"""Recording what scripts call in torch.distributed: complete, and without any other effect on them.

That torch may be imported afterwards is in test_rendezvous_patch.py, beside the other change that waits for it.
"""

import json
from pathlib import Path

import pytest

_PROLOGUE = """
import json, os, sys, time
from unisono.launch.hang.status_block import StatusBlock, create
from unisono.launch.hang.call_recorder import install
page, (ask, question) = StatusBlock(create()), os.pipe()
def calls(since=0):
    return [[c.name, c.kind, c.group, c.sequence, c.tensors, c.reduction, c.peer, c.line, c.function, c.failed,
             c.running] for c in page.calls() if c.number > since]
def start():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def tell(*values):
    print(json.dumps(values))
"""


@pytest.fixture
def run(rank_host, tmp_path: Path):
    """Run a program after the prologue, in a process of its own that has torch imported. Returns: what it told."""

    def run(source: str) -> list[object]:
        path = tmp_path / "program.py"
        path.write_text(_PROLOGUE + source)
        codes, _ = rank_host.run(1, path, folder=tmp_path)
        assert codes == [0], (tmp_path / "err0").read_text()
        return json.loads((tmp_path / "out0").read_text().splitlines()[-1])

    return run


def test_calls_are_recorded_with_group_number_shape_and_place(run):
    told = run("""
import torch, torch.distributed as dist
from torch.distributed import broadcast as imported_earlier
install(page, ask=ask, dump=-1)
start()
group = dist.new_group([0])
def step():
    dist.all_reduce(torch.ones(4, 4), op=dist.ReduceOp.MAX)
    imported_earlier(torch.ones(2, dtype=torch.int64), 0, group=group)
    dist.all_gather([torch.ones(3), torch.ones(3)][:1], torch.ones(3), async_op=True).wait()
    dist.all_gather_object([None], "x")
    dist.barrier()
    dist.monitored_barrier()
    dist.all_reduce(torch.ones(1), op=dist.ReduceOp(dist.ReduceOp.PRODUCT))
step()
tell(calls())
""")[0]
    made, grouped, *collectives = told
    assert made[:2] == ["init_process_group", "setup"] and grouped[:2] == ["new_group", "setup"]
    # What these call themselves is not recorded: all_gather_object gathers twice.
    names = ["all_reduce", "broadcast", "all_gather", "all_gather_object", "barrier", "monitored_barrier", "all_reduce"]
    assert [call[0] for call in collectives] == names
    assert [call[3] for call in collectives] == [1, 1, 2, 3, 4, 5, 6]
    all_reduce, broadcast, all_gather = collectives[:3]
    assert all_reduce[4:7] == ["float32[4, 4]", "max", None]
    assert broadcast[4:7] == ["int64[2]", "", 0] and broadcast[2] != all_reduce[2] == all_gather[2]
    assert all_gather[4] == "float32[3]" and collectives[-1][5] == "product"
    assert {call[8] for call in collectives} == {"step"}
    assert [call[7] for call in collectives] == list(range(all_reduce[7], all_reduce[7] + 7))
    assert not any(call[9] or call[10] for call in told)


def test_functions_stay_the_same_objects_and_raise_the_same_errors(run):
    told = run("""
import inspect, torch, torch.distributed as dist
names = ["all_reduce", "broadcast", "barrier", "send", "init_process_group", "new_group", "all_gather_object"]
before = [(getattr(dist, name), str(inspect.signature(getattr(dist, name)))) for name in names]
def errors():
    found = []
    for attempt in (lambda: dist.all_reduce("x"), lambda: dist.all_reduce(), lambda: dist.broadcast(torch.ones(1)),
                    lambda: dist.all_gather(3, 4), lambda: dist.barrier(group="x"), lambda: dist.nothing()):
        try:
            found.append(repr(attempt()))
        except Exception as error:
            found.append(repr(error))
    return found
earlier = errors()
start()
plain = errors()
dist.destroy_process_group()
install(page, ask=ask, dump=-1)
after = [(getattr(dist, name), str(inspect.signature(getattr(dist, name)))) for name in names]
same = [earlier == errors()]
start()
same.append(plain == errors())
tell(before == after, same)
""")
    assert told == [True, [True, True]]


def test_a_call_that_is_refused_keeps_no_number(run):
    told = run("""
import torch, torch.distributed as dist
install(page, ask=ask, dump=-1)
start()
try:
    dist.all_reduce([1])
except TypeError:
    dist.all_reduce(torch.ones(1))
tell([(call[3], call[9]) for call in calls()][1:], page.completed)
""")
    assert told == [[[1, True], [1, False]], 2]


def test_groups_made_anew_begin_to_count_anew(run):
    told = run("""
import torch, torch.distributed as dist
install(page, ask=ask, dump=-1)
for _ in range(2):
    start()
    dist.barrier()
    dist.barrier()
    dist.destroy_process_group()
tell([(call.epoch, call.sequence) for call in page.calls() if call.name == "barrier"])
""")
    assert told == [[[1, 1], [1, 2], [2, 1], [2, 2]]]


def test_a_destroyed_group_is_not_kept_alive(run):
    told = run("""
import gc, torch, torch.distributed as dist, weakref
install(page, ask=ask, dump=-1)
start()
group = dist.new_group([0])
dist.barrier(group=group)
reference = weakref.ref(group)
dist.destroy_process_group(group)
del group
gc.collect()
tell(reference() is None)
""")
    assert told == [True]


def test_a_forked_process_does_not_write_to_the_page(run):
    told = run("""
import torch, torch.distributed as dist
install(page, ask=ask, dump=-1)
start()
begun = page.begun
if os.fork() == 0:
    try:
        dist.all_reduce("refused")
    finally:
        os._exit(0)
os.wait()
tell(page.begun - begun)
""")
    assert told == [0]


def test_the_flight_recorder_is_read_when_asked(run):
    told = run("""
import threading, torch, torch.distributed as dist
install(page, ask=ask, dump=-1)
threads = threading.active_count()
start()
dist.all_reduce(torch.ones(1), async_op=True).wait()
met, answer = page.met, None
while not (answer := page.read_answer()) or answer[1]["status"].get("0", {}).get("completed", -1) < 1:  # -1: none yet
    os.write(question, b"?")
    time.sleep(0.05)
tell(met, page.met, answer[1]["groups"], answer[1]["pending"], threading.active_count() - threads)
""")
    assert told == [False, True, {"0": "0"}, [], 0]


def test_compiled_code_gives_the_same_and_is_cut_at_the_same_places(run):
    told = run("""
import torch, torch.distributed as dist
def work(x):
    y = x * 2
    dist.broadcast(y, 0)
    return y + 1
def compiled():
    torch._dynamo.reset()
    graphs = []
    def backend(graph, inputs):
        graphs.append(len(list(graph.graph.nodes)))
        return graph.forward
    result = torch.compile(work, backend=backend)(torch.ones(3)).tolist()
    return result, graphs
start()
plain = compiled()
dist.destroy_process_group()
install(page, ask=ask, dump=-1)
start()
tell(plain == compiled(), len(plain[1]), [call[0] for call in calls()])
""")
    assert told == [True, 2, ["init_process_group", "broadcast"]]


def test_a_call_in_a_thread_of_autograd_is_at_the_line_of_the_main_thread(run):
    """Hooks of GPUs run in threads that Python has not started, without a frame of the user's."""
    told = run("""
import _thread, threading, torch, torch.distributed as dist
install(page, ask=ask, dump=-1)
start()
def backward(through):
    before = calls()
    through(dist.all_reduce, (torch.ones(2),))
    while len(calls()) == len(before) or calls()[-1][10]:
        pass
backward(_thread.start_new_thread)
backward(lambda function, args: threading.Thread(target=function, args=args).start())
tell(calls()[1:])
""")[0]
    of_torch, of_python = told
    of_main_thread = ("backward", "calls", "<listcomp>")  # the last is a frame of its own before Python 3.12
    assert of_torch[8] in of_main_thread and of_torch[4] == "float32[2]"
    assert of_python[8] not in of_main_thread  # whose line would say nothing of this thread
