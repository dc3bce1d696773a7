"""Embedding tables in a Trainer against DDP with nn.EmbeddingBag(sparse=True), and the kernel against torch's.

Two ranks, 256 bags of 8 ids each on each rank, rows of 16 floats, a linear layer to 8 classes, SGD for both: the model
of PyTorch's tutorial on parameter servers. The peer: DDP over gloo, zero_grad, forward, backward, loss.item(), step.
Sides take turns in blocks of steps, which both ranks begin at the same time; that of the slower rank counts. The kernel
is lookup, backward and update of one process with one thread: with `Adam` against nn.EmbeddingBag and SparseAdam; with
`RowwiseAdagrad` against the CPU tables of fbgemm, if fbgemm_gpu can be imported (1.8.0 loads with torch 2.13); and with
`RowwiseAdagrad` in a dynamic table with random ids of 64 bits, all of which have rows, against fixed rows. The last row
is the same with SGD on a table of 50 million rows against one of 100 000: what a step costs must not depend on the rows
that there are, except for what the caches hold. Between them are steps of two ranks and one server, in each mode of
consistency, against two ranks that update the rows themselves (`scripts/table_servers.py`); and steps of two ranks that
divide the rows of a table, against two with a copy each, both over gloo (`scripts/divided_tables.py`).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import unisono
from bench.ddp import in_blocks
from bench.measure import Effort, alternate
from bench.models import classify
from bench.ranks import run_ranks
from bench.rows import Goal, Row, row_from_json, summarise
from bench.sides import check_equal
from unisono.embedding import SGD, Adam, RowwiseAdagrad, Table, Tables, dense_parameters

__all__ = ["run"]

_ROWS = (30, 100_000, 1_000_000)
_BAGS, _IDS, _DIM, _CLASSES = 256, 8, 16, 8
_RATE = 0.05
_SCRIPTS = Path(__file__).parent / "scripts"


def run(effort: Effort) -> Iterator[Row]:
    """Measure two ranks against DDP, then the kernel."""
    for rows in _ROWS[:1] if effort.quick else _ROWS:
        yield from run_ranks(_against_ddp, 2, effort, rows)
    for mode in ("sync", "bounded(4)", "async"):
        yield _in_a_job(effort, "table_servers.py", mode, flags=("--servers", "1"))
    yield _in_a_job(effort, "divided_tables.py", flags=("--cpu-backend", "gloo"))
    kernels = [(1000, 8, 64, 4)] if effort.quick else [(100_000, 16, 2048, 8), (1_000_000, 64, 4096, 10)]
    for rows, dim, bags, ids in kernels:
        yield _kernel(effort, rows, dim, bags, ids)
        if (against_fbgemm := _against_fbgemm(effort, rows, dim, bags, ids)) is not None:
            yield against_fbgemm
        yield _dynamic(effort, rows, dim, bags, ids)
    yield _by_size(effort, 200_000 if effort.quick else 50_000_000)


class _Hybrid(nn.Module):
    """A table of bags and a linear layer."""

    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags = bags
        self.last = nn.Linear(_DIM, _CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores of classes."""
        scores: Tensor = self.last(self.bags(ids))
        return scores


