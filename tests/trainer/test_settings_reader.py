"""The settings that are noted at each batch are the present ones, whatever the loop does with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from unisono.trainer.hyperparameters import SettingsReader, settings_of


def _parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2))


def _set(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def _set_betas(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["betas"] = (0.5, 0.9)


def _add_option(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["layer"] = 3


def _add_group(optimizer: Optimizer) -> None:
    optimizer.add_param_group({"params": [_parameter()], "lr": 0.01})


def _write(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"].mul_(2)


@pytest.mark.parametrize("change", [_set, _set_betas, _add_option, _add_group, _write])
def test_a_change_is_read(change: Callable[[Optimizer], None]) -> None:
    lr = torch.tensor(0.25) if change is _write else 0.25
    optimizers = {"": AdamW([_parameter()], lr=lr)}
    reader = SettingsReader(optimizers, {})
    before = reader.read()
    assert reader.read() == before
    change(optimizers[""])
    assert reader.read() == settings_of(optimizers, {}) != before


def test_a_list_that_is_written_to_is_read_anew() -> None:
    optimizer = SGD([_parameter()], lr=0.1)
    optimizer.param_groups[0]["history"] = [1]
    reader = SettingsReader({"": optimizer}, {})
    assert reader.read().hyperparameters[""][0]["history"] == [1]
    optimizer.param_groups[0]["history"].append(2)
    assert reader.read().hyperparameters[""][0]["history"] == [1, 2]


def test_a_scheduler_that_changes_no_learning_rate_is_read_anew() -> None:
    optimizer = SGD([_parameter()], lr=0.1)
    scheduler = StepLR(optimizer, step_size=10)
    reader = SettingsReader({"": optimizer}, {"scheduler": scheduler})
    reader.read()
    optimizer.step()
    scheduler.step()
    assert reader.read().schedulers["scheduler"]["last_epoch"] == 1


def test_settings_that_have_not_changed_are_not_copied() -> None:
    reader = SettingsReader({"": AdamW([_parameter()])}, {})
    assert reader.read() is reader.read()
