"""Reference runs that several tests compare with, each made once in a session and worker process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from digests import digests

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def digits_on_one_rank(fork_python: Callable[..., list[str]]) -> list[str]:
    return fork_python(ROOT / "examples" / "digits.py", "--steps", 4)


@pytest.fixture(scope="session")
def language_model_on_one_rank(fork_python: Callable[..., list[str]]) -> list[str]:
    return fork_python(ROOT / "examples" / "language_model.py", "--steps", 3)


@pytest.fixture(scope="session")
def variants_on_one_rank(fork_python: Callable[..., list[str]]) -> dict[str, str]:
    return digests(fork_python(Path(__file__).parent / "programs" / "variants.py"))


@pytest.fixture(scope="session")
def optimizers_on_one_rank(fork_python: Callable[..., list[str]]) -> dict[str, str]:
    return digests(fork_python(Path(__file__).parent / "programs" / "optimizers.py", "auto"))


@pytest.fixture(scope="session")
def sparse_on_one_rank(
    fork_python: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, str]]:
    """The folder of a run that one rank has begun, and the digests."""
    folder = tmp_path_factory.mktemp("sparse")
    found = digests(fork_python(Path(__file__).parent / "programs" / "sparse.py", folder, "auto"), least=13)
    return folder / "begun", {name.removeprefix("auto: "): sha for name, sha in found.items()}


PREAMBLE = """
import os, signal, sys, time
from functools import partial
from pathlib import Path
import torch, unisono
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from unisono.errors import LossError, NonFiniteLossError, UnisonoError

R = int(os.environ["RANK"])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
data = TensorDataset(torch.randn(60, 6), torch.arange(60) % 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

def make_trainer(**options):
    return unisono.Trainer(model, optimizer, **{"virtual_ranks": 4, "engine": "shared", "progress": False, **options})

def say(*values):
    print(*values, flush=True)
"""


LARGE = """
class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 900), nn.Linear(900, 3)
        self.turned = nn.Parameter((torch.randn(500, 900) / 30).t())
        self.empty, self.unused, self.seldom = (nn.Parameter(torch.zeros(n)) for n in (0, 7, 3))

    def forward(self, x):
        y = self.last(torch.tanh(torch.tanh(self.first(x)) @ self.turned) @ self.turned.t()) + self.empty.sum()
        return y + self.seldom if x[0, 0] > 0.5 else y

model = Large()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
"""


@pytest.fixture
def large_model() -> str:
    """A script's model whose gradients are not those of a small one."""
    return LARGE


@pytest.fixture
def run_alone(fork_ranks):
    """Run a script behind the preamble on N ranks of one group, with nobody to end the others when one fails.

    Returns:
        What each rank printed.
    """

    def run(n: int, script: str, *, codes: dict[int, int] | None = None) -> list[str]:
        start = 'dist.init_process_group("gloo")'
        job = fork_ranks(n, f"{PREAMBLE}\n{start}\n{script}", code=None, watched=False)
        assert job.codes == [(codes or {}).get(rank, 0) for rank in range(n)], f"{job.out}\n{job.err[-4000:]}"
        return ["".join(f"{line}\n" for line in job.lines(rank)) for rank in range(n)]

    return run


@pytest.fixture(scope="module")
def undisturbed(fork_python, tmp_path_factory):
    """What one rank of recovering.py comes to that nobody disturbs; each program is run once."""
    program = Path(__file__).parent / "programs" / "recovering.py"
    known: dict[str, str] = {}

    def run(**asked: object) -> str:
        # A model that is cut has random numbers of its own, also on one rank.
        engine = "auto" if "stages" in asked else "shared"
        key = json.dumps({**asked, "workers": 0, "engine": engine}, sort_keys=True)
        if key not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            known[key] = fork_python(program, json.dumps({**json.loads(key), "folder": str(folder)}))[-1]
        return known[key]

    return run