def _against_ddp(effort: Effort, rows: int) -> list[Row]:
    size = dist.get_world_size()
    torch.manual_seed(0)
    tables = Tables({"item": Table(rows=rows, dim=_DIM, pooling="sum", optimizer=SGD(lr=_RATE))})
    model = _Hybrid(tables["item"])
    plain = _Hybrid(nn.EmbeddingBag(rows, _DIM, mode="sum", sparse=True))
    plain.load_state_dict(model.state_dict())
    data = TensorDataset(
        torch.randint(0, rows, (8 * size * _BAGS, _IDS)), torch.randint(0, _CLASSES, (8 * size * _BAGS,))
    )
    trainer = unisono.Trainer(model, optim.SGD(dense_parameters(model), lr=_RATE), virtual_ranks=size, progress=False)
    endless = (batch for _ in count() for batch in trainer.batches(data, batch_size=size * _BAGS))
    batch = next(endless)
    wrapped = DistributedDataParallel(plain, process_group=dist.new_group(backend="gloo"))
    optimizer = optim.SGD(plain.parameters(), lr=_RATE)

    def take() -> None:
        nonlocal batch
        batch = next(endless)

    def step() -> tuple[float, float]:
        start = perf_counter()
        loss = trainer.step(classify, batch)
        return loss, perf_counter() - start

    def by_hand() -> tuple[float, float]:
        ((ids, targets),) = batch.micro_batches
        start = perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapped(ids), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item(), perf_counter() - start

    theirs = [0.0] * size
    dist.all_gather_object(theirs, by_hand()[0])
    check_equal(step()[0], sum(theirs) / size, what=f"{rows} rows")
    pairs = in_blocks(effort, 20, ours=lambda: step()[1], peer=lambda: by_hand()[1], prepare=take)
    # in_blocks gives milliseconds of a step.
    samples = 1000.0 * size * _BAGS
    return [
        summarise(
            "embedding",
            f"{rows} rows x {_DIM}, 2 ranks x {_BAGS} bags of {_IDS}",
            **pairs.as_rates(ours=samples, peer=samples)._asdict(),
            peer_name="DDP, sparse=True",
            unit="samples/s",
            goal=Goal(of="ratio", bound=4.0),
            rows=rows,
        )
    ]


def _in_a_job(effort: Effort, script: str, *arguments: str, flags: Sequence[str]) -> Row:
    """Return the row that a script measures on two ranks."""
    rows = 1000 if effort.quick else 100_000
    command = [sys.executable, "-m", "unisono", "run", "-n", "2", *flags, str(_SCRIPTS / script), *arguments]
    done = subprocess.run(
        [*command, str(rows), str(effort.rounds(40))], capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode:
        raise RuntimeError(f"the job of {script} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return row_from_json(done.stdout.partition("] ")[2])


def _by_size(effort: Effort, rows: int) -> Row:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gradient = torch.randn(_BAGS, _DIM)

    def side(rows: int) -> Callable[[], float]:
        tables = Tables({"item": Table(rows=rows, dim=_DIM, pooling="sum", optimizer=SGD(lr=_RATE))})

        def measure() -> float:
            ids = torch.randint(0, rows, (_BAGS, _IDS))
            start = perf_counter()
            tables["item"](ids).backward(gradient)
            tables.step()
            seconds = perf_counter() - start
            tables.zero_grad()
            return seconds

        return measure

    few = 100_000
    pairs = alternate(side(rows), side(few), rounds=effort.rounds(201), seed=effort.seed)
    torch.set_num_threads(threads)
    ids = _BAGS * _IDS / 1e6
    return summarise(
        "embedding",
        f"SGD, {rows} rows x {_DIM}, {_BAGS * _IDS} ids, one core",
        **pairs.as_rates(ours=ids, peer=ids)._asdict(),
        peer_name=f"{few} rows",
        unit="M ids/s",
        goal=Goal(of="ratio", bound=1 / 1.5),
        rows=rows,
    )


def _kernel(effort: Effort, rows: int, dim: int, bags: int, width: int) -> Row:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    batches = [torch.randint(0, rows, (bags, width)) for _ in range(16)]
    gradient = torch.randn(bags, dim)
    tables = Tables({"item": Table(rows=rows, dim=dim, pooling="sum", optimizer=Adam(lr=_RATE))})
    plain = nn.EmbeddingBag(rows, dim, mode="sum", sparse=True)
    optimizer = optim.SparseAdam(plain.parameters(), lr=_RATE)

    ours = _steps(tables["item"], tables.step, batches, gradient)
    theirs = _steps(plain, optimizer.step, batches, gradient)
    pairs = alternate(ours, theirs, rounds=effort.rounds(21), seed=effort.seed)
    torch.set_num_threads(threads)
    ids = bags * width / 1e6
    return summarise(
        "embedding",
        f"Adam, {rows} rows x {dim}, {bags * width} ids, one core",
        **pairs.as_rates(ours=ids, peer=ids)._asdict(),
        peer_name="EmbeddingBag + SparseAdam",
        unit="M ids/s",
        goal=Goal(of="ratio", bound=4.0),
        rows=rows,
    )


def _against_fbgemm(effort: Effort, rows: int, dim: int, bags: int, width: int) -> Row | None:
    """Measure tables of fbgemm-gpu-cpu, whose update is part of the backward pass; None if they are not there."""
    try:
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as fbgemm  # noqa: PLC0415
        from fbgemm_gpu.split_embedding_configs import EmbOptimType  # noqa: PLC0415
    except (ImportError, OSError) as error:  # also where it was built for another torch
        print(f"no row against fbgemm's tables: {error}", file=sys.stderr)
        return None
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    batches = [torch.randint(0, rows, (bags, width)) for _ in range(16)]
    gradient = torch.randn(bags, dim)
    tables = Tables({"item": Table(rows=rows, dim=dim, pooling="sum", optimizer=RowwiseAdagrad(lr=_RATE))})
    peer = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, fbgemm.EmbeddingLocation.HOST, fbgemm.ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=_RATE,
        eps=1e-8,
    )
    peer.init_embedding_weights_uniform(-0.1, 0.1)
    offsets, turns = torch.arange(0, bags * width + 1, width), count()

    def theirs() -> float:
        ids = batches[next(turns) % len(batches)].view(-1)
        start = perf_counter()
        peer(ids, offsets).backward(gradient)
        return perf_counter() - start

    ours = _steps(tables["item"], tables.step, batches, gradient)
    pairs = alternate(ours, theirs, rounds=effort.rounds(21), seed=effort.seed)
    torch.set_num_threads(threads)
    ids = bags * width / 1e6
    return summarise(
        "embedding",
        f"RowwiseAdagrad, {rows} rows x {dim}, {bags * width} ids, one core",
        **pairs.as_rates(ours=ids, peer=ids)._asdict(),
        peer_name="fbgemm's CPU tables",
        unit="M ids/s",
        goal=Goal(of="ratio", bound=2.5),
        rows=rows,
    )


