# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""From rewards and values to advantages, against numbers computed by hand or by plain loops."""

import itertools
import math
import re
import statistics

import pytest
import torch

from trl_multiagent.functional.advantages import (
    explained_variance,
    group_advantages,
    has_spread,
    is_shared,
    leave_one_out_mean,
    nan_std,
    normalize_advantages,
    role_advantages,
    scale_by_std,
    total_effect,
    trajectory_advantages,
)
from trl_multiagent.rollouts import pairing


NAN = float("nan")
MODES = ["raw", "mean", "rloo", "max"]


def advantages(group, mode, dtype=torch.float32):
    """Advantages of one group, as a list."""
    return group_advantages(torch.tensor([group], dtype=dtype), mode)[0].tolist()


def scaled(group, mode):
    returns = torch.tensor([group])
    return scale_by_std(group_advantages(returns, mode), nan_std(returns, dim=1))[0].tolist()


def slow_advantages(group, mode):
    """One group by a plain loop, in Python's floats."""
    result = []
    for number, own in enumerate(group):
        others = [r for k, r in enumerate(group) if k != number and not math.isnan(r)]
        if math.isnan(own):
            result.append(0.0)
        elif mode == "raw":
            result.append(own)
        elif not others:
            result.append(0.0)
        elif mode == "mean":
            result.append(own - statistics.fmean([own, *others]))
        elif mode == "rloo":
            result.append(own - statistics.fmean(others))
        else:
            result.append(own - max(own, *others))
    return result


def random_groups(shape, seed=0, missing=0.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=dtype)
    return values.masked_fill(torch.rand(shape, generator=generator) < missing, NAN)


class TestIsShared:
    @pytest.mark.parametrize(
        ("rewards", "expected"),
        [
            ([[1.0, 2.0], [1.0, 2.0]], True),
            ([[1.0, 2.0], [1.0, 2.5]], False),
            ([[1.0, 2.0], [2.0, 1.0]], False),
            ([[NAN, 2.0], [NAN, 2.0]], True),  # missing for all
            ([[NAN, 2.0], [1.0, 2.0]], False),
            ([[1.0, 2.0], [NAN, 2.0]], False),
            ([[1.0], [1.0], [0.0]], False),
            ([[1.0, NAN, 3.0]], True),  # an actor alone
        ],
    )
    def test_it_is_whether_all_actors_have_the_same_rewards(self, rewards, expected):
        assert is_shared(torch.tensor(rewards)) is expected

    def test_rewards_without_actors_are_an_error(self):
        with pytest.raises(ValueError, match=r"\(N, B\)"):
            is_shared(torch.zeros(3))


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
            ([-1e6, -1e6 - 0.5], False),
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
        assert has_spread(torch.tensor([group])).tolist() == [expected]

    def test_each_group_is_judged_alone(self):
        rewards = torch.tensor([[1.0, 1.0], [1.0, 2.0], [7.0, 7.0]])
        assert has_spread(rewards).tolist() == [False, True, False]

    def test_each_column_of_a_group_is_judged_alone(self):
        # Two groups of two samples, each in three combinations
        returns = torch.tensor([[[1.0, 5.0, NAN], [2.0, 5.0, 1.0]], [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]])
        assert has_spread(returns).tolist() == [[True, False, False], [False, True, True]]

    def test_the_result_is_bool_with_one_entry_for_each_group(self):
        result = has_spread(torch.zeros(6, 3))
        assert result.shape == (6,) and result.dtype == torch.bool


