# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""From rewards and values to advantages, against numbers computed by hand or by plain loops."""

import math
import statistics

import pytest
import torch

from trl_multiagent.functional.advantages import (
    explained_variance,
    has_spread,
    leave_one_out_mean,
    normalize_advantages,
    td_error,
)


NAN = float("nan")


class TestHasSpread:
    @pytest.mark.parametrize(
        ("group", "expected"),
        [
            ([1.0, 2.0], True),
            ([2.5, 2.5], False),
            ([0.0, 0.0], False),
            ([0.0, 1e-9], False),  # B23: a difference of rounding is none
            ([2.5, 2.5 + 1e-6], False),
            ([1e6, 1e6 + 0.5], False),  # rounding grows with the size
            ([1e6, 1e6 + 5.0], True),
            ([0.0, 1e-4], True),
            ([-1.0, 1.0], True),
            ([NAN, 1.0], False),  # fewer than two rewards cannot differ
            ([NAN, NAN], False),
            ([NAN, 1.0, 1.0], False),
            ([NAN, 1.0, 2.0], True),
            ([3.0], False),
        ],
    )
    def test_a_group_has_it_where_two_valid_rewards_really_differ(self, group, expected):
        assert has_spread(torch.tensor(group), len(group)).tolist() == [expected] * len(group)

    def test_each_group_is_judged_alone(self):
        rewards = torch.tensor([1.0, 1.0, 1.0, 2.0, 7.0, 7.0])
        assert has_spread(rewards, 2).tolist() == [False, False, True, True, False, False]

    def test_the_result_is_bool_with_one_entry_for_each_sample(self):
        result = has_spread(torch.zeros(6), 3)
        assert result.shape == (6,) and result.dtype == torch.bool


class TestTdError:
    def test_it_is_reward_minus_value(self):
        assert td_error(torch.tensor([1.0, 2.0]), torch.tensor([0.25, 5.0])).tolist() == [0.75, -3.0]

    def test_it_is_zero_where_the_reward_is_missing(self):
        assert td_error(torch.tensor([NAN, 2.0]), torch.tensor([0.25, 5.0])).tolist() == [0.0, -3.0]

    def test_no_gradient_passes_to_the_values(self):
        values = torch.tensor([0.25, 5.0], requires_grad=True)
        assert not td_error(torch.tensor([1.0, 2.0]), values).requires_grad

    def test_shapes_that_differ_are_an_error(self):
        with pytest.raises(ValueError, match="must agree"):
            td_error(torch.zeros(4), torch.zeros(1))


class TestLeaveOneOutMean:
    def test_it_is_the_mean_of_the_others_in_the_group(self):
        result = leave_one_out_mean(torch.tensor([1.0, 2.0, 3.0, 6.0]), 4)
        assert result.tolist() == pytest.approx([11 / 3, 10 / 3, 3.0, 2.0])

    def test_groups_do_not_mix(self):
        assert leave_one_out_mean(torch.tensor([1.0, 2.0, 10.0, 30.0]), 2).tolist() == [2.0, 1.0, 30.0, 10.0]

    def test_a_samples_own_value_never_enters_its_baseline(self):
        before = leave_one_out_mean(torch.tensor([1.0, 2.0, 3.0]), 3)
        after = leave_one_out_mean(torch.tensor([100.0, 2.0, 3.0]), 3)
        assert after[0] == before[0] and not torch.equal(after[1:], before[1:])

    def test_it_gives_the_rloo_reference_for_three_ones_and_five_zeros(self):
        rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0])
        advantages = rewards - leave_one_out_mean(rewards, 8)
        assert advantages.tolist() == pytest.approx([0.7143 if r else -0.4286 for r in rewards.tolist()], abs=5e-5)

    def test_a_group_of_one_is_an_error(self):
        with pytest.raises(ValueError, match="at least 2"):
            leave_one_out_mean(torch.tensor([1.0, 2.0]), 1)