def _dynamic(effort: Effort, rows: int, dim: int, bags: int, width: int) -> Row:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    batches = [torch.randint(0, rows, (bags, width)) for _ in range(16)]
    gradient, names = torch.randn(bags, dim), torch.randint(-(2**63), 2**63 - 1, (rows,))

    def side(ids: Tensor, **size: int) -> Callable[[], float]:
        rule = RowwiseAdagrad(lr=_RATE)
        tables = Tables({"item": Table(dim=dim, pooling="sum", optimizer=rule, **size)})  # type: ignore[arg-type]
        for part in torch.split(ids, 100_000):
            tables["item"](part.view(-1, 1)).sum().backward()
            tables.step()
            tables.zero_grad()
        return _steps(tables["item"], tables.step, [ids[batch] for batch in batches], gradient)

    ours, theirs = side(names, capacity=2 * rows), side(torch.arange(rows), rows=rows)
    pairs = alternate(ours, theirs, rounds=effort.rounds(21), seed=effort.seed)
    torch.set_num_threads(threads)
    ids = bags * width / 1e6
    return summarise(
        "embedding",
        f"RowwiseAdagrad, {rows} dynamic rows x {dim}, {bags * width} ids, one core",
        **pairs.as_rates(ours=ids, peer=ids)._asdict(),
        peer_name="fixed rows",
        unit="M ids/s",
        rows=rows,
    )


def _steps(
    module: nn.Module, update: Callable[[], object], batches: Sequence[Tensor], gradient: Tensor
) -> Callable[[], float]:
    """Return a function that makes a step with the next batch, and returns its time in seconds."""
    turns = count()

    def measure() -> float:
        ids = batches[next(turns) % len(batches)]
        start = perf_counter()
        module(ids).backward(gradient)
        update()
        seconds = perf_counter() - start
        module.zero_grad()
        return seconds

    return measure
