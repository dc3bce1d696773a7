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

    def since(base):
        changes.look(1000, lambda start, stop: written[start:stop], [weight, written, sums])
        found = changes.since(base)
        return None if found is None else found.tolist()

    assert since("first") is None
    changes.keep("first")
    assert since("first") == []
    return weight, sums, written, changes, since


def test_any_change_of_a_row_that_has_been_written_is_found(table):
    weight, sums, written, changes, since = table
    weight[1] += 1  # not written
    weight[3, 4] = torch.nextafter(weight[3, 4], torch.tensor(9.0))
    weight[6, :2] = -weight[6, :2]
    weight[9] = weight[9].flip(0)
    sums[300] += 1
    written[500] = 1
    assert since("first") == [3, 6, 9, 300, 500]
    sums[303] += 1
    assert since("first") == [3, 6, 9, 300, 303, 500]
    changes.keep("second")
    changes.drop()
    assert since("second") == []


@pytest.mark.parametrize("row", range(0, 999, 111))
def test_zeros_of_another_sign_differ(table, row):
    weight, _, written, changes, since = table
    written[row] = 1
    weight[row] = 0.0
    since("first")
    changes.keep("second")
    weight[row, torch.randperm(5)[:2]] = -0.0
    assert since("second") == [row]


def test_rows_that_are_gone_and_another_base_are_not_known(table):
    _, _, written, changes, since = table
    written[3] = 0
    assert since("first") is None
    written[3] = 1
    assert since("other") is None
    assert since("first") == []
    changes.keep("other")
    assert since("first") is None
