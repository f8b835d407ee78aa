# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Generalized advantage estimation, against numbers worked out by hand, and against slow loops and recursions."""

import math
import random

import pytest
import torch

from trl_multiagent.functional.gae import gae_over_tokens, gae_over_turns


NAN = float("nan")
INF = float("inf")
WEIGHTS = [(0.9, 0.8), (0.5, 1.0), (1.0, 0.5), (1.0, 1.0), (0.9, 0.0), (0.0, 0.7), (0.0, 0.0)]


def doubles(*rows):
    return [None if row is None else torch.tensor(row, dtype=torch.float64) for row in rows]


class TestTurns:
    """`delta = r + discount * mean V' - V`, `A = delta + discount * lambda * mean A'`, target `A + V`."""

    @staticmethod
    def made_up(seed, branches, turns=4, roots=3, missing=0.0):
        """Rewards, values and parents of a random tree, as lists; how often a node branches is drawn of `branches`."""
        rng = random.Random(seed)
        parents = [[-1] * roots]
        for _ in range(1, turns):
            children = [rng.choice(branches) for _ in parents[-1]]
            parents.append([joint for joint, count in enumerate(children) for _ in range(count)])
            rng.shuffle(parents[-1])
        rewards = [[NAN if rng.random() < missing else rng.uniform(-2, 2) for _ in turn] for turn in parents]
        return rewards, [[rng.uniform(-2, 2) for _ in turn] for turn in parents], parents

    @staticmethod
    def estimate(rewards, values, parents, discount, gae_lambda):
        tensors = [doubles(*turns) for turns in (rewards, values)]
        return gae_over_turns(*tensors, [torch.tensor(p, dtype=torch.long) for p in parents], discount, gae_lambda)

    @staticmethod
    def children(parents, turn, joint):
        return [c for c, p in enumerate(parents[turn + 1]) if p == joint] if turn + 1 < len(parents) else []

    def slow_advantage(self, rewards, values, parents, discount, gae_lambda, turn, joint):
        result = rewards[turn][joint] - values[turn][joint]
        children = self.children(parents, turn, joint)
        if not children:
            return result
        result += discount * sum(values[turn + 1][c] for c in children) / len(children)
        if discount * gae_lambda == 0:
            return result
        later = [
            self.slow_advantage(rewards, values, parents, discount, gae_lambda, turn + 1, child) for child in children
        ]
        known = [advantage for advantage in later if not math.isnan(advantage)]
        return result + discount * gae_lambda * sum(known) / len(known) if known else NAN

    def slow_return(self, rewards, parents, discount, turn, joint):
        children = self.children(parents, turn, joint)
        later = [self.slow_return(rewards, parents, discount, turn + 1, child) for child in children]
        return rewards[turn][joint] + (discount * sum(later) / len(later) if later else 0.0)

    def test_a_chain_by_hand(self):
        # Last: 8 - 6 = 2. Second: 1 + 6 / 2 - 4 = 0, and 2 / 4 of what follows. First: 0 + 4 / 2 - 3 = -1, and 0.5 / 4
        advantages, targets = self.estimate([[0.0], [1.0], [8.0]], [[3.0], [4.0], [6.0]], [[-1], [0], [0]], 0.5, 0.5)
        assert [turn.tolist() for turn in advantages] == [[-0.875], [0.5], [2.0]]
        assert [turn.tolist() for turn in targets] == [[2.125], [4.5], [8.0]]

    def test_a_tree_by_hand(self):
        # Branches of 0: A = 6 - 2 = 4 and 0 - 4 = -4, V = 2 and 4. So 1 + 3 / 2 - 1 = 1.5, and 0 / 4. 1 is over: 7 - 5
        advantages, targets = self.estimate(
            [[1.0, 7.0], [6.0, 0.0]], [[1.0, 5.0], [2.0, 4.0]], [[-1] * 2, [0, 0]], 0.5, 0.5
        )
        assert [turn.tolist() for turn in advantages] == [[1.5, 2.0], [4.0, -4.0]]
        assert [turn.tolist() for turn in targets] == [[2.5, 7.0], [6.0, 0.0]]

    @pytest.mark.parametrize("weights", WEIGHTS)
    @pytest.mark.parametrize("missing", [0.0, 0.4])
    @pytest.mark.parametrize(
        "branches", [[1], [2], [0, 1], [0, 1, 2, 3]], ids=["chains", "tree", "chains that end", "uneven tree"]
    )
    def test_it_is_the_recursion(self, branches, missing, weights):
        for seed in range(3):
            rewards, values, parents = self.made_up(seed, branches, missing=missing)
            advantages, targets = self.estimate(rewards, values, parents, *weights)
            for turn, joints in enumerate(parents):
                expected = [
                    self.slow_advantage(rewards, values, parents, *weights, turn, j) for j in range(len(joints))
                ]
                assert advantages[turn].tolist() == pytest.approx(expected, abs=1e-12, nan_ok=True)
                expected = [advantage + value for advantage, value in zip(expected, values[turn], strict=True)]
                assert targets[turn].tolist() == pytest.approx(expected, abs=1e-12, nan_ok=True)

    @pytest.mark.parametrize("discount", [0.0, 0.7, 1.0])
    @pytest.mark.parametrize("branches", [[1], [0, 1, 2]], ids=["chains", "tree"])
    def test_with_lambda_0_it_is_the_temporal_difference_and_with_1_the_return_less_the_value(
        self, branches, discount
    ):
        rewards, values, parents = self.made_up(5, branches)
        differences, _ = self.estimate(rewards, values, parents, discount, 0.0)
        returns, targets = self.estimate(rewards, values, parents, discount, 1.0)
        for turn, joints in enumerate(parents):
            for joint in range(len(joints)):
                own, children = values[turn][joint], self.children(parents, turn, joint)
                following = sum(values[turn + 1][c] for c in children) / len(children) if children else 0.0
                expected = rewards[turn][joint] + discount * following - own
                assert differences[turn][joint].item() == pytest.approx(expected)
                expected = self.slow_return(rewards, parents, discount, turn, joint)
                assert returns[turn][joint].item() == pytest.approx(expected - own)
                assert targets[turn][joint].item() == pytest.approx(expected)

    @pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 1.0])
    def test_in_one_turn_it_is_the_reward_less_the_value_and_parents_are_not_read(self, gae_lambda):
        (advantages,), (targets,) = self.estimate([[3.0, NAN]], [[1.0, 2.0]], [[9, 7]], 0.9, gae_lambda)
        assert advantages.tolist() == pytest.approx([2.0, NAN], nan_ok=True)
        assert targets.tolist() == pytest.approx([3.0, NAN], nan_ok=True)

    def test_nothing_is_bootstrapped_where_nothing_continues(self):
        advantages, _ = self.estimate([[1.0, 2.0], []], [[0.5, 0.5], []], [[-1, -1], []], 1.0, 1.0)
        assert [turn.tolist() for turn in advantages] == [[0.5, 1.5], []]

    def test_with_lambda_0_a_missing_reward_leaves_the_turn_before_as_it_is(self):
        chain = [[1.0], [NAN]], [[2.0], [4.0]], [[-1], [0]]
        advantages, _ = self.estimate(*chain, 0.5, 0.0)
        assert advantages[0].item() == 1.0 and advantages[1].isnan().all()  # 1 + 4 / 2 - 2
        advantages, _ = self.estimate(*chain, 0.5, 0.1)
        assert advantages[0].isnan().all()

    def test_a_branch_without_a_reward_counts_with_its_value_alone(self):
        # V' = (2 + 6) / 2, of both branches; A' = 3 - 2, of the one that is known
        advantages, _ = self.estimate([[0.0], [3.0, NAN]], [[1.0], [2.0, 6.0]], [[-1], [0, 0]], 1.0, 0.5)
        assert advantages[0].item() == 3.5

    def test_no_gradient_flows_and_arguments_are_left_alone(self):
        rewards, values = [[torch.ones(2, requires_grad=True) for _ in range(2)] for _ in range(2)]
        results = gae_over_turns(rewards, values, [torch.tensor([-1, -1]), torch.tensor([0, 1])], 0.9, 0.9)
        assert not any(turn.requires_grad for turns in results for turn in turns)
        assert all(torch.equal(turn, torch.ones(2)) and turn.requires_grad for turn in [*rewards, *values])

    @pytest.mark.parametrize(
        ("rewards", "values", "parents", "message"),
        [
            ([2, 2], [2], [2, 2], "`rewards` has 2 turns, `values` 1"),
            ([2], [2], [2, 2], "`rewards` has 1 turns, `parents` 2"),
            ([2, 3], [2, 2], [2, 3], r"Turn 2: .*\(3,\) and \(2,\)"),
            ([(1, 2)], [(1, 2)], [2], r"Turn 1: .*\(1, 2\) and \(1, 2\)"),
            ([2, 3], [2, 3], [2, 2], "3 joint responses, `parents` 2"),
        ],
    )
    def test_shapes_that_do_not_fit_are_an_error_that_names_them(self, rewards, values, parents, message):
        with pytest.raises(ValueError, match=message):
            gae_over_turns(
                [torch.zeros(shape) for shape in rewards],
                [torch.zeros(shape) for shape in values],
                [torch.zeros(size, dtype=torch.long) for size in parents],
                1.0,
                1.0,
            )


