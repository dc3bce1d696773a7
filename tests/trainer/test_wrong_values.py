"""Each argument refuses what it cannot mean, in one sentence, before anything starts; numbers of NumPy are numbers."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel
from torch.utils.data import TensorDataset

import unisono
from refusals import check_refused, each_case
from unisono.errors import DataError
from unisono.parallel import replicate

DATA = TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3)


def per_sample(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def make_trainer(model=None, **options):
    model = nn.Linear(4, 3) if model is None else model
    if "optimizer" not in options:
        options["optimizer"] = torch.optim.SGD(nn.Linear(4, 3).parameters(), lr=0.1)
    optimizer = options.pop("optimizer")
    return unisono.Trainer(model, optimizer, **{"virtual_ranks": 4, "progress": False, **options})


def with_model(**options):
    model = nn.Linear(4, 3)
    return make_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **options)


def batches(**options):
    return next(make_trainer().batches(DATA, **{"batch_size": 8, **options}))


def fit(dataset=DATA, loss_fn=per_sample, trainer=None, **options):
    """A run whose first epoch says so: what is refused has to be refused before."""

    def seen(model, batch):
        raise AssertionError("training has begun")

    loss_fn = seen if loss_fn is per_sample else loss_fn
    return (trainer or with_model()).fit(loss_fn, dataset, **{"batch_size": 8, "epochs": 1, **options})


def evaluate(function=per_sample, **options):
    return make_trainer().evaluate(function, DATA, **options)


def predict(function=per_sample, dataset=DATA, **options):
    return make_trainer().predict(function, dataset, **options)


def log(**values):
    make_trainer().log(**values)


TRAINER = [
    ({"virtual_ranks": "8"}, TypeError, "virtual_ranks='8' must be a whole number, such as 8, and is a str"),
    ({"virtual_ranks": 8.0}, TypeError, "virtual_ranks=8.0 must be "),
    ({"virtual_ranks": True}, TypeError, "virtual_ranks=True must be "),
    ({"virtual_ranks": -1}, ValueError, "virtual_ranks=-1 must be at least 1"),
    ({"seed": "0"}, TypeError, "seed='0' must be "),
    ({"seed": 0.5}, TypeError, "seed=0.5 must be "),
    ({"seed": None}, TypeError, "seed=None must be "),
    ({"directory": 7}, TypeError, "directory=7 must be the path of a folder"),
    ({"directory": ""}, TypeError, "directory='' must be the path of a folder"),
    ({"resume": True}, ValueError, "resume=True must be one of 'auto', 'never', 'must'"),
    ({"resume": ["auto"]}, ValueError, "resume=['auto'] must be one of"),
    ({"checkpoints": 100}, TypeError, "checkpoints=100 is an int; give unisono.Checkpoints(every_steps=100)"),
    ({"checkpoints": 0}, TypeError, "checkpoints=0 is an int"),
    ({"scheduler": 0.1}, TypeError, "scheduler is a float; expected one of torch.optim.lr_scheduler"),
    ({"scheduler_interval": 1}, ValueError, "scheduler_interval=1 must be one of 'step', 'epoch'"),
    ({"clip_grad_norm": "1"}, TypeError, "clip_grad_norm='1' must be a number, and is a str"),
    ({"clip_grad_norm": True}, TypeError, "clip_grad_norm=True must be "),
    ({"clip_grad_norm": float("nan")}, ValueError, "clip_grad_norm=nan must be a number"),
    ({"clip_grad_norm": 0}, ValueError, "clip_grad_norm=0 must be positive; None does not clip"),
    ({"autocast": torch.bfloat16}, ValueError, "autocast=torch.bfloat16 must be one of 'bf16', 'fp16', None"),
    ({"autocast": True}, ValueError, "autocast=True must be one of"),
    ({"ema_decay": "0.9"}, TypeError, "ema_decay='0.9' must be "),
    ({"ema_decay": float("nan")}, ValueError, "ema_decay=nan must be a number"),
    ({"stateful": [nn.Linear(1, 1)]}, TypeError, 'stateful is a list; give the objects by name, as {"name": object}'),
    ({"stateful": {"rng": 3}}, TypeError, "stateful['rng'] is an int, which has no state_dict"),
    ({"device": "gpu"}, ValueError, "device='gpu' is no device that torch knows"),
    ({"device": 0}, TypeError, "device=0 is an int"),
    ({"device": "meta"}, ValueError, 'device="meta" computes nothing'),
    ({"threads": 1.5}, TypeError, "threads=1.5 must be "),
    ({"threads": None}, TypeError, "threads=None must be "),
    ({"overlap": "no"}, TypeError, "overlap='no' must be True or False, and is a str"),
    ({"engine": None}, ValueError, "engine=None must be one of 'auto', 'shared', 'collective'"),
    ({"progress": 0}, TypeError, "progress=0 must be True or False, and is an int"),
    ({"model": nn.Linear}, TypeError, "model is the class Linear, not called"),
    ({"model": {}}, ValueError, "model is an empty dict"),
    ({"model": [nn.Linear(4, 3)]}, TypeError, "model is a list; expected a torch.nn.Module, or a dict of them by name"),
    ({"model": {"net": 3}}, TypeError, "model['net'] is an int"),
    ({"model": {0: nn.Linear(4, 3)}}, TypeError, "model has the key 0"),
    ({"model": nn.LazyLinear(3)}, ValueError, "'model.weight' has no size yet: run the model on one batch"),
    ({"model": nn.Linear(4, 3, device="meta")}, ValueError, "'model.weight' is on the meta device"),
    ({"optimizer": [1]}, TypeError, "optimizer is a list; expected a torch.optim.Optimizer"),
]
BATCHES = [
    ({"batch_size": "8"}, TypeError, "batch_size='8' must be a whole number, and is a str"),
    ({"batch_size": 8.0}, TypeError, "batch_size=8.0 must be "),
    ({"batch_size": [8]}, TypeError, "batch_size=[8] must be "),
    ({"batch_size": -8}, ValueError, "batch_size=-8 must be at least 1"),
    ({"micro_batch_size": 2.0}, TypeError, "micro_batch_size=2.0 must be "),
    ({"micro_batch_size": True}, TypeError, "micro_batch_size=True must be "),
    ({"workers": "2"}, TypeError, "workers='2' must be "),
    ({"workers": None}, TypeError, "workers=None must be "),
    ({"shuffle": "no"}, TypeError, "shuffle='no' must be "),
    ({"drop_last": 1}, TypeError, "drop_last=1 must be "),
    ({"collate_fn": [1]}, TypeError, "collate_fn is a list; give a function of a list of samples"),
]
EVALUATE = [
    ({"batch_size": 0}, ValueError, "batch_size=0 must be at least 1"),
    ({"batch_size": "8"}, TypeError, "batch_size='8' must be "),
    ({"ema": "yes"}, TypeError, "ema='yes' must be "),
    ({"function": DATA}, TypeError, "the evaluated function is a TensorDataset, which cannot be called"),
    ({"name": 3}, TypeError, "name=3 must be a text, and is an int"),
    ({"name": None}, TypeError, "name=None must be "),
    ({"name": ""}, ValueError, "name='' must not be empty"),
]
PREDICT = [
    ({"batch_size": 0}, ValueError, "batch_size=0 must be at least 1"),
    ({"batch_size": 2}, ValueError, "batch_size=2 is smaller than virtual_ranks=4"),
    ({"micro_batch_size": 0}, ValueError, "micro_batch_size=0 must be at least 1"),
    ({"ema": 1}, TypeError, "ema=1 must be True or False"),
    ({"ema": True}, ValueError, "ema=True needs averaged weights"),
    ({"function": DATA}, TypeError, "the function of trainer.predict is a TensorDataset, which cannot be called"),
    ({"to": "mian"}, ValueError, 'to=\'mian\' must be "main", "all", "iterator" or a path that ends in .safetensors'),
    ({"to": None}, TypeError, "to=None is a NoneType; give"),
    ({"dataset": "data/test"}, TypeError, "a str is no map-style dataset"),
]
LOG = [
    ({"loss": b"low"}, TypeError, "trainer.log(loss=b'low') is a bytes, which is no real number"),
    ({"loss": None}, TypeError, "trainer.log(loss=None) is a NoneType"),
    ({"loss": 1j}, TypeError, "trainer.log(loss=1j) is a complex"),
    ({"loss": [1.0]}, TypeError, "trainer.log(loss=[1.0]) is a list"),
    (
        {"loss": torch.ones(3)},
        ValueError,
        "trainer.log(loss=...) is a Tensor of shape [3]: log one number for each name",
    ),
    ({"loss": torch.ones(0)}, ValueError, "is a Tensor of shape [0]"),
    ({"loss": torch.ones(1, dtype=torch.complex64)}, TypeError, "which is no real number"),
    ({"loss": np.ones(2)}, ValueError, "is a ndarray of shape [2]"),
    ({"loss": np.array(["a"])}, TypeError, "is a ndarray, which is no real number"),
    ({"": 1}, ValueError, "the name '' of 0 characters: give 1 to 200 printable characters"),
    ({"a\nb": 1}, ValueError, "the name 'a\\nb' of 3 characters"),
    ({"a" * 201: 1}, ValueError, "of 201 characters"),
]
FIT = [
    ({"metrics": [per_sample], "validation": DATA}, TypeError, "metrics is a list; give functions by name, as {"),
    (
        {"metrics": {"accuracy": 3}, "validation": DATA},
        TypeError,
        "metrics['accuracy'] is an int, which cannot be called",
    ),
    (
        {"metrics": {1: per_sample}, "validation": DATA},
        TypeError,
        "metrics has the key 1; functions are given by",
    ),
    ({"metrics": {"accuracy": per_sample}}, ValueError, "give validation=dataset as well"),
    ({"validation": 3}, TypeError, "an int is no map-style dataset"),
    ({"validation": []}, DataError, "the dataset (list) is empty"),
    ({"validation": {"test": DATA}}, TypeError, "the dataset is a dict with the keys 'test': give one of its values"),
    ({"validation": TensorDataset}, TypeError, "the dataset is the class TensorDataset, not called"),
    (
        {"dataset": {"train": DATA, "test": DATA}},
        TypeError,
        "the dataset is a dict with the keys 'train', 'test': give",
    ),
    ({"dataset": "data/train"}, TypeError, "a str is no map-style dataset"),
    ({"loss_fn": 3}, TypeError, "loss_fn is an int, which cannot be called: trainer.fit(loss_fn, dataset, ...) takes"),
    ({"loss_fn": torch.ones(())}, TypeError, "loss_fn is a tensor: give trainer.fit(loss_fn, dataset, ...) the func"),
    ({"loss_fn": DATA, "dataset": per_sample}, TypeError, "loss_fn is a TensorDataset, which cannot be called"),
    ({"batch_size": "8", "validation": DATA}, TypeError, "batch_size='8' must be "),
    ({"epochs": "2", "validation": DATA}, TypeError, "epochs='2' must be "),
    ({"workers": -1, "validation": DATA}, ValueError, "workers=-1 must be 0"),
    ({"steps": 3}, TypeError, "trainer.fit has no argument 'steps': did you mean max_steps?"),
    ({"zoo": 3}, TypeError, "trainer.fit has no argument 'zoo': it has batch_size, epochs, max_steps"),
    ({"on_step": 3}, TypeError, "on_step is an int, which cannot be called"),
    ({"validate_every": 5}, ValueError, "validate_every is given, and no data to evaluate on"),
    ({"validate_every": 0, "validation": DATA}, ValueError, "validate_every=0 must be at least 1"),
    ({"on_evaluation": print}, ValueError, "on_evaluation is given, and no data to evaluate on"),
]
CHECKPOINTS = [
    ({"every_steps": "10"}, TypeError, "every_steps='10' must be a whole number of steps, or None, and is a str"),
    ({"every_steps": True}, TypeError, "every_steps=True must be "),
    ({"every_minutes": "10"}, TypeError, "every_minutes='10' must be a number, and is a str"),
    ({"every_minutes": float("nan")}, ValueError, "every_minutes=nan must be a number"),
    ({"every_epoch": 2}, TypeError, "every_epoch=2 must be True or False, and is an int"),
    ({"keep": 1.0}, TypeError, "keep=1.0 must be a whole number of checkpoints, and is a float"),
]
TABLES = {
    make_trainer: TRAINER,
    batches: BATCHES,
    evaluate: EVALUATE,
    predict: PREDICT,
    log: LOG,
    fit: FIT,
    unisono.Checkpoints: CHECKPOINTS,
}


@each_case(TABLES)
def test_what_cannot_be_meant_is_refused_in_a_sentence(call, options, error, words):
    check_refused(call, options, error, words)


def test_a_log_of_nothing_is_a_mistake():
    with pytest.raises(TypeError, match=r"trainer\.log was given nothing: give it numbers by name"):
        log()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:3", torch.device("cuda", 0)])
def test_a_gpu_that_is_not_there(device):
    with pytest.raises(ValueError, match="but torch sees 0 GPUs here"):
        make_trainer(device=device)


@pytest.mark.parametrize("steps", [{"epochs": 1.0}, {"epochs": "2"}, {"epochs": 1, "max_steps": True}])
def test_epochs_are_whole_numbers(steps):
    with pytest.raises(TypeError, match="must be a whole number, and is a"):
        make_trainer().epochs(**steps)


def test_numbers_of_numpy_are_numbers():
    one = partial(with_model, device="cpu:0")
    torch.manual_seed(0)
    plain = one(seed=3, virtual_ranks=4, clip_grad_norm=1.0)
    torch.manual_seed(0)
    numpys = one(seed=np.int64(3), virtual_ranks=np.int32(4), clip_grad_norm=np.float32(1.0))
    plain.fit(per_sample, DATA, batch_size=8, epochs=2, micro_batch_size=1)
    numpys.fit(per_sample, DATA, batch_size=np.int64(8), epochs=np.int8(2), micro_batch_size=np.int16(1))
    assert plain.digest() == numpys.digest()


def test_a_batch_is_for_step_and_says_so():
    trainer = with_model()
    batch = next(trainer.batches(DATA, batch_size=8))
    with pytest.raises(
        TypeError, match=r"cannot be unpacked or looped over: .* Pass it to trainer\.step\(loss_fn, batch\)"
    ):
        _x, _y = batch
    with pytest.raises(TypeError, match=r"no entry 0: .* Pass it to trainer\.step"):
        batch[0]
    with pytest.raises(AttributeError, match=r"no attribute 'to': .* Pass it to trainer\.step"):
        batch.to("cpu")
    with pytest.raises(TypeError, match=r"loss_fn is a tensor: give trainer.step\(loss_fn, batch\) the func"):
        trainer.step(torch.ones(1), batch)
    assert len(batch) == 8
    assert trainer.step(per_sample, batch) > 0


class FSDPModule:
    """What fully_shard puts among the bases of a module's class."""


