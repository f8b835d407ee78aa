# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Returns over the turns of an interaction, against a recursion written out and numbers by hand."""

import math
import random

import pytest
import torch

from trl_multiagent.functional.returns import discounted_returns, mean_over_branches


NAN = float("nan")
ROOTS = torch.tensor([-1])


def made_up_tree(seed, roots, turns, branches, num_agents=2, missing=0.0):
    """
    Rewards and parents of a random tree. `branches` gives how many joint responses continue one: a number, or a range
    that it is drawn from.
    """
    rng = random.Random(seed)
    parents, rewards = [[-1] * roots], []
    for _ in range(1, turns):
        children = [branches if isinstance(branches, int) else rng.choice(branches) for _ in parents[-1]]
        parents.append([joint for joint, count in enumerate(children) for _ in range(count)])
    for turn in parents:
        rewards.append(
            [[NAN if rng.random() < missing else rng.uniform(-2, 2) for _ in turn] for _ in range(num_agents)]
        )
    return rewards, parents


def slow_return(rewards, parents, discount, turn, agent, joint):
    own = rewards[turn][agent][joint]
    children = []
    if turn + 1 < len(parents):
        children = [child for child, parent in enumerate(parents[turn + 1]) if parent == joint]
    if not children:
        return own
    values = [slow_return(rewards, parents, discount, turn + 1, agent, child) for child in children]
    known = [value for value in values if not math.isnan(value)]
    return own + discount * sum(known) / len(known) if known else NAN


def to_tensors(rewards, parents):
    return (
        [
            torch.tensor(turn, dtype=torch.float64).view(len(turn), len(parent))
            for turn, parent in zip(rewards, parents, strict=True)
        ],
        [torch.tensor(turn, dtype=torch.long) for turn in parents],
    )


def assert_is_recursion(rewards, parents, discount):
    returns = discounted_returns(*to_tensors(rewards, parents), discount)
    assert [tuple(turn.shape) for turn in returns] == [(len(rewards[0]), len(turn)) for turn in parents]
    for turn, value in enumerate(returns):
        for agent in range(len(rewards[0])):
            expected = [
                slow_return(rewards, parents, discount, turn, agent, joint) for joint in range(len(parents[turn]))
            ]
            assert value[agent].tolist() == pytest.approx(expected, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_tree_of_two_branches_and_three_turns_is_the_recursion(seed, discount):
    rewards, parents = made_up_tree(seed, roots=2, turns=3, branches=2)
    assert [len(turn) for turn in parents] == [2, 4, 8]
    assert_is_recursion(rewards, parents, discount)


@pytest.mark.parametrize("discount", [0.5, 1.0])
@pytest.mark.parametrize("seed", range(8))
def test_an_uneven_tree_with_ended_branches_is_the_recursion(seed, discount):
    assert_is_recursion(*made_up_tree(seed, roots=4, turns=4, branches=[0, 1, 2, 3]), discount)


@pytest.mark.parametrize("seed", range(8))
def test_a_tree_with_missing_rewards_is_the_recursion(seed):
    assert_is_recursion(*made_up_tree(seed, roots=4, turns=4, branches=[0, 1, 2], missing=0.4), 0.5)


def test_joint_responses_may_continue_in_any_order():
    rewards = [torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0, 40.0]])]
    returns = discounted_returns(rewards, [torch.tensor([-1, -1]), torch.tensor([1, 0, 1])], 1.0)
    assert returns[0].tolist() == [[21.0, 27.0]]


def test_a_chain_by_hand():
    # 4, then 2 + 4 / 2 = 4, then 1 + 4 / 2 = 3
    rewards = [torch.tensor([[1.0]]), torch.tensor([[2.0]]), torch.tensor([[4.0]])]
    returns = discounted_returns(rewards, [ROOTS, torch.tensor([0]), torch.tensor([0])], 0.5)
    assert [value.tolist() for value in returns] == [[[3.0]], [[4.0]], [[4.0]]]


def test_chains_go_on_side_by_side():
    rewards = [torch.tensor([[1.0, 10.0]]), torch.tensor([[2.0, 20.0]])]
    returns = discounted_returns(rewards, [torch.tensor([-1, -1]), torch.tensor([0, 1])], 1.0)
    assert returns[0].tolist() == [[3.0, 30.0]]


def test_a_tree_by_hand():
    # Branches of 0: 3 and 5, whose mean is 4; nothing continues 1
    rewards = [torch.tensor([[1.0, 7.0]]), torch.tensor([[3.0, 5.0]])]
    returns = discounted_returns(rewards, [torch.tensor([-1, -1]), torch.tensor([0, 0])], 0.25)
    assert returns[0].tolist() == [[2.0, 7.0]]


def test_with_discount_zero_a_turn_has_its_reward_alone():
    rewards, parents = made_up_tree(0, roots=2, turns=3, branches=2)
    tensors, numbers = to_tensors(rewards, parents)
    for reward, value in zip(tensors, discounted_returns(tensors, numbers, 0.0), strict=True):
        assert torch.equal(reward, value)


def test_with_discount_one_a_chain_sums_what_is_left():
    rewards = [torch.tensor([[float(number)]]) for number in (1, 2, 4, 8)]
    returns = discounted_returns(rewards, [ROOTS, *[torch.tensor([0])] * 3], 1.0)
    assert [value.item() for value in returns] == [15.0, 14.0, 12.0, 8.0]