class TestTokens:
    @staticmethod
    def estimate(
        rewards, values, mask, discount, gae_lambda, token_rewards=None, next_values=None, next_advantages=None
    ):
        optional = doubles(token_rewards, next_values, next_advantages)
        mask = torch.tensor(mask, dtype=torch.bool)
        return gae_over_tokens(*doubles(rewards, values), mask, discount, gae_lambda, *optional)

    # With discount 1/2 and lambda 1/2 a step sees half of the next value, and a quarter of the next advantage

    @pytest.mark.parametrize(
        ("reward", "values", "mask", "optional", "expected", "first_value", "first_advantage"),
        [
            pytest.param(
                # 8 - 6 = 2; 6 / 2 - 4 = -1 and 2 / 4; 4 / 2 - 2 = 0 and -0.5 / 4
                *(8.0, [2.0, 4.0, 6.0], [1, 1, 1], {}, [-0.125, -0.5, 2.0], 2.0, -0.125),
                id="all tokens",
            ),
            pytest.param(
                # 8 - 6 = 2; 6 / 2 - 2 = 1 and 2 / 4: the step goes over what lies between
                *(8.0, [99.0, 2.0, 99.0, 99.0, 6.0, 99.0], [0, 1, 0, 0, 1, 0], {}, [0, 1.5, 0, 0, 2.0, 0], 2.0, 1.5),
                id="holes",
            ),
            pytest.param(
                # 2 + 4 / 2 - 3 = 1 and 8 / 4; 3 / 2 - 1 = 0.5 and 3 / 4
                *(2.0, [1.0, 3.0, 99.0], [1, 1, 0], {"next_values": [4.0], "next_advantages": [8.0]}),
                *([1.25, 3.0, 0.0], 1.0, 1.25),
                id="a step that follows",
            ),
            pytest.param(
                # 8 - 2 - 6 = 0; -1 + 6 / 2 - 4 = -2 and 0 / 4; -3 + 4 / 2 - 2 = -3 and -2 / 4
                *(8.0, [2.0, 99.0, 4.0, 6.0], [1, 0, 1, 1], {"token_rewards": [[-3.0, -99.0, -1.0, -2.0]]}),
                *([-3.5, 0.0, -2.0, 0.0], 2.0, -3.5),
                id="rewards of tokens",
            ),
            pytest.param(
                # No token, so no value of its own: the value before it is 3 + 4 / 2, and a quarter of 8 is passed on
                *(3.0, [99.0, 99.0], [0, 0], {"next_values": [4.0], "next_advantages": [8.0]}),
                *([0.0, 0.0], 5.0, 2.0),
                id="no token",
            ),
            pytest.param(3.0, [99.0], [0], {}, [0.0], 3.0, 0.0, id="no token, and nothing follows"),
            pytest.param(
                # 1 + 4 / 2 - 2 = 1 and 8 / 4
                *(1.0, [2.0], [1], {"next_values": [4.0], "next_advantages": [8.0]}, [3.0], 2.0, 3.0),
                id="one token is one turn",
            ),
        ],
    )
    def test_by_hand(self, reward, values, mask, optional, expected, first_value, first_advantage):
        advantages, first_values, first_advantages = self.estimate([reward], [values], [mask], 0.5, 0.5, **optional)
        assert advantages.tolist() == [expected]
        assert (first_values.tolist(), first_advantages.tolist()) == ([first_value], [first_advantage])

    @staticmethod
    def slow(reward, values, mask, discount, gae_lambda, token_rewards, next_value, next_advantage):
        """Delta by delta, forwards, then each advantage as the sum of the deltas that follow."""
        places = [place for place, kept in enumerate(mask) if kept]
        if not places:
            return [0.0] * len(mask), reward + discount * next_value, discount * gae_lambda * next_advantage
        deltas = []
        for number, place in enumerate(places):
            last = number + 1 == len(places)
            after = next_value if last else values[places[number + 1]]
            deltas.append((reward if last else 0.0) + token_rewards[place] + discount * after - values[place])
        steps = [*deltas, next_advantage]  # what follows the completion is one more term
        advantages = [0.0] * len(mask)
        for number, place in enumerate(places):
            advantages[place] = sum(
                (discount * gae_lambda) ** (later - number) * steps[later] for later in range(number, len(steps))
            )
        return advantages, values[places[0]], advantages[places[0]]

    @pytest.mark.parametrize(
        "optional", [False, True], ids=["alone", "with rewards of tokens and a step that follows"]
    )
    @pytest.mark.parametrize("weights", WEIGHTS)
    def test_it_is_the_slow_loop(self, weights, optional):
        rng = random.Random(0)
        for length in (1, 2, 7):
            table = [[rng.uniform(-2, 2) for _ in range(length)] for _ in range(12)]
            penalties = [[rng.uniform(-1, 1) * optional for _ in range(length)] for _ in range(12)]
            mask = [[int(rng.random() < 0.6) for _ in range(length)] for _ in range(12)]
            mask[0] = [0] * length
            rewards, following, later = [[rng.uniform(-2, 2) for _ in range(12)] for _ in range(3)]
            if not optional:
                following, later = [0.0] * 12, [0.0] * 12
            given = [penalties, following, later] if optional else []
            results = self.estimate(rewards, table, mask, *weights, *given)
            columns = zip(rewards, table, mask, penalties, following, later, strict=True)
            rows = [self.slow(*row[:3], *weights, *row[3:]) for row in columns]
            for result, expected in zip(results, zip(*rows, strict=True), strict=True):
                assert result.dtype == torch.float64
                torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64))

    @pytest.mark.parametrize("hidden", [NAN, INF, -INF, 1e9])
    def test_what_stands_at_masked_places_has_no_effect(self, hidden):
        mask = torch.tensor([[0, 1, 0, 1, 0], [0, 0, 0, 0, 0]])
        filled = [torch.full((2, 5), number).masked_fill(mask == 0, hidden) for number in (1.5, -0.5)]
        clean = [torch.full((2, 5), number).masked_fill(mask == 0, 0.0) for number in (1.5, -0.5)]
        following = torch.tensor([2.0, 3.0]), torch.tensor([1.0, -1.0])
        for tables in (filled, clean):
            results = gae_over_tokens(torch.tensor([1.0, 2.0]), tables[0], mask, 0.5, 0.5, tables[1], *following)
            # 1 - 0.5 + 2 / 2 - 1.5 = 0 and 1 / 4; -0.5 + 1.5 / 2 - 1.5 = -1.25 and 0.25 / 4; no token: 2 + 3 / 2
            assert results[0].tolist() == [[0.0, -1.1875, 0.0, 0.25, 0.0], [0.0] * 5]
            assert results[1].tolist() == [1.5, 3.5] and results[2].tolist() == [-1.1875, -0.25]
            assert {result.dtype for result in results} == {torch.float32}
            assert not any(result.requires_grad for result in results)

    def test_integer_masks_and_bool_masks_agree(self):
        mask = [[1, 0, 1]]
        for kind in (torch.bool, torch.long, torch.float32):
            result = gae_over_tokens(
                torch.tensor([8.0]), torch.tensor([[2.0, 9.0, 6.0]]), torch.tensor(mask, dtype=kind), 0.5, 0.5
            )
            assert result[0].tolist() == [[1.5, 0.0, 2.0]]

    def test_a_completion_is_the_same_alone_and_beside_longer_ones(self):
        alone = self.estimate([8.0], [[2.0, 4.0]], [[1, 1]], 0.9, 0.8)
        beside = self.estimate([8.0, 1.0], [[2.0, 4.0, 7.0], [1.0, 2.0, 3.0]], [[1, 1, 0], [1, 1, 1]], 0.9, 0.8)
        assert torch.equal(beside[0][0], torch.cat([alone[0][0], torch.zeros(1, dtype=torch.float64)]))
        assert beside[1][0] == alone[1][0] and beside[2][0] == alone[2][0]

    def test_with_lambda_0_it_is_the_temporal_difference(self):
        advantages, _, _ = self.estimate([8.0], [[2.0, 4.0, 6.0]], [[1, 1, 1]], 0.5, 0.0, None, [3.0], [99.0])
        assert advantages.tolist() == [[0.0, -1.0, 3.5]]  # 4 / 2 - 2, 6 / 2 - 4, 8 + 3 / 2 - 6

    def test_with_lambda_1_it_is_the_return_less_the_value(self):
        advantages, _, _ = self.estimate([8.0], [[2.0, 4.0, 6.0]], [[1, 1, 1]], 0.5, 1.0)
        assert advantages.tolist() == [[0.0, 0.0, 2.0]]  # 8 / 4 - 2, 8 / 2 - 4, 8 - 6

    @pytest.mark.parametrize("weights", WEIGHTS)
    def test_a_missing_reward_makes_its_tokens_missing_and_no_others(self, weights):
        advantages, _, first_advantages = self.estimate(
            [NAN, 8.0, NAN],
            [[2.0, 99.0, 6.0], [1.0, 1.0, 99.0], [99.0] * 3],
            [[1, 0, 1], [1, 1, 0], [0] * 3],
            *weights,
        )
        assert advantages.isnan().tolist() == [[True, False, True], [False] * 3, [False] * 3]
        assert advantages[0, 1] == advantages[1, 2] == 0.0 and not advantages[2].any()
        assert not first_advantages[1].isnan()

    def test_a_step_that_follows_without_a_known_advantage_makes_all_missing_unless_its_weight_is_0(self):
        completion = [8.0], [[2.0, 6.0]], [[1, 1]]
        advantages, _, first = self.estimate(*completion, 0.5, 0.5, None, [4.0], [NAN])
        assert advantages.isnan().all() and first.isnan().all()
        advantages, _, _ = self.estimate(*completion, 0.5, 0.0, None, [4.0], [NAN])
        assert advantages.tolist() == [[1.0, 4.0]]  # 6 / 2 - 2, 8 + 4 / 2 - 6
        advantages, _, _ = self.estimate(*completion, 0.0, 0.5, None, [NAN], [NAN])
        assert advantages.tolist() == [[-2.0, 2.0]]

    @pytest.mark.parametrize("rows", [0, 2])
    def test_completions_without_any_place_are_steps_without_a_value(self, rows):
        results = gae_over_tokens(torch.full((rows,), 3.0), torch.zeros(rows, 0), torch.zeros(rows, 0), 0.5, 0.5)
        assert results[0].shape == (rows, 0)
        assert results[1].tolist() == [3.0] * rows and results[2].tolist() == [0.0] * rows

    def test_no_gradient_flows_and_arguments_are_left_alone(self):
        given = [torch.ones(2), torch.ones(2, 3), torch.ones(2, 3), torch.ones(2), torch.ones(2)]
        given = [tensor.requires_grad_() for tensor in given]
        mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
        results = gae_over_tokens(*given[:2], mask, 0.9, 0.9, *given[2:])
        assert not any(result.requires_grad for result in results)
        assert all(torch.equal(tensor, torch.ones_like(tensor)) and tensor.requires_grad for tensor in given)
        assert mask.tolist() == [[1, 0, 1], [0, 0, 0]]

    @pytest.mark.parametrize(
        ("rewards", "values", "mask"),
        [
            ((2,), (3,), (3,)),
            ((2,), (2, 3), (2, 2)),
            ((3,), (2, 3), (2, 3)),
            ((2, 1), (2, 3), (2, 3)),
            ((2,), (3,), (2, 3)),
        ],
    )
    def test_shapes_that_do_not_fit_are_an_error_that_names_them(self, rewards, values, mask):
        with pytest.raises(ValueError, match=r"\(B,\).*\(B, T\)") as error:
            gae_over_tokens(torch.zeros(rewards), torch.zeros(values), torch.ones(mask), 1.0, 1.0)
        assert all(str(shape) in str(error.value) for shape in (rewards, values, mask))


def test_tokens_of_one_each_are_turns():
    """A chain of completions with a single token is a chain of turns."""
    rewards, values = [1.0, -2.0, 3.0], [0.5, 1.5, -1.0]
    next_value = next_advantage = None
    chain = []
    for reward, value in zip(rewards[::-1], values[::-1], strict=True):
        advantages, next_value, next_advantage = gae_over_tokens(
            torch.tensor([reward]),
            torch.tensor([[value]]),
            torch.tensor([[1]]),
            0.9,
            0.8,
            None,
            next_value,
            next_advantage,
        )
        chain.insert(0, advantages.item())
    # 3 + 1 = 4; -2 + 0.9 * -1 - 1.5 = -4.4 and 0.72 * 4; 1 + 0.9 * 1.5 - 0.5 = 1.85 and 0.72 * -1.52
    assert chain == pytest.approx([0.7556, -1.52, 4.0])
    turns, _ = gae_over_turns(
        [torch.tensor([r]) for r in rewards], [torch.tensor([v]) for v in values], [torch.tensor([0])] * 3, 0.9, 0.8
    )
    assert [turn.item() for turn in turns] == pytest.approx([0.7556, -1.52, 4.0])
