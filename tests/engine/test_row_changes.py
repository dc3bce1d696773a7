"""Which rows of a table have changed, by their bytes."""

import pytest
import torch

from unisono.engine.row_changes import RowChanges


@pytest.fixture
def table():
    """Weights with a number for each row, of which some rows have been written; and the changes of all three."""
    torch.manual_seed(0)
    weight, sums, written = torch.randn(1000, 5), torch.rand(1000), torch.zeros(1000, dtype=torch.uint8)
    written[::3] = 1
    changes = RowChanges(64)

    def find():
        return changes.find(1000, lambda start, stop: written[start:stop], [weight, written, sums])

    assert find() is None
    changes.keep()
    assert find().tolist() == []
    return weight, sums, written, changes, find


def test_any_change_of_a_row_that_has_been_written_is_found(table):
    weight, sums, written, changes, find = table
    weight[1] += 1  # not written
    weight[3, 4] = torch.nextafter(weight[3, 4], torch.tensor(9.0))
    weight[6, :2] = -weight[6, :2]
    weight[9] = weight[9].flip(0)
    sums[300] += 1
    written[500] = 1
    assert find().tolist() == [3, 6, 9, 300, 500]
    assert find().tolist() == [3, 6, 9, 300, 500]
    changes.keep()
    assert find().tolist() == []


@pytest.mark.parametrize("row", range(0, 999, 37))
def test_zeros_of_another_sign_differ(table, row):
    weight, _, written, changes, find = table
    written[row] = 1
    weight[row] = 0.0
    find()
    changes.keep()
    weight[row, torch.randperm(5)[:2]] = -0.0
    assert find().tolist() == [row]


def test_rows_that_are_gone_and_what_was_forgotten_are_not_known(table):
    _, _, written, changes, find = table
    written[3] = 0
    assert find() is None
    written[3] = 1
    changes.forget()
    assert find() is None
    changes.keep()
    assert find().tolist() == []
