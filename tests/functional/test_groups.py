# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Samples as a matrix of groups, and back."""

import random

import pytest
import torch

from trl_multiagent.functional.groups import from_groups, group_table, to_groups


def rows(grouped):
    """Groups as lists, None for places that no sample takes."""
    return [[None if value != value else value for value in row] for row in grouped.tolist()]


class TestGroupTable:
    def test_groups_of_one_size_are_a_plain_matrix(self):
        assert group_table([0, 0, 1, 1]).tolist() == [[0, 1], [2, 3]]

    def test_a_smaller_group_ends_with_minus_one(self):
        assert group_table([0, 0, 0, 1]).tolist() == [[0, 1, 2], [3, -1, -1]]

    def test_groups_are_in_the_order_of_their_numbers_and_samples_in_their_own(self):
        assert group_table([7, 2, 7, 2, 5]).tolist() == [[1, 3], [4, -1], [0, 2]]

    def test_numbers_are_whole(self):
        assert group_table([0, 1]).dtype == torch.long

    def test_no_samples_have_no_groups(self):
        assert group_table([]).shape == (0, 0)


class TestToGroups:
    def test_places_that_no_sample_takes_are_nan(self):
        grouped = to_groups(torch.tensor([1.0, 2.0, 3.0]), group_table([0, 0, 1]))
        assert rows(grouped) == [[1.0, 2.0], [3.0, None]]

    def test_further_dimensions_stay_with_their_sample(self):
        values = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
        grouped = to_groups(values, group_table([1, 0, 1]))
        assert grouped.shape == (2, 2, 2)
        assert grouped[0, 0].tolist() == [2.0, 20.0] and grouped[0, 1].isnan().all()
        assert grouped[1].tolist() == [[1.0, 10.0], [3.0, 30.0]]

    def test_the_values_stay_as_they_were(self):
        values = torch.tensor([1.0, 2.0, 3.0])
        to_groups(values, group_table([0, 0, 1]))
        assert values.tolist() == [1.0, 2.0, 3.0]


class TestFromGroups:
    def test_each_value_goes_back_to_its_sample(self):
        grouped = torch.tensor([[1.0, 2.0], [3.0, 99.0]])
        assert from_groups(grouped, group_table([1, 0, 0]), 3).tolist() == [3.0, 1.0, 2.0]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_kind_of_numbers_stays(self, dtype):
        assert from_groups(torch.ones(1, 2, dtype=dtype), group_table([0, 0]), 2).dtype == dtype

    @pytest.mark.parametrize("seed", range(5))
    def test_uneven_groups_in_any_order_come_back(self, seed):
        rng = random.Random(seed)
        groups = [rng.choice([0, 3, 4, 9]) for _ in range(11)]
        values = torch.tensor([rng.random() for _ in groups])
        table = group_table(groups)
        grouped = to_groups(values, table)
        # a slow loop, and the way back
        expected = [
            [v for v, g in zip(values.tolist(), groups, strict=True) if g == group] for group in sorted(set(groups))
        ]
        assert [[v for v in row if v is not None] for row in rows(grouped)] == expected
        assert torch.equal(from_groups(grouped, table, len(groups)), values)
