"""Each piece for a loop of your own refuses what an argument cannot mean, in one sentence, before anything starts."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel
from torch.utils.data import TensorDataset

import unisono
from refusals import check_refused, each_case
from unisono import metrics, parallel
from unisono.data import loader

DATA = TensorDataset(torch.randn(40, 4), torch.arange(40) % 3)
NAN = float("nan")


def load(**options):
    return loader(**{"dataset": DATA, "batch_size": 8, **options})


def replicate(**options):
    return parallel.replicate(**{"models": nn.Linear(4, 3), **options})


def joined(**options):
    """Ask for a job where there is one already."""
    with unisono.init():
        unisono.init(**options)


LOAD = [
    ({"batch_size": "8"}, TypeError, "batch_size='8' must be a whole number"),
    ({"batch_size": 8.0}, TypeError, "batch_size=8.0 must be "),
    ({"batch_size": True}, TypeError, "batch_size=True must be "),
    ({"batch_size": 0}, ValueError, "batch_size=0 is smaller than the number of ranks, 1"),
    ({"shuffle": "no"}, TypeError, "shuffle='no' must be True or False, and is a str"),
    ({"shuffle": 1}, TypeError, "shuffle=1 must be "),
    ({"seed": None}, TypeError, "seed=None must be "),
    ({"workers": "2"}, TypeError, "workers='2' must be "),
    ({"workers": -1}, ValueError, "workers=-1 must be 0 (read in the training process) or more"),
    ({"drop_last": "no"}, TypeError, "drop_last='no' must be "),
    ({"pin_memory": 1}, TypeError, "pin_memory=1 must be "),
    ({"collate_fn": [1]}, TypeError, "collate_fn is a list; give a function of a list of samples"),
    ({"group": "all"}, TypeError, "group='all' is no process group"),
    ({"rank": "0", "world_size": 2}, TypeError, "rank='0' must be "),
    ({"rank": 2, "world_size": 2}, ValueError, "rank=2 is outside [0, 2)"),
    ({"dataset": None}, TypeError, "a NoneType is no map-style dataset"),
    ({"dataset": "data/train"}, TypeError, "a str is no map-style dataset"),
    ({"dataset": TensorDataset}, TypeError, "the dataset is the class TensorDataset, not called: give an object of it"),
    ({"dataset": {"train": DATA, "test": DATA}}, TypeError, "is a dict with the keys 'train', 'test': give one of its"),
]
REPLICATE = [
    ({"models": nn.Linear}, TypeError, "models is the class Linear, not called: give a module"),
    ({"models": "net"}, TypeError, "models is a str: give a module, or a list or dict of modules"),
    ({"models": []}, ValueError, "no model was given"),
    ({"models": {"net": 3}}, TypeError, "net is an int, and must be a torch.nn.Module"),
    ({"models": {0: nn.Linear(1, 1)}}, TypeError, "models has the key 0; models are given by names"),
    ({"models": nn.Sequential(DataParallel(nn.Linear(1, 1)))}, TypeError, "model.0 is wrapped in DataParallel, which"),
    ({"models": nn.LazyLinear(3)}, ValueError, "parameter 'weight' of model has no shape yet"),
    ({"models": nn.Linear(4, 3, device="meta")}, ValueError, "parameter 'weight' of model is on the meta device"),
    ({"group": "all"}, TypeError, "group='all' is no process group"),
    ({"bucket_mb": "25"}, TypeError, "bucket_mb='25' must be a number"),
    ({"bucket_mb": NAN}, ValueError, "bucket_mb=nan must be positive"),
    ({"first_bucket_mb": -1}, ValueError, "first_bucket_mb=-1 must be positive"),
    ({"average": "no"}, TypeError, "average='no' must be True or False, and is a str"),
    ({"average": None}, TypeError, "average=None must be "),
    ({"buffers": True}, ValueError, 'buffers=True must be "broadcast", "mean" or None'),
    ({"check": 0}, TypeError, "check=0 must be "),
    ({"static_graph": 1}, TypeError, "static_graph=1 must be "),
    ({"overlap": "no"}, TypeError, "overlap='no' must be "),
    ({"comm_hook": 3}, TypeError, "comm_hook=3 must be a function"),
    ({"timeout": "30"}, TypeError, "timeout='30' must be a number of seconds"),
    ({"timeout": NAN}, ValueError, "timeout=nan must be a finite number of seconds"),
    ({"timeout": -1}, ValueError, "timeout=-1 s must be positive"),
]
INIT = [
    ({"backend": 3}, TypeError, 'backend=3 must be a name such as "auto"'),
    ({"backend": "glo"}, ValueError, "backend='glo' names no backend that torch has"),
    ({"init_method": 3}, TypeError, "init_method=3 must be a text"),
    ({"init_method": "nonsense"}, ValueError, "init_method='nonsense' needs to know who this process is"),
    ({"store": "s", "rank": 0, "world_size": 1}, TypeError, "store is a str; give a store of torch.distributed"),
    ({"rank": "0"}, TypeError, "rank='0' must be a whole number, and is a str"),
    ({"rank": True}, TypeError, "rank=True must be "),
    ({"rank": 0.0, "world_size": 1}, TypeError, "rank=0.0 must be "),
    ({"rank": 0, "world_size": "2"}, TypeError, "world_size='2' must be "),
    ({"rank": 0}, ValueError, "rank is given and world_size is not"),
    ({"rank": 3, "world_size": 2}, ValueError, "rank=3 and world_size=2 do not fit"),
    ({"timeout": "30"}, TypeError, "timeout='30' must be seconds or a timedelta"),
    ({"timeout": NAN}, ValueError, "timeout=nan must be more than 0 seconds, and finite"),
    ({"timeout": timedelta(0)}, ValueError, "must be more than 0 seconds"),
    ({"device": "gpu"}, ValueError, "device='gpu' is no device"),
    ({"device": [1]}, ValueError, "device=[1] is no device"),
    ({"device": "meta"}, ValueError, 'device="meta" computes nothing'),
]
JOINED = [
    ({"rank": 0.0}, TypeError, "rank=0.0 must be "),
    ({"rank": 1}, ValueError, "rank=1, but this process is in a job that has 0"),
    ({"world_size": "1"}, TypeError, "world_size='1' must be "),
    ({"store": "s"}, TypeError, "store is a str"),
    ({"backend": "gloo"}, ValueError, "backend=gloo, but this process is in a job that has shm"),
    ({"device": "meta"}, ValueError, 'device="meta" computes nothing'),
]
ACCURACY = [
    ({"k": "1"}, TypeError, "k='1' must be a whole number"),
    ({"k": True}, TypeError, "k=True must be "),
    ({"k": 0}, ValueError, "k=0 must be at least 1"),
    ({"ignore_index": "pad"}, TypeError, "ignore_index='pad' must be a class number, or None"),
    ({"ignore_index": 1.5}, TypeError, "ignore_index=1.5 must be "),
    ({"threshold": "0.5"}, TypeError, "threshold='0.5' must be a number"),
    ({"threshold": True}, TypeError, "threshold=True must be "),
    ({"threshold": NAN}, ValueError, "threshold=nan must be a number"),
    ({"k": 2, "threshold": 0.5}, ValueError, "k=2 and threshold=0.5 contradict each other"),
]
CONFUSION = [
    ({"num_classes": "3"}, TypeError, "num_classes='3' must be "),
    ({"num_classes": True}, TypeError, "num_classes=True must be "),
    ({"num_classes": 1}, ValueError, "num_classes=1 must be at least 2"),
    ({"num_classes": 3, "threshold": 0.5}, ValueError, "threshold=0.5 is for two classes, and num_classes=3"),
    ({"num_classes": 2, "ignore_index": "x"}, TypeError, "ignore_index='x' must be "),
]
METRICS = [
    ({"loss": 3}, TypeError, "loss is int: give metrics"),
    ({"loss": metrics.Mean}, TypeError, "loss is the class Mean: give metrics"),
]
TABLES = {
    load: LOAD,
    replicate: REPLICATE,
    unisono.init: INIT,
    joined: JOINED,
    metrics.Accuracy: ACCURACY,
    metrics.ConfusionCounts: CONFUSION,
    metrics.Metrics: METRICS,
}


@each_case(TABLES)
def test_what_cannot_be_meant_is_refused_in_a_sentence(call, options, error, words):
    check_refused(call, options, error, words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there():
    with pytest.raises(unisono.errors.LaunchError, match="device='cuda:9' is asked for, and torch finds 0 GPUs here"):
        unisono.init(device="cuda:9")


def test_the_handle_of_replicate_is_no_model():
    handle = replicate()
    with pytest.raises(TypeError, match=r"models is the handle that replicate\(\) returned"):
        replicate(models=handle)


def test_numbers_of_numpy_are_numbers():
    assert len(load(batch_size=np.int64(8), seed=np.int32(1), workers=np.int8(0))) == 5
    assert metrics.Accuracy(np.int64(2), ignore_index=np.int64(-100)).k == 2
    assert repr(metrics.ConfusionCounts(np.int64(2), threshold=np.float32(0.5))) == repr(
        metrics.ConfusionCounts(2, threshold=0.5)
    )
    with unisono.init(rank=np.int64(0), world_size=np.int64(1), init_method="tcp://127.0.0.1:0") as job:
        assert job.world_size == 1