FSDPModule.__module__ = "torch.distributed.fsdp"


class Sharded(nn.Linear, FSDPModule):
    pass


def test_models_that_another_wraps_or_shards_are_refused():
    inner = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=r"'model' is wrapped in DataParallel, .* in it, model\.module, and start"):
        make_trainer(DataParallel(inner))
    with pytest.raises(ValueError, match=r"'model\.1' is wrapped in DataParallel"):
        make_trainer(nn.Sequential(nn.ReLU(), DataParallel(inner)))
    with pytest.raises(ValueError, match=r"'net' is wrapped in FSDPModule, .* the model as it was before fully_shard"):
        make_trainer({"net": Sharded(4, 3)})
    handle = replicate(inner)
    with pytest.raises(TypeError, match=r"the handle that unisono\.parallel\.replicate returned"):
        make_trainer(handle)
    with pytest.raises(TypeError, match=r"call the model\. model = replicate\(model\) loses it"):
        handle(torch.ones(4))
    with pytest.raises(AttributeError, match=r"no attribute 'parameters': .*use the model\. model = repl"):
        handle.parameters()
    assert not hasattr(handle, "train") and not hasattr(handle, "__wrapped__")


WRAPPED = """
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed._composable import replicate as torchs_replicate
from unisono.parallel import replicate

def refused(model, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        unisono.Trainer(model, optimizer, virtual_ranks=4, progress=False)
    except (TypeError, ValueError) as error:
        say(error)
    else:
        say("let through")

refused(DistributedDataParallel(nn.Linear(4, 3)))
refused(nn.Sequential(DistributedDataParallel(nn.Linear(4, 3))))
refused(fully_shard(nn.Linear(4, 3), mesh=init_device_mesh("cpu", (2,))))
refused(torchs_replicate(nn.Linear(4, 3)))
replicated = nn.Linear(4, 3)
handle = replicate(replicated)
refused(replicated)
handle.close()
import accelerate
made = nn.Linear(4, 3)
sgd = torch.optim.SGD(made.parameters(), lr=0.1)
accelerate.Accelerator(cpu=True)
refused(made, accelerate.optimizer.AcceleratedOptimizer(sgd))
"""


def test_models_of_several_ranks_that_another_wraps_are_refused(run_alone):
    for said in run_alone(2, WRAPPED):
        ddp, inside, sharded, composable, replicated, accelerated = said.splitlines()
        assert "'model' is wrapped in DistributedDataParallel" in ddp
        assert "give Trainer the module in it, model.module." in ddp
        assert "'model.0' is wrapped in DistributedDataParallel" in inside
        assert "'model' is wrapped in FSDPModule" in sharded
        assert "'model' is wrapped in DDP, " in composable
        assert "give Trainer the model as it was before replicate." in composable
        assert "replicate sums the gradient of 'model.weight' over ranks already" in replicated
        assert "optimizer is an AcceleratedOptimizer, which decides itself when to step" in accelerated
