"""Which rank owns which rows."""

from __future__ import annotations

import pytest
import torch

from unisono.embedding import row_owners
from unisono.embedding.row_owners import RowOwners


@pytest.mark.parametrize("options", [{}, {"shift": 2}, {"in_file": True}])
@pytest.mark.parametrize(("rows", "row_nbytes"), [(1, 4), (400, 32), (300_001, 64), (70_000, 12_000)])
def test_owners_are_the_same_whether_they_are_noted_or_computed(monkeypatch, rows, row_nbytes, options):
    ids = torch.cat([torch.arange(rows), torch.tensor([-1])])
    noted = [RowOwners(rows, row_nbytes, rank=rank, ranks=3, **options) for rank in range(3)]
    monkeypatch.setattr(row_owners, "_MOST_NOTED", 0)
    computed = RowOwners(rows, row_nbytes, rank=0, ranks=3, **options)
    assert all(torch.equal(each.of(ids)[:-1], computed.of(ids)[:-1]) for each in noted)
    assert all(0 <= int(each.of(ids)[-1]) < 3 for each in (*noted, computed))
    keepers = torch.stack([each.keep(ids[:-1]) for each in noted]).sum(0)
    assert (keepers == (2 if "shift" in options else 1)).all()
    for each in noted:
        kept = torch.cat([torch.arange(part.start, part.stop) for part in each.kept_ranges()] or [ids[:0]])
        if each.block_length > 1:
            assert torch.equal(kept, each.keep(ids[:-1]).nonzero().view(-1))
        else:
            assert len(kept) == rows
