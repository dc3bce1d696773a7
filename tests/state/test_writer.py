"""Training goes on while a checkpoint is written, and loses none."""

import threading

import pytest
import torch

from unisono.errors import CheckpointError
from unisono.state.checkpoint_store import CheckpointStore
from unisono.state.writer import BackgroundWriter


class GatedStore(CheckpointStore):
    """A store whose writes wait at a gate and can be made to fail."""

    def __init__(self, folder):
        super().__init__(folder)
        self.gate = threading.Event()
        self.gate.set()
        self.begun = []
        self.failing = set()

    def write(self, step, groups, document):
        self.begun.append(step)
        assert self.gate.wait(60)
        if step in self.failing:
            raise CheckpointError(f"no space for step {step}")
        return super().write(step, groups, document)


@pytest.fixture
def store(tmp_path):
    return GatedStore(tmp_path / "checkpoints")


@pytest.fixture(autouse=True)
def no_thread_stays():
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def model(value):
    return {"model": {"w": torch.full((5,), float(value))}}


def test_training_may_change_the_state_after_submit(store):
    weight, wide = torch.ones(4), torch.ones(4, 4)
    number = torch.tensor([1 + 2j])
    document = {"losses": [1.0]}
    state = {
        "model": {"w": weight, "tied": weight, "view": wide[:, 1], "conj": number.conj(), "none": torch.ones(0)},
        "optimizer": {"w": torch.nn.Parameter(weight)},
    }
    store.gate.clear()
    writer = BackgroundWriter(store, keep=1)
    writer.submit(1, state, document)
    weight.zero_()
    wide.zero_()
    number.zero_()
    document["losses"].append(2.0)
    state["model"].clear()
    store.gate.set()
    assert writer.wait() is None
    _, found, document = store.load(store.list()[0])
    assert document == {"losses": [1.0]}
    assert list(found["model"]) == ["w", "tied", "view", "conj", "none"]
    for name in ("w", "tied", "view"):
        assert torch.equal(found["model"][name], torch.ones(4))
    assert found["model"]["tied"] is found["model"]["w"]
    assert torch.equal(found["model"]["conj"], torch.tensor([1 - 2j]))
    assert torch.equal(found["optimizer"]["w"], torch.ones(4))


def test_writes_are_in_order_one_at_a_time_and_pruned(store):
    written = []
    writer = BackgroundWriter(store, keep=2, on_written=lambda info, seconds: written.append((info, seconds)))
    for step in range(6):
        writer.submit(step, model(step), {"step": step})
    assert writer.wait() is None
    assert [info.step for info, _ in written] == list(range(6))
    assert all(seconds > 0 for _, seconds in written)
    assert [info.step for info in store.list()] == [5, 4]


def test_a_submit_waits_for_the_one_before(store):
    writer = BackgroundWriter(store, keep=3)
    store.gate.clear()
    writer.submit(1, model(1), {})
    assert writer.is_writing
    assert writer.poll() is None
    second = threading.Thread(target=writer.submit, args=(2, model(2), {}))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    assert store.begun == [1]
    store.gate.set()
    second.join()
    assert writer.wait() is None
    assert store.begun == [1, 2]
    assert [info.step for info in store.list()] == [2, 1]


def test_no_thread_before_the_first_submit(store):
    before = threading.active_count()
    writer = BackgroundWriter(store, keep=1)
    assert threading.active_count() == before
    assert not writer.is_writing
    assert writer.wait() is None


def test_an_error_that_nobody_asked_for_is_raised_by_the_next_submit_once(store):
    store.failing = {2}
    writer = BackgroundWriter(store, keep=3)
    writer.submit(1, model(1), {})
    writer.submit(2, model(2), {})
    with pytest.raises(CheckpointError, match="no space for step 2"):
        writer.submit(3, model(3), {})
    assert store.begun == [1, 2]
    writer.submit(3, model(3), {})
    assert writer.wait() is None
    assert [info.step for info in store.list()] == [3, 1]


def test_a_caller_who_asks_goes_on_and_the_newer_state_makes_up_for_the_lost_one(store):
    store.failing = {1}
    writer = BackgroundWriter(store, keep=3)
    writer.submit(1, model(1), {})
    assert "no space for step 1" in str(writer.wait())
    assert writer.wait() is None
    assert writer.poll() is None
    writer.submit(2, model(2), {})
    assert writer.wait() is None
    assert [info.step for info in store.list()] == [2]


def test_an_error_in_on_written_is_handed_over_with_its_cause(store):
    def broken(info, seconds):
        raise RuntimeError("mine")

    writer = BackgroundWriter(store, keep=1, on_written=broken)
    writer.submit(1, model(1), {})
    error = writer.wait()
    assert "step 1 ended by RuntimeError: mine" in str(error)
    assert isinstance(error.__cause__, RuntimeError)
    assert [info.step for info in store.list()] == [1]


def test_wrong_arguments_are_refused_at_submit(store):
    writer = BackgroundWriter(store, keep=1)
    with pytest.raises(CheckpointError, match=r"'model\.w'.*to_dense"):
        writer.submit(1, {"model": {"w": torch.eye(2).to_sparse()}}, {})
    with pytest.raises(TypeError, match="document"):
        writer.submit(1, model(1), {"a": {1, 2}})
    with pytest.raises(ValueError, match="keep=0"):
        BackgroundWriter(store, keep=0)
