"""Models with tables under torch.compile: the results of tables are those without, and nothing is said."""

TRAIN = """
import logging
import warnings

import torch
from torch import nn
from unisono.embedding import SGD, Table, Tables

logging.disable(logging.NOTSET)
told = []
handler = logging.Handler()
handler.emit = lambda record: told.append(record.getMessage())
for name in ("torch", "torch._dynamo"):
    logging.getLogger(name).addHandler(handler)


class Model(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table, self.last = table, nn.Linear(4, 2)

    def forward(self, *given):
        return self.last(self.table(*given)).tanh()


def trained(compiles, pooling, options, batches):
    torch.manual_seed(0)
    torch.compiler.reset()
    tables = Tables({"item": Table(dim=4, pooling=pooling, optimizer=SGD(lr=0.1), **options)})
    model = Model(tables["item"])
    run = torch.compile(model, backend="eager") if compiles else model
    found = []
    for given in batches:
        tables.zero_grad()
        out = run(*given)
        out.sum().backward()
        found += [out.detach(), tables["item"].weight.grad.coalesce().to_dense()]
        tables.step()
    return [*found, tables["item"].weight.detach()]


SOME = [(torch.randint(0, 30, (5, 3), generator=torch.Generator().manual_seed(i)),) for i in range(4)]
RAGGED = [(ids.view(-1), torch.tensor([0, 4, 4, 9])) for (ids,) in SOME]
WEIGHED = [(ids, None, torch.rand(ids.shape)) for (ids,) in SOME]
CASES = [
    (None, {"rows": 30}, SOME), ("sum", {"rows": 30}, SOME), ("mean", {"rows": 30}, RAGGED),
    ("sum", {"rows": 30}, WEIGHED), ("sum", {"capacity": 40}, SOME), (None, {"rows": 30, "padding_idx": 3}, SOME),
]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for case in CASES:
        for with_, without in zip(trained(True, *case), trained(False, *case), strict=True):
            assert torch.equal(with_, without), case
told += [text for each in caught if "unisono" in (text := str(each.message))]
assert not told, told
model = torch.compile(Model(Tables({"item": Table(rows=9, dim=4, optimizer=SGD(lr=0.1))})["item"]), fullgraph=True)
try:
    model(torch.tensor([3]))
except Exception as error:
    print("refused", "a table is looked up between graphs" in str(error))
print("equal")
"""


def test_tables_in_compiled_models_do_what_they_do_in_others(fork_python, tmp_path):
    (script := tmp_path / "compiled.py").write_text(TRAIN)
    assert fork_python(script) == ["refused True", "equal"]


def test_what_imports_the_compiler_of_torch_is_not_imported_by_a_lookup(fork_python, tmp_path):
    (script := tmp_path / "eager.py").write_text("""
import sys
import torch
from unisono.embedding import SGD, Table, Tables
Tables({"item": Table(rows=9, dim=4, optimizer=SGD(lr=0.1))})["item"](torch.tensor([3])).sum().backward()
print("unisono.embedding.eager_lookup" in sys.modules)
""")
    assert fork_python(script) == ["False"]