class TestGroupAdvantages:
    @pytest.mark.parametrize(
        ("mode", "expected"),
        [
            ("raw", [1.0, 2.0, 3.0, 6.0]),
            ("mean", [-2.0, -1.0, 0.0, 3.0]),  # mean 3
            ("rloo", [-8 / 3, -4 / 3, 0.0, 4.0]),  # means of the others 11/3, 10/3, 3, 2
            ("max", [-5.0, -4.0, -3.0, 0.0]),
        ],
    )
    def test_four_rewards_by_hand(self, mode, expected):
        assert advantages([1.0, 2.0, 3.0, 6.0], mode) == pytest.approx(expected, abs=1e-6)

    @pytest.mark.parametrize(
        ("mode", "expected"),
        [
            ("raw", [1.0, 3.0, 3.0, 1.0]),
            ("mean", [-1.0, 1.0, 1.0, -1.0]),
            ("rloo", [-4 / 3, 4 / 3, 4 / 3, -4 / 3]),
            ("max", [-2.0, 0.0, 0.0, -2.0]),
        ],
    )
    def test_ties_have_equal_advantages(self, mode, expected):
        assert advantages([1.0, 3.0, 3.0, 1.0], mode) == pytest.approx(expected, abs=1e-6)

    @pytest.mark.parametrize(
        ("mode", "expected"),
        [
            ("raw", [0.0, 1.0, 2.0, 3.0]),
            ("mean", [0.0, -1.0, 0.0, 1.0]),
            ("rloo", [0.0, -1.5, 0.0, 1.5]),
            ("max", [0.0, -2.0, -1.0, 0.0]),
        ],
    )
    def test_a_missing_reward_has_advantage_zero_and_is_in_no_baseline(self, mode, expected):
        """B24"""
        assert advantages([NAN, 1.0, 2.0, 3.0], mode) == expected

    @pytest.mark.parametrize("mode", MODES)
    def test_one_reward_that_is_left_has_no_baseline(self, mode):
        """B23: nothing to compare with, except without a baseline."""
        assert advantages([NAN, 5.0, NAN], mode) == ([0.0, 5.0, 0.0] if mode == "raw" else [0.0] * 3)
        assert advantages([5.0], mode) == ([5.0] if mode == "raw" else [0.0])

    @pytest.mark.parametrize("mode", MODES)
    def test_a_group_without_rewards_teaches_nothing(self, mode):
        assert advantages([NAN, NAN, NAN], mode) == [0.0] * 3

    @pytest.mark.parametrize(
        "group", [[2.5] * 4, [0.0] * 4, [0.0, 1e-9, -1e-9, 5e-10], [0.1 + 0.2, 0.3, 0.3, 0.3], [NAN, 2.5, 2.5, 2.5]]
    )
    @pytest.mark.parametrize("mode", ["mean", "rloo", "max"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_rewards_equal_up_to_rounding_give_exactly_zero(self, group, mode, dtype):
        """B23: also where float64 tells them apart."""
        assert advantages(group, mode, dtype) == [0.0] * 4

    def test_without_a_baseline_equal_rewards_are_kept(self):
        assert advantages([2.5, 2.5], "raw") == [2.5, 2.5]

    def test_groups_do_not_mix(self):
        returns = torch.tensor([[1.0, 3.0], [10.0, 30.0], [7.0, 7.0]])
        assert group_advantages(returns, "mean").tolist() == [[-1.0, 1.0], [-10.0, 10.0], [0.0, 0.0]]
        assert group_advantages(returns, "rloo").tolist() == [[-2.0, 2.0], [-20.0, 20.0], [0.0, 0.0]]
        assert group_advantages(returns, "max").tolist() == [[-2.0, 0.0], [-20.0, 0.0], [0.0, 0.0]]

    def test_the_modes_differ(self):
        results = {mode: tuple(round(a, 4) for a in advantages([1.0, 2.0, 3.0, 6.0], mode)) for mode in MODES}
        assert len(set(results.values())) == len(MODES)
        # also divided by the deviation, which would hide a difference of scale or shift if it centred again
        divided = {mode: tuple(round(a, 4) for a in scaled([1.0, 2.0, 3.0, 6.0], mode)) for mode in MODES}
        assert len(set(divided.values())) == len(MODES)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
    def test_a_slow_loop_agrees(self, mode, dtype, tolerance):
        returns = random_groups((6, 5), missing=0.25, dtype=dtype)
        result = group_advantages(returns, mode)
        assert result.dtype == dtype
        for group, own in zip(returns.tolist(), result.tolist(), strict=True):
            assert own == pytest.approx(slow_advantages(group, mode), abs=tolerance)

    @pytest.mark.parametrize("mode", ["mean", "rloo", "max"])
    def test_a_constant_added_to_all_rewards_changes_nothing(self, mode):
        returns = random_groups((4, 5), missing=0.2)
        assert torch.allclose(group_advantages(returns + 100, mode), group_advantages(returns, mode), atol=1e-10)

    @pytest.mark.parametrize("mode", MODES)
    def test_samples_can_be_permuted(self, mode):
        returns, order = random_groups((4, 5), missing=0.2), torch.tensor([3, 0, 4, 2, 1])
        permuted = group_advantages(returns[:, order], mode)
        assert torch.allclose(permuted, group_advantages(returns, mode)[:, order], atol=1e-12)

    @pytest.mark.parametrize("size", [2, 3, 8])
    def test_rloo_is_the_mean_baseline_times_g_over_g_minus_one(self, size):
        returns = random_groups((4, size))
        expected = group_advantages(returns, "mean") * size / (size - 1)
        assert torch.allclose(group_advantages(returns, "rloo"), expected, atol=1e-12)

    def test_mean_and_rloo_sum_to_zero_and_max_is_never_positive(self):
        returns = random_groups((4, 5), missing=0.2)
        assert group_advantages(returns, "mean").sum(dim=1).abs().max() < 1e-12
        assert group_advantages(returns, "rloo").sum(dim=1).abs().max() < 1e-12
        assert group_advantages(returns, "max").max() <= 0

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("width", [None, 2])
    def test_padding_is_inert(self, mode, width):
        """A group filled up with NaN equals the smaller group, to the bit."""
        returns = random_groups((4, 3) if width is None else (4, 3, width))
        padding = torch.full_like(returns[:, :2], NAN)
        result = group_advantages(torch.cat([returns, padding], dim=1), mode)
        assert torch.equal(result[:, :3], group_advantages(returns, mode))
        assert result[:, 3:].tolist() == [[0.0, 0.0]] * 4

    @pytest.mark.parametrize("mode", MODES)
    def test_the_rewards_stay_as_they_were(self, mode):
        returns = torch.tensor([[1.0, NAN, 3.0]])
        group_advantages(returns, mode)
        assert torch.equal(returns.nan_to_num(nan=-1.0), torch.tensor([[1.0, -1.0, 3.0]]))

    def test_an_unknown_mode_is_an_error_that_names_the_known_ones(self):
        with pytest.raises(ValueError, match="advantage_mode='grpo', expected 'raw', 'mean', 'rloo' or 'max'"):
            group_advantages(torch.zeros(1, 2), "grpo")


@pytest.mark.parametrize("function", [has_spread, lambda returns: group_advantages(returns, "mean")])
@pytest.mark.parametrize("shape", [(), (4,), (1, 2, 2, 1)])
def test_returns_must_be_groups(function, shape):
    with pytest.raises(ValueError, match=r"\(K, G\) or \(K, G, P\)"):
        function(torch.zeros(shape))


class TestScaleByStd:
    def test_the_grpo_and_rloo_references_of_a_missing_reward(self):
        """B24: the deviation of 1, 2 and 3 is 1, and 1 / 1.0001 = 0.9999."""
        assert scaled([NAN, 1.0, 2.0, 3.0], "mean") == pytest.approx([0.0, -0.9999, 0.0, 0.9999], abs=1e-6)
        assert advantages([NAN, 1.0, 2.0, 3.0], "rloo") == [0.0, -1.5, 0.0, 1.5]

    def test_the_references_of_three_ones_and_five_zeros(self):
        """B24"""
        rewards = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
        rloo, grpo = advantages(rewards, "rloo"), scaled(rewards, "mean")
        assert rloo == pytest.approx([0.7143 if r else -0.4286 for r in rewards], abs=5e-5)
        assert grpo == pytest.approx([1.2074 if r else -0.7244 for r in rewards], abs=5e-5)

    @pytest.mark.parametrize(
        ("mode", "unscaled"),
        [("mean", [-2, -1, 0, 3]), ("rloo", [-8 / 3, -4 / 3, 0, 4]), ("max", [-5, -4, -3, 0]), ("raw", [1, 2, 3, 6])],
    )
    def test_it_divides_and_does_not_centre(self, mode, unscaled):
        deviation = math.sqrt(14 / 3)  # squares 4 + 1 + 0 + 9, of three degrees of freedom
        expected = [a / (deviation + 1e-4) for a in unscaled]
        assert scaled([1.0, 2.0, 3.0, 6.0], mode) == pytest.approx(expected, abs=1e-6)

    def test_one_value_has_no_deviation_and_gets_zero(self):
        assert scaled([NAN, 5.0], "rloo") == [0.0, 0.0]

    def test_one_deviation_serves_all_groups(self):
        result = scale_by_std(torch.tensor([[1.0, -1.0], [4.0, -4.0]]), torch.tensor([1.9999]))
        assert result.tolist() == [pytest.approx([0.5, -0.5]), pytest.approx([2.0, -2.0])]

    def test_equal_rewards_stay_zero(self):
        """B23"""
        assert scaled([0.0, 1e-9, -1e-9], "mean") == [0.0] * 3


class TestNanStd:
    def test_it_is_the_sample_deviation_of_what_is_there(self):
        values = random_groups((5, 7), missing=0.3)
        for row, result in zip(values.tolist(), nan_std(values, dim=1)[:, 0].tolist(), strict=True):
            assert result == pytest.approx(statistics.stdev(v for v in row if not math.isnan(v)))

    def test_by_hand(self):
        assert nan_std(torch.tensor([[1.0, NAN, 2.0, 3.0]]), dim=1).tolist() == [[1.0]]

    @pytest.mark.parametrize("row", [[NAN, NAN], [NAN, 2.0], [2.0]])
    def test_it_is_nan_where_fewer_than_two_values_are_left(self, row):
        assert nan_std(torch.tensor([row]), dim=1).isnan().all()

    def test_the_dimension_is_kept(self):
        assert nan_std(torch.zeros(2, 3, 4), dim=1).shape == (2, 1, 4)
        assert nan_std(torch.zeros(5), dim=0).shape == (1,)


TABLE = [[3.0, -1.0, 4.0], [1.0, 5.0, -9.0], [2.0, 6.0, 5.0]]


def rewards_of_all(num_agents, size=3, seed=0):
    """A made-up reward of every combination of the actors' choices."""
    generator = torch.Generator().manual_seed(seed)
    choices = itertools.product(range(size), repeat=num_agents)
    return {choice: torch.randn((), generator=generator, dtype=torch.float64).item() for choice in choices}


def slow_credit(rewards, agent, tuples, size, mode):
    """Mean over the tuples of teammates of a choice's reward minus the baseline of the same tuple."""
    result = []
    for own in range(size):
        differences = []
        for teammates in tuples:
            column = [rewards[(*teammates[:agent], choice, *teammates[agent:])] for choice in range(size)]
            differences.append(slow_advantages(column, mode)[own])
        result.append(statistics.fmean(differences))
    return result


class FixedDraw:
    """Stands in for the module `random`: every draw without replacement gives these numbers."""

    def __init__(self, numbers):
        self.numbers = list(numbers)

    def Random(self, seed):
        return self

    def sample(self, population, k):
        assert k == len(self.numbers) and set(self.numbers) <= set(population)
        return self.numbers


def paired_credit(rewards, agent, num_agents, size, num_tuples, mode):
    """An actor's advantages by the joint responses that a pairing forms of one context."""
    pairs = pairing.crossed([list(range(size))], num_agents, num_tuples, seed="0")
    returns = torch.tensor([rewards[tuple(joint)] for joint in pairs.members.tolist()], dtype=torch.float64)
    return group_advantages(returns[pairs.columns[agent]].unsqueeze(0), mode)[0].tolist()


class TestCrossedCredit:
    """Every choice of an actor meets several tuples of its teammates' choices."""

    def test_two_actors_get_row_and_column_means_minus_the_grand_mean(self):
        grand = sum(sum(row) for row in TABLE) / 9
        rows = [sum(row) / 3 - grand for row in TABLE]
        columns = [sum(row[j] for row in TABLE) / 3 - grand for j in range(3)]
        first = group_advantages(torch.tensor(TABLE, dtype=torch.float64)[None], "mean")
        second = group_advantages(torch.tensor(TABLE, dtype=torch.float64).T[None], "mean")
        assert first[0].tolist() == pytest.approx(rows, abs=1e-6)
        assert second[0].tolist() == pytest.approx(columns, abs=1e-6)

    @pytest.mark.parametrize("agent", [0, 1])
    def test_two_actors_get_comas_advantage_through_the_pairing(self, agent):
        """`A(h, a) = Q(h, a) - mean over a' of Q(h, a')` where Q is the mean over the teammate's choices."""
        rewards = {(i, j): TABLE[i][j] for i in range(3) for j in range(3)}
        q = [statistics.fmean(r for choice, r in rewards.items() if choice[agent] == own) for own in range(3)]
        expected = [value - statistics.fmean(q) for value in q]
        assert paired_credit(rewards, agent, 2, 3, None, "mean") == pytest.approx(expected, abs=1e-6)

    @pytest.mark.parametrize("num_agents", [2, 3])
    @pytest.mark.parametrize("mode", MODES)
    def test_as_many_tuples_as_there_are_equal_all_of_them(self, num_agents, mode):
        rewards, every = rewards_of_all(num_agents), 3 ** (num_agents - 1)
        tuples = list(itertools.product(range(3), repeat=num_agents - 1))
        for agent in range(num_agents):
            expected = slow_credit(rewards, agent, tuples, 3, mode)
            for num_tuples in (None, every, every + 5):
                result = paired_credit(rewards, agent, num_agents, 3, num_tuples, mode)
                assert result == pytest.approx(expected, abs=1e-12)

    @pytest.mark.parametrize("num_tuples", [1, 2])
    @pytest.mark.parametrize("mode", MODES)
    def test_three_actors_sampled_are_unbiased(self, num_tuples, mode, monkeypatch):
        """The mean over all possible draws of teammates is what all teammates give."""
        rewards, tuples = rewards_of_all(3), list(itertools.product(range(3), repeat=2))
        for agent in range(3):
            sums, draws = [0.0] * 3, list(itertools.combinations(range(9), num_tuples))
            for draw in draws:
                monkeypatch.setattr(pairing, "random", FixedDraw(draw))
                for own, value in enumerate(paired_credit(rewards, agent, 3, 3, num_tuples, mode)):
                    sums[own] += value / len(draws)
            assert len(draws) == {1: 9, 2: 36}[num_tuples]
            assert sums == pytest.approx(slow_credit(rewards, agent, tuples, 3, mode), abs=1e-10)

    @pytest.mark.parametrize("num_tuples", [1, 2])
    def test_three_actors_sampled_are_unbiased_without_the_pairing(self, num_tuples):
        """The same from the table of rewards alone."""
        rewards, tuples = rewards_of_all(3, seed=1), list(itertools.product(range(3), repeat=2))
        for agent in range(3):
            results = []
            for draw in itertools.combinations(tuples, num_tuples):
                columns = [
                    [rewards[(*teammates[:agent], own, *teammates[agent:])] for teammates in draw] for own in range(3)
                ]
                results.append(group_advantages(torch.tensor(columns, dtype=torch.float64)[None], "mean")[0])
            mean = torch.stack(results).mean(dim=0).tolist()
            assert mean == pytest.approx(slow_credit(rewards, agent, tuples, 3, "mean"), abs=1e-10)

    def test_one_draw_is_not_the_whole(self, monkeypatch):
        """The checks above would pass for a draw that is ignored."""
        rewards = rewards_of_all(3)
        monkeypatch.setattr(pairing, "random", FixedDraw([5]))
        drawn = paired_credit(rewards, 0, 3, 3, 1, "mean")
        assert drawn == pytest.approx(slow_credit(rewards, 0, [(1, 2)], 3, "mean"), abs=1e-12)
        assert drawn != pytest.approx(paired_credit(rewards, 0, 3, 3, None, "mean"), abs=1e-3)

    @pytest.mark.parametrize("num_tuples", [1, 2, 3, 4])
    @pytest.mark.parametrize("num_agents", [2, 3])
    def test_no_more_joint_responses_than_samples_times_tuples(self, num_agents, num_tuples):
        for seed in range(5):
            pairs = pairing.crossed([[0, 1, 2]], num_agents, num_tuples, seed=str(seed))
            joints = [tuple(joint) for joint in pairs.members.tolist()]
            assert len(joints) == len(set(joints)) <= min(num_agents * 3 * num_tuples, 3**num_agents)

    def test_the_mean_of_a_sample_is_over_the_columns_that_have_a_baseline(self):
        # Columns [1, 3], [nan, 4] (one reward, nothing to compare with) and [5, 1]
        returns = torch.tensor([[[1.0, NAN, 5.0], [3.0, 4.0, 1.0]]])
        # First: (-1 + 2) / 2. Second: (1 - 2) / 2
        assert group_advantages(returns, "mean")[0].tolist() == pytest.approx([0.5, -0.5])

    def test_a_sample_without_any_reward_gets_zero(self):
        returns = torch.tensor([[[NAN, NAN], [1.0, 2.0], [3.0, 6.0]]])
        assert group_advantages(returns, "mean")[0].tolist() == [0.0, -1.5, 1.5]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("mode", ["mean", "rloo"])
    @pytest.mark.parametrize(
        "table",
        [
            [[0.1, 0.7], [0.7, 0.1]],
            [[0.1, 0.7, 0.3], [0.7, 0.3, 0.1], [0.3, 0.1, 0.7]],
            [[1e6 + 0.1, 0.7], [0.7, 1e6 + 0.1]],
            [[-0.1, NAN, 0.7], [0.7, NAN, -0.1]],
        ],
        ids=["exclusive or", "three of each", "large", "one column missing"],
    )
    def test_columns_that_cancel_each_other_give_exactly_zero(self, table, mode, dtype):
        """B23: each choice has the same rewards, in another order; what is left over is rounding."""
        returns = torch.tensor([table, table[::-1]], dtype=dtype)
        advantages = group_advantages(returns, mode)
        zeros = torch.zeros(2, len(table), dtype=dtype)
        assert torch.equal(advantages, zeros)
        # The deviation of the choices' means, which are equal but for rounding
        std = nan_std(returns.nanmean(dim=-1), dim=1)
        assert std.max() <= 1e-6 * returns.nan_to_num().abs().max()
        assert torch.equal(scale_by_std(advantages, std), zeros)

    @pytest.mark.parametrize("mode", ["mean", "rloo"])
    def test_columns_that_nearly_cancel_each_other_teach_the_rest(self, mode):
        # Means 0.4 and 0.4 + 1/200
        returns = torch.tensor([[[0.1, 0.7], [0.7, 0.11]]])
        half = 0.0025 if mode == "mean" else 0.005
        assert group_advantages(returns, mode)[0].tolist() == pytest.approx([-half, half], abs=1e-6)

    def test_a_group_whose_columns_cancel_does_not_silence_another(self):
        returns = torch.tensor([[[0.1, 0.7], [0.7, 0.1]], [[0.1, 0.1], [0.3, 0.3]]])
        assert group_advantages(returns, "mean").tolist() == [[0.0, 0.0], pytest.approx([-0.1, 0.1])]

    def test_without_a_baseline_a_small_mean_stays(self):
        returns = torch.tensor([[[1.0, -1.0], [0.5, 0.5]]])
        assert group_advantages(returns, "raw")[0].tolist() == [0.0, 0.5]
        small = torch.tensor([[[1e-9, 1e-9], [2e-9, 2e-9]]])
        assert group_advantages(small, "raw")[0].tolist() == pytest.approx([1e-9, 2e-9], rel=1e-6)

    def test_one_column_equals_a_plain_group(self):
        returns = random_groups((4, 5), missing=0.2)
        for mode in MODES:
            assert torch.equal(group_advantages(returns.unsqueeze(-1), mode), group_advantages(returns, mode))


class TestTrajectoryAdvantages:
    def test_a_trajectory_of_many_turns_does_not_pull_the_mean(self):
        # 3 turns of return 4 and 1 turn of return 0: the mean is 2, not 3, and the variance of [4, 0] is 8
        returns, weights = torch.tensor([[4.0, 4.0, 4.0, 0.0]]), torch.tensor([[1 / 3, 1 / 3, 1 / 3, 1.0]])
        result = trajectory_advantages(returns, weights, scale=False)
        assert result[0].tolist() == pytest.approx([2.0, 2.0, 2.0, -2.0], abs=1e-6)
        result = trajectory_advantages(returns, weights, scale=True)
        expected = 2 / (math.sqrt(8) + 1e-4)
        assert result[0].tolist() == pytest.approx([expected, expected, expected, -expected], abs=1e-6)

    def test_turns_of_different_return_by_hand(self):
        # Trajectories [3, 1] and [0]: mean (2 + 0) / 2 = 1; squares 4 / 2 + 0 / 2 + 1 = 3, of 2 - 1 degrees
        returns, weights = torch.tensor([[3.0, 1.0, 0.0]]), torch.tensor([[0.5, 0.5, 1.0]])
        assert trajectory_advantages(returns, weights, scale=False)[0].tolist() == [2.0, 0.0, -1.0]
        result = trajectory_advantages(returns, weights, scale=True)[0].tolist()
        assert result == pytest.approx([2 / (math.sqrt(3) + 1e-4), 0.0, -1 / (math.sqrt(3) + 1e-4)])

    @pytest.mark.parametrize("scale", [False, True])
    def test_single_turns_are_a_group(self, scale):
        returns = [1.0, 2.0, 3.0, 6.0]
        result = trajectory_advantages(torch.tensor([returns]), torch.ones(1, 4), scale)[0].tolist()
        divisor = statistics.stdev(returns) + 1e-4 if scale else 1.0
        assert result == pytest.approx([(r - 3.0) / divisor for r in returns], abs=1e-6)

    def test_tasks_do_not_mix_and_padding_is_inert(self):
        returns = torch.tensor([[1.0, 3.0, NAN], [10.0, 20.0, 60.0]])
        weights = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
        assert trajectory_advantages(returns, weights, scale=False).tolist() == [
            [-1.0, 1.0, 0.0],
            [-20.0, -10.0, 30.0],
        ]

    def test_a_missing_return_is_left_out(self):
        returns, weights = torch.tensor([[NAN, 1.0, 2.0, 3.0]]), torch.ones(1, 4)
        assert trajectory_advantages(returns, weights, scale=False)[0].tolist() == [0.0, -1.0, 0.0, 1.0]

    @pytest.mark.parametrize("scale", [False, True])
    @pytest.mark.parametrize("turns", [1, 2, 3, 10, 14, 19])
    def test_a_task_with_one_trajectory_gives_zero_in_every_turn(self, turns, scale):
        """B23: also where the weights of the turns add up to a little more than 1."""
        returns = torch.arange(float(turns)).unsqueeze(0)
        weights = torch.full((1, turns), 1.0 / turns)
        assert trajectory_advantages(returns, weights, scale).tolist() == [[0.0] * turns]

    @pytest.mark.parametrize("scale", [False, True])
    def test_equal_returns_give_exactly_zero(self, scale):
        """B23"""
        returns = torch.tensor([[2.5, 2.5, 2.5], [0.0, 1e-9, -1e-9], [NAN, NAN, NAN]])
        assert trajectory_advantages(returns, torch.ones(3, 3), scale).tolist() == [[0.0] * 3] * 3

    @pytest.mark.parametrize(("returns", "weights"), [((2, 3), (2, 2)), ((3,), (3,)), ((1, 2, 3), (1, 2, 3))])
    def test_shapes_that_do_not_fit_are_an_error(self, returns, weights):
        with pytest.raises(ValueError, match=r"\(K, M\)"):
            trajectory_advantages(torch.zeros(returns), torch.zeros(weights), scale=False)


class TestRoleAdvantages:
    def test_a_return_meets_the_running_mean_before_it(self):
        # Means before: 0.5, 0.75, 1.375; after the last 2.6875
        result, baseline = role_advantages(torch.tensor([1.0, 2.0, 4.0]), 0.5, 0.5)
        assert result.tolist() == [0.5, 1.25, 2.625]
        assert baseline == 2.6875

    def test_a_missing_return_leaves_the_mean_as_it_is(self):
        result, baseline = role_advantages(torch.tensor([1.0, NAN, 2.0, NAN]), 0.5, 0.5)
        assert result.tolist() == [0.5, 0.0, 1.25, 0.0]
        assert baseline == 1.375

    def test_what_comes_later_does_not_matter(self):
        before, _ = role_advantages(torch.tensor([1.0, 2.0, 4.0]), 0.0, 0.9)
        after, _ = role_advantages(torch.tensor([1.0, 2.0, -50.0]), 0.0, 0.9)
        assert before[:2].tolist() == after[:2].tolist()

    def test_without_memory_the_mean_is_the_last_return(self):
        result, baseline = role_advantages(torch.tensor([3.0, 5.0, 5.0]), 1.0, 0.0)
        assert result.tolist() == [2.0, 2.0, 0.0] and baseline == 5.0

    def test_parts_one_after_the_other_equal_the_whole(self):
        returns = random_groups((8,), missing=0.2)
        whole, end = role_advantages(returns, 0.25, 0.95)
        first, middle = role_advantages(returns[:3], 0.25, 0.95)
        second, last = role_advantages(returns[3:], middle, 0.95)
        assert torch.equal(torch.cat([first, second]), whole) and last == end

    def test_a_slow_loop_agrees(self):
        returns, baseline, expected = random_groups((20,), missing=0.2), 0.1, []
        for value in returns.tolist():
            if math.isnan(value):
                expected.append(0.0)
                continue
            expected.append(value - baseline)
            baseline += 0.05 * (value - baseline)
        result, end = role_advantages(returns, 0.1, 0.95)
        assert result.tolist() == pytest.approx(expected) and end == pytest.approx(baseline)

    def test_nothing_leaves_the_mean_as_it_is(self):
        result, baseline = role_advantages(torch.zeros(0), 0.5, 0.9)
        assert result.shape == (0,) and baseline == 0.5

    def test_a_wrong_shape_is_an_error(self):
        with pytest.raises(ValueError, match=r"\(B,\)"):
            role_advantages(torch.zeros(2, 2), 0.0, 0.9)


class TestTotalEffect:
    def test_an_additive_table_has_the_variance_of_each_actors_part(self):
        # R[i][j] = [0, 2][i] + [0, 10][j]: sample variances 2 and 50
        table = torch.tensor([[[0.0, 10.0], [2.0, 12.0]]])
        assert total_effect(table).item() == pytest.approx(2.0)
        assert total_effect(table.transpose(1, 2)).item() == pytest.approx(50.0)

    def test_what_actors_do_together_counts_for_both(self):
        # R = 1 only where both choose 1: the variance is 0 in one column and 1/2 in the other
        table = torch.tensor([[[0.0, 0.0], [0.0, 1.0]]])
        assert total_effect(table).item() == pytest.approx(0.25)
        assert total_effect(table.transpose(1, 2)).item() == pytest.approx(0.25)

    def test_an_actor_without_influence_has_exactly_zero(self):
        teammates = torch.tensor([[[1.0, -3.0, 7.5, 0.0]], [[2.0, 2.0, NAN, 4.25]]])
        assert total_effect(teammates.expand(2, 3, 4)).item() == 0.0

    def test_an_actor_without_influence_has_zero_up_to_rounding_for_any_reward(self):
        assert total_effect(random_groups((2, 1, 4)).expand(2, 3, 4)).item() < 1e-30

    def test_an_actor_that_decides_alone_has_all_of_the_variance(self):
        own = [0.5, -1.0, 4.0]
        table = torch.tensor(own).view(1, 3, 1).expand(1, 3, 4)
        assert total_effect(table).item() == pytest.approx(statistics.variance(own))

    def test_it_is_a_mean_over_groups_and_columns_with_two_values(self):
        # Variances 2, 8 and none
        table = torch.tensor([[[0.0, 1.0], [2.0, 5.0]], [[NAN, NAN], [1.0, NAN]]])
        assert total_effect(table).item() == pytest.approx(5.0)

    def test_it_is_nan_without_two_values_in_a_column(self):
        assert math.isnan(total_effect(torch.tensor([[[1.0, NAN], [NAN, 2.0]]])).item())

    def test_a_wrong_shape_is_an_error(self):
        with pytest.raises(ValueError, match=r"\(K, G, P\)"):
            total_effect(torch.zeros(2, 2))


class TestLeaveOneOutMean:
    def test_it_is_the_mean_of_the_others_in_the_group(self):
        result = leave_one_out_mean(torch.tensor([[1.0, 2.0, 3.0, 6.0]]))
        assert result.tolist()[0] == pytest.approx([11 / 3, 10 / 3, 3.0, 2.0])

    def test_groups_do_not_mix(self):
        assert leave_one_out_mean(torch.tensor([[1.0, 2.0], [10.0, 30.0]])).tolist() == [[2.0, 1.0], [30.0, 10.0]]

    def test_groups_may_have_different_sizes(self):
        result = leave_one_out_mean(torch.tensor([[1.0, 2.0, 6.0], [10.0, 30.0, NAN]]))
        assert result[0].tolist() == [4.0, 3.5, 1.5]
        assert result[1, :2].tolist() == [30.0, 10.0] and math.isnan(result[1, 2])

    def test_a_samples_own_value_never_enters_its_baseline(self):
        before = leave_one_out_mean(torch.tensor([[1.0, 2.0, 3.0]]))[0]
        after = leave_one_out_mean(torch.tensor([[100.0, 2.0, 3.0]]))[0]
        assert after[0] == before[0] and not torch.equal(after[1:], before[1:])

    def test_it_gives_the_rloo_reference_for_three_ones_and_five_zeros(self):
        rewards = torch.tensor([[1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]])
        differences = (rewards - leave_one_out_mean(rewards))[0]
        assert differences.tolist() == pytest.approx([0.7143 if r else -0.4286 for r in rewards[0].tolist()], abs=5e-5)

    def test_a_sample_alone_in_its_group_takes_the_mean_of_the_other_groups(self):
        assert leave_one_out_mean(torch.tensor([[1.0], [2.0], [6.0]])).tolist() == [[4.0], [3.5], [1.5]]
        mixed = leave_one_out_mean(torch.tensor([[5.0, NAN], [2.0, 8.0]]))
        assert mixed[0, 0] == 5.0 and mixed[1].tolist() == [8.0, 2.0]  # (2 + 8) / 2

    def test_a_sample_without_any_other_gets_zero(self):
        assert leave_one_out_mean(torch.tensor([[7.0]])).tolist() == [[0.0]]

    @pytest.mark.parametrize("shape", [(5,), (2, 2, 2), ()])
    def test_another_shape_is_an_error_that_names_it(self, shape):
        with pytest.raises(ValueError, match=re.escape(f"must have shape (K, M), got {shape}")):
            leave_one_out_mean(torch.zeros(shape))


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

    @pytest.mark.parametrize("value", [10.0, 1000.0])
    def test_returns_that_differ_by_rounding_alone_do_not_vary(self, value):
        """Returns are computed as reward minus value plus value."""
        values = torch.tensor([value, 1.7 * value, 0.1 * value])
        returns = (3.7 - values) + values + torch.tensor([0.0, 2.4e-7, -2.4e-7]) * value
        assert returns.var() > 0
        assert math.isnan(explained_variance(values, returns).item())

    @pytest.mark.parametrize("returns", [[2.0, 2.0], [NAN, 2.0], [NAN, NAN]])
    def test_it_is_nan_where_there_is_nothing_to_explain(self, returns):
        assert math.isnan(explained_variance(torch.tensor([1.0, 2.0]), torch.tensor(returns)).item())