def test_each_actor_has_returns_of_its_own_rewards():
    rewards = [torch.tensor([[1.0], [-1.0]]), torch.tensor([[2.0, 4.0], [-20.0, NAN]])]
    returns = discounted_returns(rewards, [ROOTS, torch.tensor([0, 0])], 1.0)
    assert returns[0].tolist() == [[4.0], [-21.0]]


def test_a_missing_reward_makes_the_return_missing_and_leaves_the_branches_as_they_are():
    rewards = [torch.tensor([[NAN, 1.0]]), torch.tensor([[2.0, 4.0]])]
    returns = discounted_returns(rewards, [torch.tensor([-1, -1]), torch.tensor([0, 1])], 1.0)
    assert returns[0][0, 0].isnan() and returns[0][0, 1].item() == 5.0
    assert returns[1].tolist() == [[2.0, 4.0]]


def test_branches_without_a_return_are_left_out_of_the_mean():
    rewards = [torch.tensor([[1.0]]), torch.tensor([[2.0, NAN, 6.0]])]
    returns = discounted_returns(rewards, [ROOTS, torch.tensor([0, 0, 0])], 1.0)
    assert returns[0].tolist() == [[5.0]]


def test_a_return_is_missing_where_all_that_follows_is():
    rewards = [torch.tensor([[1.0, 1.0]]), torch.tensor([[NAN, NAN, 3.0]])]
    returns = discounted_returns(rewards, [torch.tensor([-1, -1]), torch.tensor([0, 0, 1])], 1.0)
    assert returns[0][0, 0].isnan() and returns[0][0, 1].item() == 4.0


def test_a_branch_that_ended_early_counts_with_its_reward():
    # The first branch goes on to 10, the second ended with 4: (2 + 10 + 4) / 2
    rewards = [torch.tensor([[0.0]]), torch.tensor([[2.0, 4.0]]), torch.tensor([[10.0]])]
    returns = discounted_returns(rewards, [ROOTS, torch.tensor([0, 0]), torch.tensor([0])], 1.0)
    assert returns[0].tolist() == [[8.0]]


def test_the_rewards_stay_as_they_were():
    rewards = [torch.tensor([[1.0]]), torch.tensor([[2.0]])]
    discounted_returns(rewards, [ROOTS, torch.tensor([0])], 1.0)
    assert [turn.tolist() for turn in rewards] == [[[1.0]], [[2.0]]]


def test_one_turn_has_its_rewards_and_its_parents_are_not_read():
    rewards = [torch.tensor([[1.0, NAN], [2.0, 3.0]])]
    (returns,) = discounted_returns(rewards, [torch.tensor([5, 7, 9])], 1.0)
    assert torch.equal(returns.nan_to_num(nan=-1.0), torch.tensor([[1.0, -1.0], [2.0, 3.0]]))


def test_turns_and_parents_must_be_as_many():
    with pytest.raises(ValueError, match="has 2 turns, `parents` 1"):
        discounted_returns([torch.zeros(1, 1)] * 2, [ROOTS], 1.0)


def test_each_joint_response_needs_a_parent():
    with pytest.raises(ValueError, match="`values` has 3 joint responses, `parents` 2"):
        discounted_returns([torch.zeros(1, 1), torch.zeros(1, 3)], [ROOTS, torch.tensor([0, 0])], 1.0)


class TestMeanOverBranches:
    def test_it_is_the_mean_of_what_continues_each(self):
        values, parents = torch.tensor([1.0, 8.0, 3.0, 4.0]), torch.tensor([2, 0, 2, 0])
        assert mean_over_branches(values, parents, 3).tolist() == [6.0, 0.0, 2.0]  # (8 + 4) / 2, nothing, (1 + 3) / 2

    def test_what_is_unknown_is_left_out_and_all_unknown_is_unknown(self):
        result = mean_over_branches(torch.tensor([NAN, 3.0, NAN, NAN]), torch.tensor([0, 0, 1, 1]), 3)
        assert result.tolist() == pytest.approx([3.0, NAN, 0.0], nan_ok=True)

    @pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
    def test_leading_dimensions_are_kept(self, shape):
        rng = torch.Generator().manual_seed(0)
        values = torch.rand(*shape, 6, generator=rng, dtype=torch.float64)
        values = values.masked_fill(torch.rand(*shape, 6, generator=rng) < 0.4, NAN)
        parents = [3, 0, 0, 3, 1, 3]
        result = mean_over_branches(values, torch.tensor(parents), 4)
        assert result.shape == (*shape, 4) and result.dtype == values.dtype
        for row, means in zip(values.view(-1, 6).tolist(), result.view(-1, 4).tolist(), strict=True):
            for joint, mean in enumerate(means):
                known = [v for v, parent in zip(row, parents, strict=True) if parent == joint and not math.isnan(v)]
                expected = sum(known) / len(known) if known else (NAN if joint in parents else 0.0)
                assert mean == pytest.approx(expected, nan_ok=True)

    def test_nothing_continues_an_ended_turn(self):
        result = mean_over_branches(torch.zeros(2, 0), torch.zeros(0, dtype=torch.long), 3)
        assert result.tolist() == [[0.0] * 3] * 2

    def test_its_arguments_are_left_alone(self):
        values, parents = torch.tensor([1.0, NAN]), torch.tensor([0, 0])
        mean_over_branches(values, parents, 1)
        assert values[0] == 1.0 and values[1].isnan() and parents.tolist() == [0, 0]

    def test_a_parent_for_each_is_needed(self):
        with pytest.raises(ValueError, match="`values` has 3 joint responses, `parents` 2"):
            mean_over_branches(torch.zeros(2, 3), torch.tensor([0, 0]), 1)
