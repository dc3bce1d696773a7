"""An update of whole rows and one that is divided by columns have the same bits."""

import itertools

import pytest
import torch

from unisono.embedding import SGD, Adagrad, Adam, RowwiseAdagrad, RowwiseAdam
from unisono.embedding.row_updates import change_columns, change_rows, number_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", [SGD, Adagrad, RowwiseAdagrad, Adam, RowwiseAdam])
def test_parts_of_an_update_by_columns_have_its_bits(rule, dtype):
    generator = torch.Generator().manual_seed(3)
    settings = ({}, {"weight_decay": 0.1}, {"clip_row_norm": 1.5}, {"weight_decay": 0.1, "clip_row_norm": 1.5})
    for number, (dim, cuts) in enumerate(((1, (1,)), (7, (2, 4)), (50, (17, 33)), (150, (1, 140)))):
        # Each length with half of the settings for each type, and the other half for the other.
        for options in settings[(number + (dtype == torch.float64)) % 2 :: 2]:
            group = rule(lr=0.1, **options).group()
            rows, gradient = (torch.randn(9, dim, generator=generator, dtype=dtype) for _ in range(2))
            state = {key: torch.rand(9, generator=generator, dtype=dtype) for key in rule.per_row}
            state |= {key: torch.rand(9, dim, generator=generator, dtype=dtype) for key in rule.per_element}
            whole, of_whole = rows.clone(), {key: value.clone() for key, value in state.items()}
            change_rows(rule, whole, gradient, of_whole, group, 3.0)

            factors, of_rows = torch.ones(9, dtype=dtype), {key: state[key].clone() for key in rule.per_row}
            number_rows(rule, rows, gradient, factors, of_rows, group)
            edges = [0, *cuts, dim]
            for begin, end in itertools.pairwise(edges):
                if begin == end:
                    continue
                columns = slice(begin, end)
                part = rows[:, columns].contiguous()
                of_part = {key: state[key][:, columns].contiguous() for key in rule.per_element}
                change_columns(rule, part, gradient[:, columns], factors, {**of_part, **of_rows}, group, 3.0)
                assert torch.equal(part, whole[:, columns]), (dim, options, columns)
                for key, value in of_part.items():
                    assert torch.equal(value, of_whole[key][:, columns]), (dim, options, columns, key)
            for key, value in of_rows.items():
                assert torch.equal(value, of_whole[key]), (dim, options, key)