class TestNormalizeAdvantages:
    def test_the_valid_ones_get_mean_zero_and_standard_deviation_one(self):
        numbers = [3.0, -1.0, 4.0, 1.5]
        result = normalize_advantages(torch.tensor(numbers), torch.ones(4, dtype=torch.bool))
        mean, deviation = statistics.mean(numbers), statistics.stdev(numbers)
        assert result.tolist() == pytest.approx([(x - mean) / deviation for x in numbers], abs=1e-6)

    def test_three_numbers_by_hand(self):
        result = normalize_advantages(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, True, True]))
        assert result.tolist() == pytest.approx([-1.0, 0.0, 1.0])

    @pytest.mark.parametrize("hidden", [0.0, 1e6, NAN])
    def test_samples_without_a_reward_get_zero_and_do_not_shift_the_others(self, hidden):
        result = normalize_advantages(torch.tensor([hidden, 1.0, 2.0, 3.0]), torch.tensor([False, True, True, True]))
        assert result.tolist() == pytest.approx([0.0, -1.0, 0.0, 1.0])

    @pytest.mark.parametrize("numbers", [[2.5, 2.5, 2.5], [0.0, 0.0, 0.0], [0.0, 1e-9, -1e-9], [2.5, 2.5 + 1e-7, 2.5]])
    def test_equal_advantages_give_exactly_zero(self, numbers):
        """B23: nothing is divided by a standard deviation of rounding."""
        assert normalize_advantages(torch.tensor(numbers), torch.ones(3, dtype=torch.bool)).tolist() == [0.0] * 3

    @pytest.mark.parametrize("valid", [[False, False, False], [True, False, False]])
    def test_fewer_than_two_valid_samples_give_exactly_zero(self, valid):
        assert normalize_advantages(torch.tensor([1.0, NAN, 3.0]), torch.tensor(valid)).tolist() == [0.0] * 3

    def test_shapes_that_differ_are_an_error(self):
        with pytest.raises(ValueError, match="agree"):
            normalize_advantages(torch.zeros(4), torch.ones(1, dtype=torch.bool))


class TestExplainedVariance:
    def test_a_perfect_critic_has_one_and_a_constant_one_zero(self):
        returns = torch.tensor([1.0, 2.0, 4.0])
        assert explained_variance(returns.clone(), returns).item() == 1.0
        assert explained_variance(torch.full((3,), 2.0), returns).item() == pytest.approx(0.0)

    def test_a_number_by_hand(self):
        # returns have variance 5/3; the errors [0, 1, 0, 1] have variance 1/3
        result = explained_variance(torch.tensor([1.0, 1.0, 3.0, 3.0]), torch.tensor([1.0, 2.0, 3.0, 4.0]))
        assert result.item() == pytest.approx(0.8)

    def test_a_critic_that_points_the_wrong_way_is_below_zero(self):
        # the errors [-2, 0, 2] have variance 4, the returns have 1
        assert explained_variance(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([1.0, 2.0, 3.0])).item() == -3.0

    def test_missing_rewards_are_left_out(self):
        values, returns = torch.tensor([1.0, 9.0, 1.0, 3.0, 3.0]), torch.tensor([1.0, NAN, 2.0, 3.0, 4.0])
        assert explained_variance(values, returns).item() == pytest.approx(0.8)

    @pytest.mark.parametrize("returns", [[2.0, 2.0], [NAN, 2.0], [NAN, NAN]])
    def test_it_is_nan_where_there_is_nothing_to_explain(self, returns):
        assert math.isnan(explained_variance(torch.tensor([1.0, 2.0]), torch.tensor(returns)).item())


@pytest.mark.parametrize("function", [has_spread, leave_one_out_mean])
@pytest.mark.parametrize("shape", [(5,), (2, 2), ()])
def test_rewards_must_be_whole_groups_in_one_dimension(function, shape):
    with pytest.raises(ValueError, match="multiple of num_generations=2"):
        function(torch.zeros(shape), 2)
