# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""What reaches the losses and the logs: advantages, gradients, KL and means, against numbers computed by hand."""

import json
import logging
import math
import statistics

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny import (
    RecordGradients,
    dataset,
    gpt2,
    lm,
    logged,
    parameters,
    record_batches,
    stub_rollouts,
    team_args,
    tok,
    word_reward,
)

from trl_multiagent import MAACConfig, MAACTrainer, MAGRPOConfig, MAGRPOTrainer
from trl_multiagent.functional.advantages import leave_one_out_mean


NAN = float("nan")
INF = float("inf")


@pytest.fixture
def build(tmp_path):
    """A team of two actors (MAGRPO); options of the config by name, arguments of the trainer in `kwargs`."""

    def build(reward_func=word_reward, kwargs=None, **options):
        kwargs = {"agents": [lm(0), lm(1)], "train_dataset": dataset(4), **(kwargs or {})}
        return MAGRPOTrainer(
            tokenizer=tok(), reward_func=reward_func, args=team_args(MAGRPOConfig, tmp_path, **options), **kwargs
        )

    return build


@pytest.fixture
def build_maac(tmp_path):
    def build(reward_func=word_reward, kwargs=None, **options):
        kwargs = {
            "agents": [lm(0), lm(1)],
            "critic_model": lm(5),
            "train_dataset": dataset(4),
            **(kwargs or {}),
        }
        return MAACTrainer(
            tokenizer=tok(), reward_func=reward_func, args=team_args(MAACConfig, tmp_path, **options), **kwargs
        )

    return build


def fixed(values):
    """A reward function for any number of actors that gives one task item these values."""

    def fixed_reward(*completions):
        return list(values)

    return fixed_reward


def one_prompt(values, **options):
    """Options for a generation batch that is one prompt with these rewards."""
    size = len(values)
    return dict(reward_func=fixed(values), num_generations=size, per_device_train_batch_size=size, **options)


def first_advantages(trainer):
    batches = record_batches(trainer)
    trainer.train()
    return [batches[0][f"agent_{i}/advantages"].tolist() for i in range(len(trainer.agents))]


def all_parameters(trainer):
    return parameters(trainer.model)


class TestAdvantages:
    def test_three_ones_and_five_zeros(self, build):
        """The reference of a plain group: sample standard deviation 0.5175, epsilon 1e-4."""
        rewards = [1, 0, 1, 0, 0, 1, 0, 0]
        for advantages in first_advantages(build(**one_prompt(rewards))):
            assert advantages == pytest.approx([1.2074 if r else -0.7244 for r in rewards], abs=5e-5)

    def test_a_slow_loop_over_groups_agrees(self, build):
        """Two prompts of three joint samples, by Python's own statistics."""
        rewards = {"w0": [1.0, 4.0, 2.5], "w1": [-3.0, 0.5, 0.25]}

        def reward(first, second, batch_items):
            return rewards[batch_items[0]["gold"]]

        trainer = build(
            reward,
            {"train_dataset": dataset(2)},
            num_generations=3,
            per_device_train_batch_size=6,
            shuffle_dataset=False,
        )
        expected = []
        for group in rewards.values():
            mean, deviation = statistics.mean(group), statistics.stdev(group)
            expected += [(r - mean) / (deviation + 1e-4) for r in group]
        for advantages in first_advantages(trainer):
            assert advantages == pytest.approx(expected, abs=1e-5)

    def test_without_scaling_they_are_differences_from_the_groups_mean(self, build):
        assert first_advantages(build(**one_prompt([1.0, 2.0, 6.0], scale_rewards="none")))[0] == [-2.0, -1.0, 3.0]

    def test_reward_functions_are_weighted(self, build):
        trainer = build(
            [fixed([1.0, 0.0]), fixed([0.0, 10.0])],
            {"train_dataset": dataset(1)},
            per_device_train_batch_size=2,
            reward_weights=[4.0, 0.2],
            scale_rewards="none",
        )
        assert first_advantages(trainer)[0] == [1.0, -1.0]  # 4 and 2

    def test_the_reward_processor_comes_first(self, build):
        trainer = build(kwargs={"reward_processor": lambda r: -2 * r}, **one_prompt([1.0, 3.0], scale_rewards="none"))
        assert first_advantages(trainer)[0] == [2.0, -2.0]


class TestEqualRewards:
    """B23: where rewards are equal there is nothing to learn, and no noise from dividing by almost zero."""

    @pytest.mark.parametrize(
        "values",
        [[2.5] * 4, [0.0] * 4, [0.0, 1e-9, -1e-9, 5e-10], [0.1 + 0.2, 0.3, 0.3, 0.3], [1e6, 1e6, 1e6 + 0.06, 1e6]],
        ids=["2.5", "0", "up_to_1e-9", "0.1+0.2", "1e6"],
    )
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"scale_rewards": "batch"},
            {"scale_rewards": "none"},
            {"multi_objective_aggregation": "normalize_then_sum"},
        ],
        ids=["group", "batch", "none", "normalize_then_sum"],
    )
    def test_advantages_are_exactly_zero_and_no_weight_moves(self, build, values, options):
        trainer = build(**one_prompt(values, **options))
        before = all_parameters(trainer)
        assert first_advantages(trainer) == [[0.0] * 4] * 2
        assert torch.equal(all_parameters(trainer), before)

    @pytest.mark.parametrize("values", [[2.5] * 4, [0.0] * 4, [0.0, 1e-9, -1e-9, 5e-10]])
    def test_a_critic_learns_them_but_the_actors_have_no_advantage(self, build_maac, values):
        trainer = build_maac(**one_prompt(values))
        before = [parameters(actor) for actor in trainer.agents]
        assert first_advantages(trainer) == [[0.0] * 4] * 2
        assert all(torch.equal(parameters(actor), old) for actor, old in zip(trainer.agents, before, strict=True))

    @pytest.mark.parametrize("generations", [1, 0])
    def test_a_group_of_one_is_an_error_that_names_the_option(self, tmp_path, generations):
        with pytest.raises(ValueError, match=f"num_generations={generations}"):
            team_args(MAGRPOConfig, tmp_path, num_generations=generations)

    def test_an_equal_group_beside_another_learns_nothing(self, build):
        trainer = build(
            lambda a, b, batch_items: [1.0, 1.0] if batch_items[0]["gold"] == "w0" else [0.0, 2.0],
            {"train_dataset": dataset(2)},
            shuffle_dataset=False,
            scale_rewards="batch",
        )
        advantages = first_advantages(trainer)[0]
        assert advantages[:2] == [0.0, 0.0] and advantages[2] < 0 < advantages[3]


class TestMissingRewards:
    """B24: a reward that is not there is left out of the baseline, and counts neither as 0 nor as NaN."""

    @pytest.mark.parametrize("missing", [None, NAN, INF, -INF])
    @pytest.mark.parametrize(
        ("scale", "expected"), [("group", [0, -0.9999, 0, 0.9999]), ("none", [0, -1, 0, 1])], ids=["group", "none"]
    )
    def test_one_of_four(self, build, missing, scale, expected):
        for advantages in first_advantages(build(**one_prompt([missing, 1, 2, 3], scale_rewards=scale))):
            assert advantages == pytest.approx(expected, abs=1e-6)

    @pytest.mark.parametrize("missing", [None, INF])
    def test_where_all_are_missing_nothing_is_updated_and_a_warning_says_so(self, build, missing, caplog):
        trainer = build(**one_prompt([missing] * 4, max_steps=2))
        before = all_parameters(trainer)
        with caplog.at_level(logging.WARNING):
            assert first_advantages(trainer) == [[0.0] * 4] * 2
        assert torch.equal(all_parameters(trainer), before)
        assert any("reward" in record.getMessage().lower() for record in caplog.records)

    def test_where_all_but_one_are_missing_nothing_is_updated(self, build):
        trainer = build(**one_prompt([None, 5.0, None, None]))
        before = all_parameters(trainer)
        assert first_advantages(trainer) == [[0.0] * 4] * 2
        assert torch.equal(all_parameters(trainer), before)

    def test_one_infinite_reward_beside_equal_ones_is_no_signal(self, build):
        """Stock TRL logs an infinite reward here."""
        trainer = build(**one_prompt([INF, 1, 1, 1]))
        before = all_parameters(trainer)
        assert first_advantages(trainer) == [[0.0] * 4] * 2
        assert torch.equal(all_parameters(trainer), before)
        assert logged(trainer, "reward") == [1.0]

    def test_one_function_may_be_silent_where_another_speaks(self, build):
        trainer = build(
            [fixed([None, 1.0, 2.0]), fixed([6.0, 1.0, None])],
            {"train_dataset": dataset(1)},
            num_generations=3,
            per_device_train_batch_size=3,
            scale_rewards="none",
        )
        assert first_advantages(trainer)[0] == pytest.approx([8 / 3, -4 / 3, -4 / 3])  # 6, 2, 2

    def test_a_critic_leaves_them_out_too(self, build_maac):
        trainer = build_maac(**one_prompt([None, 1.0, 2.0, 6.0], advantage_normalization=False))
        stub_values(trainer, [0.5])
        batches = record_batches(trainer)
        trainer.train()
        assert batches[0]["agent_0/advantages"].tolist() == [0.0, 0.5, 1.5, 5.5]
        assert batches[0]["critic/valid"].tolist() == [False, True, True, True]
        assert logged(trainer, "critic/loss")[0] == pytest.approx((0.25 + 2.25 + 30.25) / 3)

    def test_a_critic_without_any_reward_learns_nothing(self, build_maac):
        trainer = build_maac(**one_prompt([None] * 4))
        before = all_parameters(trainer)
        trainer.train()
        assert torch.equal(all_parameters(trainer), before)
        assert logged(trainer, "loss") == [0.0]


class TestPerAgentRewards:
    """B26: each actor has a baseline of its own rewards."""

    @staticmethod
    def reward(shift):
        def shifted(first, second):
            own = word_reward(first)
            return [own, [r + shift for r in word_reward(second)]]

        return shifted

    def test_a_shift_of_one_actors_rewards_leaves_the_others_update_bit_identical(self, build):
        after = []
        for shift in (0.0, 100.0):
            trainer = build(self.reward(shift), max_steps=2)
            trainer.train()
            after.append([parameters(actor) for actor in trainer.agents])
        assert not torch.equal(after[0][0], parameters(lm(0)))
        assert torch.equal(after[0][0], after[1][0])
        torch.testing.assert_close(after[0][1], after[1][1], rtol=0, atol=1e-2)

    def test_another_scale_of_one_actors_rewards_leaves_the_others_update_bit_identical(self, build):
        """Also the clipping of gradients is each actor's own."""
        after = []
        for scale in (1.0, 1000.0):
            trainer = build(
                lambda a, b, scale=scale: [word_reward(a), [scale * r for r in word_reward(b)]],
                scale_rewards="none",
                max_grad_norm=0.5,
            )
            trainer.train()
            after.append(parameters(trainer.agents[0]))
        assert torch.equal(*after)

    def test_advantages_are_each_actors_own(self, build):
        trainer = build(
            lambda a, b: [[1.0, 3.0], [5.0, 1.0]],
            {"train_dataset": dataset(1)},
            per_device_train_batch_size=2,
            scale_rewards="none",
        )
        assert first_advantages(trainer) == [[-1.0, 1.0], [2.0, -2.0]]

    def test_every_actors_rewards_are_logged(self, build):
        trainer = build(lambda a, b: [[1.0, 3.0], [10.0, 50.0]], kwargs={"eval_dataset": dataset(2)})
        trainer.train()
        entry = trainer.state.log_history[0]
        assert entry["agent_0/reward"] == 2.0 and entry["agent_1/reward"] == 30.0
        metrics = trainer.evaluate()
        assert metrics["eval_agent_0/reward"] == 2.0 and metrics["eval_agent_1/reward"] == 30.0

    def test_a_central_critic_of_the_teams_reward_refuses_them_and_says_what_to_set(self, build_maac):
        with pytest.raises(ValueError, match="different rewards for the actors.*set individual_rewards=True"):
            build_maac(self.reward(1.0)).train()


LENGTHS = [[5, 6], [7, 8, 9, 10, 11, 2], [12, 13, 14, 15, 16, 17], [18, 2]]  # 2 and 6 tokens in each group


class TestAccumulation:
    """B27: batch 4 with 1 micro-step and batch 2 with 2 are the same step."""

    def both(self, monkeypatch, build, **options):
        runs = []
        for size, accumulation in ((4, 1), (2, 2)):
            recorder = RecordGradients()
            trainer = build(
                kwargs={"callbacks": [recorder], "train_dataset": dataset(2)},
                per_device_train_batch_size=size,
                gradient_accumulation_steps=accumulation,
                max_grad_norm=0.0,
                **options,
            )
            stub_rollouts(monkeypatch, trainer, [LENGTHS, LENGTHS[::-1]])
            trainer.train()
            assert len(recorder.steps) == 1
            runs.append((recorder.steps[0], logged(trainer, "loss")[0]))
        return runs

    @staticmethod
    def assert_same(runs):
        (big, big_loss), (small, small_loss) = runs
        for name, expected in big.items():
            scale = expected.abs().max().item()
            assert scale > 1e-4, name
            torch.testing.assert_close(
                small[name], expected, rtol=1e-5, atol=1e-6 * scale, msg=lambda m, n=name: f"{n}: {m}"
            )
        assert small_loss == pytest.approx(big_loss, rel=1e-5, abs=1e-6)

    @pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "cispo", "luspo"])
    def test_the_actors_gradients_and_the_loss(self, monkeypatch, build, loss_type):
        self.assert_same(self.both(monkeypatch, build, loss_type=loss_type))

    def test_with_a_kl_term(self, monkeypatch, build):
        def build_apart(**options):
            trainer = build(beta=0.5, **options)
            move_away_from_reference(trainer)
            return trainer

        self.assert_same(self.both(monkeypatch, build_apart))

    @pytest.mark.parametrize("critic_type", ["v", "q"])
    @pytest.mark.parametrize("clip", [None, 0.2])
    def test_the_critics_gradient_too(self, monkeypatch, build_maac, critic_type, clip):
        self.assert_same(self.both(monkeypatch, build_maac, critic_type=critic_type, value_clip_range=clip))

    def test_the_critics_gradient_where_a_reward_is_missing(self, monkeypatch, build_maac):
        """Three targets in four samples: however they fall into micro-batches, each counts a third."""

        def reward(first, second):
            return [None if "w4" in text else float(len(text)) for text in first]

        self.assert_same(self.both(monkeypatch, build_maac, reward_func=reward))

    def test_the_learning_that_follows_is_the_same(self, monkeypatch, build):
        """Four steps, with optimizer, by batch 4 and by twice 2."""
        ends = []
        for size, accumulation in ((4, 1), (2, 2)):
            trainer = build(per_device_train_batch_size=size, gradient_accumulation_steps=accumulation, max_steps=4)
            stub_rollouts(monkeypatch, trainer, [LENGTHS, LENGTHS[::-1]])
            trainer.train()
            ends.append(all_parameters(trainer))
        torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-4)


def move_away_from_reference(trainer, scale=0.3):
    """Perturb one weight of every actor, so that policy and reference differ."""
    with torch.no_grad():
        for actor in trainer.agents:
            weight = actor.model.layers[0].mlp.down_proj.weight
            weight.add_(scale * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))


class TestKL:
    """B28: `k3 = exp(ref - logp) - (ref - logp) - 1`, which pulls towards the reference."""

    def loss_of(self, build, logp, **options):
        """TRL's loss of the team's actor on one token with advantage 0, and its derivative for the log-probability."""
        trainer = build(beta=1.0, **options)
        agent = trainer.agent_trainers[0]
        trainer.current_gradient_accumulation_steps = 1
        agent.follow(trainer)
        logps = torch.tensor([[logp]], requires_grad=True)
        agent._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logps, torch.zeros(1, 1), None)
        inputs = {
            "prompt_ids": torch.tensor([[3]]),
            "prompt_mask": torch.tensor([[1]]),
            "completion_ids": torch.tensor([[4]]),
            "completion_mask": torch.tensor([[1]]),
            "advantages": torch.zeros(1),
            "num_items_in_batch": torch.tensor(1),
            "ref_per_token_logps": torch.tensor([[-1.5]]),
        }
        loss = agent.loss(trainer.agents[0], inputs)
        loss.backward()
        return loss.item(), logps.grad.item()

    @pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo"])
    def test_its_value_and_derivative(self, build, loss_type):
        value, derivative = self.loss_of(build, -1.0, loss_type=loss_type, use_bias_correction_kl=False)
        assert value == pytest.approx(0.106531, abs=1e-6)
        assert derivative == pytest.approx(0.393469, abs=1e-6)

    def test_its_sign_turns_on_the_other_side_of_the_reference(self, build):
        value, derivative = self.loss_of(build, -2.0, use_bias_correction_kl=False)
        assert value == pytest.approx(math.exp(0.5) - 1.5, abs=1e-6)
        assert derivative == pytest.approx(1 - math.exp(0.5), abs=1e-6)

    def test_the_correction_for_off_policy_samples_adds_the_ratios_derivative(self, build):
        """TRL's default multiplies k3 by the ratio, whose derivative at 1 is k3 itself."""
        value, derivative = self.loss_of(build, -1.0)
        assert value == pytest.approx(0.106531, abs=1e-6)
        assert derivative == pytest.approx(0.393469 + 0.106531, abs=1e-6)

    def test_one_step_without_advantages_reduces_it(self, build, monkeypatch):
        trainer = build(
            **one_prompt([1.0] * 4),
            kwargs={"train_dataset": dataset(1)},
            beta=1.0,
            use_bias_correction_kl=False,
            optim="sgd",
            learning_rate=1e-2,
            max_steps=2,
        )
        move_away_from_reference(trainer)
        stub_rollouts(monkeypatch, trainer, [LENGTHS, LENGTHS[::-1]])
        batches = record_batches(trainer)
        trainer.train()
        assert batches[0]["agent_0/advantages"].tolist() == [0.0] * 4
        for index in range(2):
            first, second = logged(trainer, f"agent_{index}/kl")
            assert first > second >= 0.0

    def test_it_is_never_negative(self, build):
        trainer = build(beta=0.01, max_steps=6, learning_rate=5e-2)
        trainer.train()
        for index in range(2):
            assert all(kl >= -1e-7 for kl in logged(trainer, f"agent_{index}/kl"))

    def test_coefficients_scale_the_loss(self, build, monkeypatch):
        losses = []
        for beta in (0.5, 1.0):
            trainer = build(**one_prompt([1.0] * 4), kwargs={"train_dataset": dataset(1)}, beta=beta)
            move_away_from_reference(trainer)
            stub_rollouts(monkeypatch, trainer, [LENGTHS, LENGTHS])
            trainer.train()
            losses.append(logged(trainer, "loss")[0])
        assert losses[0] > 0 and losses[1] == pytest.approx(2 * losses[0], rel=1e-5)


def stub_values(trainer, values):
    """
    Let the critic give these values to what it reads of a generation batch, in order, and still have a gradient: one
    for each history, or for each row where it reads the response too.
    """
    head, table = trainer.critics[0].value_head, {}

    def forward(input_ids, attention_mask, positions=None):
        rows = [tuple(ids[mask.bool()].tolist()) for ids, mask in zip(input_ids, attention_mask, strict=True)]
        if not torch.is_grad_enabled():
            table.update(zip(rows, values, strict=True))
        return torch.tensor([table[row] for row in rows]) + 0.0 * sum(p.sum() for p in head.parameters())

    trainer.critics[0].forward = forward


class TestCriticAdvantages:
    rewards = [1.0, 2.0, 3.0, 6.0]

    def advantages(self, build_maac, monkeypatch, values, **options):
        trainer = build_maac(**one_prompt(self.rewards, **options))
        stub_rollouts(monkeypatch, trainer, [[[5], [6], [7], [8]], [[9]]])
        stub_values(trainer, values)
        first, second = first_advantages(trainer)
        assert first == second
        return first

    def test_with_v_they_are_reward_minus_the_historys_value(self, build_maac, monkeypatch):
        result = self.advantages(build_maac, monkeypatch, [0.5], advantage_normalization=False)
        assert result == [0.5, 1.5, 2.5, 5.5]

    def test_with_q_they_are_reward_minus_the_mean_value_of_the_other_samples(self, build_maac, monkeypatch):
        result = self.advantages(
            build_maac, monkeypatch, [1.0, 2.0, 3.0, 6.0], critic_type="q", advantage_normalization=False
        )
        assert result == pytest.approx([1 - 11 / 3, 2 - 10 / 3, 0.0, 4.0])

    @pytest.mark.parametrize("critic_type", ["v", "q"])
    def test_normalized_they_have_mean_zero_and_deviation_one(self, build_maac, monkeypatch, critic_type):
        values = [0.5] if critic_type == "v" else [1.0, 2.0, 3.0, 6.0]
        raw = [0.5, 1.5, 2.5, 5.5] if critic_type == "v" else [1 - 11 / 3, 2 - 10 / 3, 0.0, 4.0]
        mean, deviation = statistics.mean(raw), statistics.stdev(raw)
        result = self.advantages(build_maac, monkeypatch, values, critic_type=critic_type)
        assert result == pytest.approx([(a - mean) / deviation for a in raw], abs=1e-5)

    def test_groups_do_not_mix_with_q(self, build_maac, monkeypatch):
        trainer = build_maac(
            lambda a, b: [0.0, 0.0], {"train_dataset": dataset(2)}, critic_type="q", advantage_normalization=False
        )
        stub_rollouts(monkeypatch, trainer, [[[5], [6], [7], [8]], [[9]]])
        stub_values(trainer, [1.0, 2.0, 10.0, 30.0])
        assert first_advantages(trainer)[0] == [-2.0, -1.0, -30.0, -10.0]

    def test_the_critics_loss_and_metrics_by_hand(self, build_maac, monkeypatch):
        trainer = build_maac(**one_prompt(self.rewards, value_loss_coef=0.25))
        stub_rollouts(monkeypatch, trainer, [[[5], [6], [7], [8]], [[9]]])
        stub_values(trainer, [2.0])
        trainer.train()
        (entry,) = [entry for entry in trainer.state.log_history if "critic/loss" in entry]
        assert entry["critic/loss"] == pytest.approx((1 + 0 + 1 + 16) / 4)
        assert entry["critic/value_mean"] == pytest.approx(2.0)
        assert entry["critic/value_error"] == pytest.approx((1 + 0 + 1 + 4) / 4)
        assert entry["critic/explained_variance"] == pytest.approx(0.0)
        # the actors' clipped losses have mean advantage 0 over one token each, so only the critic's loss is left
        assert entry["loss"] == pytest.approx(0.25 * 4.5, abs=1e-5)

    def test_a_perfect_q_leaves_no_signal_in_r_minus_q_but_the_right_one_beside_the_others_mean(self):
        """One state, two actions worth 0 and 1, a policy of one logit for each; four samples."""
        actions = torch.tensor([0, 1, 1, 0])
        rewards = torch.tensor([0.0, 1.0])[actions]
        q = rewards.clone()  # Q(h, a) = r(a)

        def policy_gradient(advantages):
            theta = torch.zeros(2, requires_grad=True)
            (theta.log_softmax(0)[actions] * advantages).sum().backward()
            return theta.grad.tolist()

        assert policy_gradient(rewards - q) == [0.0, 0.0]
        # advantages: 0 - 2/3 for action 0, 1 - 1/3 for action 1; d log pi(a) / d theta = one-hot - 1/2
        assert policy_gradient(rewards - leave_one_out_mean(q[None])[0]) == pytest.approx([-4 / 3, 4 / 3])


class TestColumns:
    """B34: formatters and reward functions get every column, and each row beside its own completions."""

    data = Dataset.from_list(
        [
            {
                "prompt": f"w{i}",
                "gold": f"w{i}",
                "labels": i,
                "input_ids": [i, i],
                "attention_mask": [1],
                "meta": {"id": i, "tags": ["a", "b"]},
                "words": [f"w{i}", "x"],
                "score": i / 2,
                "none": None,
            }
            for i in range(6)
        ]
    )

    @pytest.mark.parametrize("batched", [False, True])
    def test_rows_are_whole_and_aligned(self, build, monkeypatch, batched):
        seen = []

        def reward(first, second, batch_items):
            seen.extend(zip(first, second, batch_items, strict=True))
            return [0.0] * len(first)

        trainer = build(
            reward,
            {
                "train_dataset": self.data,
                "formatters": [lambda row: row["prompt"], lambda row: f"w{row['meta']['id'] + 1}"],
            },
            num_generations=3,
            per_device_train_batch_size=6,
            max_steps=3,
            batched_rewards=batched,
            influence_steps=0,
        )
        stub_rollouts(monkeypatch, trainer, [lambda prompts: prompts] * 2)  # every actor repeats its prompt
        trainer.train()
        assert len(seen) == 18
        originals = list(self.data)
        for first, second, row in seen:
            i = row["labels"]
            assert row == originals[i]
            assert (first, second) == (f"w{i}", f"w{i + 1}")
        assert sorted(row["labels"] for _, _, row in seen) == sorted(list(range(6)) * 3)

    def test_a_dataset_without_prompt_needs_only_formatters(self, build):
        trainer = build(
            word_reward,
            {"train_dataset": self.data.remove_columns("prompt"), "formatters": lambda row: row["gold"]},
        )
        trainer.train()
        assert math.isfinite(logged(trainer, "loss")[0])

    def test_evaluation_rows_are_whole_too(self, build):
        seen = []

        def reward(first, second, batch_items):
            seen.extend(batch_items)
            return [0.0] * len(first)

        trainer = build(reward, {"eval_dataset": self.data})
        trainer.evaluate()
        assert [row["labels"] for row in seen] == [i for i in range(6) for _ in range(2)]
        assert seen[0] == self.data[0]


class TestStreaming:
    """B35: streamed prompts form right groups."""

    def test_equal_rewards_within_a_prompt_give_no_advantage(self, build):
        golds = []

        def reward(first, second, batch_items):
            golds.append([row["gold"] for row in batch_items])
            return [float(row["gold"][1:]) for row in batch_items]

        trainer = build(reward, {"train_dataset": dataset(8).to_iterable_dataset()}, max_steps=4, influence_steps=0)
        before = all_parameters(trainer)
        batches = record_batches(trainer)
        trainer.train()
        assert trainer.state.global_step == 4
        assert len(batches) == 4 and len(golds) == 8
        assert all(len(set(group)) == 1 for group in golds)
        assert {group[0] for group in golds} == {f"w{i}" for i in range(8)}
        assert all(batch["agent_0/advantages"].tolist() == [0.0] * 4 for batch in batches)
        assert torch.equal(all_parameters(trainer), before)

    @pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 2}, {"num_iterations": 2}])
    def test_groups_are_right_where_a_batch_is_visited_several_times(self, build, options):
        groups = []

        def reward(first, second, batch_items):
            groups.append([row["gold"] for row in batch_items])
            return [float(i) for i in range(len(first))]

        trainer = build(
            reward, {"train_dataset": dataset(8).to_iterable_dataset()}, max_steps=2, influence_steps=0, **options
        )
        trainer.train()
        assert all(len(set(group)) == 1 and len(group) == 2 for group in groups)
        assert len(groups) == (8 if "gradient_accumulation_steps" in options else 2)

    def test_a_streamed_evaluation_sees_every_prompt_once(self, build):
        seen = []

        def reward(first, second, batch_items):
            seen.append({row["gold"] for row in batch_items})
            return [float(batch_items[0]["gold"][1:])] * len(first)

        trainer = build(reward, {"eval_dataset": dataset(3).to_iterable_dataset()})
        metrics = trainer.evaluate()
        assert seen == [{"w0"}, {"w1"}, {"w2"}]
        assert metrics["eval_reward"] == 1.0

    @pytest.mark.parametrize(
        "options", [{"dataloader_num_workers": 2}, {"accelerator_config": {"dispatch_batches": True}}]
    )
    def test_what_would_split_groups_is_an_error_at_construction(self, build, options):
        with pytest.raises(ValueError, match=next(iter(options)).split("_")[0]):
            build(kwargs={"train_dataset": dataset(8).to_iterable_dataset()}, max_steps=2, **options)

    def test_without_max_steps_it_is_an_error_at_construction(self, build):
        with pytest.raises(ValueError, match="max_steps"):
            build(kwargs={"train_dataset": dataset(8).to_iterable_dataset()}, max_steps=-1)


class TestBatches:
    """B36: no prompt is dropped."""

    @pytest.mark.parametrize("rows", [1, 3, 5])
    def test_every_prompt_is_trained_in_each_epoch(self, build, rows):
        seen = []

        def reward(first, second, batch_items):
            seen.append(batch_items[0]["gold"])
            return word_reward(first, second)

        trainer = build(reward, {"train_dataset": dataset(rows)}, max_steps=-1, num_train_epochs=1, influence_steps=0)
        trainer.train()
        steps = math.ceil(rows / 2)
        assert trainer.state.global_step == steps
        assert len(seen) == 2 * steps and set(seen) == {f"w{i}" for i in range(rows)}

    def test_so_it_is_in_a_second_epoch(self, build):
        seen = []

        def reward(first, second, batch_items):
            seen.append(batch_items[0]["gold"])
            return word_reward(first, second)

        trainer = build(reward, {"train_dataset": dataset(5)}, max_steps=-1, num_train_epochs=2, influence_steps=0)
        trainer.train()
        assert trainer.state.global_step == 6
        assert set(seen[:6]) == set(seen[6:]) == {f"w{i}" for i in range(5)}

    @pytest.mark.parametrize(("rows", "batch_size", "generations"), [(3, 4, 2), (3, 4, 4), (5, 8, 2), (3, 6, 3)])
    def test_an_evaluation_is_the_mean_over_exactly_its_prompts(self, build, rows, batch_size, generations):
        """The last batch is smaller, and must not weigh more."""
        worth = [3.0, 5.0, 10.0, 20.0, 40.0][:rows]
        calls = []

        def reward(first, second, batch_items):
            calls.append(batch_items[0]["gold"])
            return [worth[int(batch_items[0]["gold"][1:])]] * len(first)

        trainer = build(
            reward,
            {"eval_dataset": dataset(rows)},
            per_device_eval_batch_size=batch_size,
            num_generations_eval=generations,
        )
        metrics = trainer.evaluate()
        assert calls == [f"w{i}" for i in range(rows)]
        assert metrics["eval_reward"] == pytest.approx(sum(worth) / rows)

    def test_each_functions_mean_is_over_the_same_prompts(self, build):
        def reward(first, second, batch_items):
            return [[3.0, 5.0, 10.0][int(batch_items[0]["gold"][1:])]] * len(first)

        metrics = build(reward, {"eval_dataset": dataset(3)}).evaluate()
        assert metrics["eval_rewards/reward/mean"] == pytest.approx(6.0)

    def test_several_evaluation_sets_have_names_of_their_own(self, build):
        def reward(first, second, batch_items):
            return [float(batch_items[0]["gold"][1:])] * len(first)

        trainer = build(reward, {"eval_dataset": {"small": dataset(1), "large": dataset(3)}})
        metrics = trainer.evaluate()
        assert metrics["eval_small_reward"] == 0.0 and metrics["eval_large_reward"] == 1.0

    def test_an_evaluation_changes_neither_weights_nor_what_is_sampled_next(self, build):
        ends = []
        for evaluates in (False, True):
            trainer = build(
                kwargs={"eval_dataset": dataset(3)},
                max_steps=3,
                eval_strategy="steps" if evaluates else "no",
                eval_steps=1,
            )
            trainer.train()
            ends.append(all_parameters(trainer))
        assert torch.equal(*ends)


class TestLoggedMeans:
    """B12: one missing number does not spoil a window, and no log holds a NaN."""

    def run(self, build, rewards, **options):
        step = iter(rewards)
        trainer = build(
            lambda a, b: [next(step)] * len(a),
            {"train_dataset": dataset(1)},
            per_device_train_batch_size=2,
            logging_steps=3,
            max_steps=3,
            influence_steps=0,
            **options,
        )
        trainer.train()
        return trainer

    @pytest.mark.parametrize("missing", [None, NAN, INF])
    def test_a_window_with_one_missing_is_the_mean_of_the_others(self, build, missing):
        trainer = self.run(build, [1.0, missing, 3.0])
        assert logged(trainer, "reward") == [2.0]
        assert logged(trainer, "rewards/reward_func/mean") == [2.0]

    def test_a_window_without_any_is_none(self, build):
        trainer = self.run(build, [None, None, None])
        assert logged(trainer, "reward") == [None]

    @pytest.mark.parametrize("rewards", [[1.0, None, 3.0], [None, None, None]])
    def test_logs_are_strict_json(self, build, rewards):
        trainer = self.run(build, rewards)
        json.dumps(trainer.state.log_history, allow_nan=False)

    def test_masked_rows_leave_no_nan_in_the_logs(self, build, monkeypatch):
        trainer = build(mask_truncated_completions=True)
        stub_rollouts(monkeypatch, trainer, [[[5, 6, 7]], [[8], [9, 2]]])
        trainer.train()
        json.dumps(trainer.state.log_history, allow_nan=False)

    def test_so_it_is_with_a_critic(self, build_maac):
        trainer = build_maac(**one_prompt([None] * 4))
        trainer.train()
        json.dumps(trainer.state.log_history, allow_nan=False)


class TestPrecision:
    """B44: models in bf16, mixed teams, and autocast."""

    @staticmethod
    def assert_trains(trainer):
        before = all_parameters(trainer)
        trainer.train()
        after = all_parameters(trainer)
        assert torch.isfinite(after).all() and not torch.equal(after, before)
        for entry in trainer.state.log_history:
            for name, value in entry.items():
                assert value is None or isinstance(value, (int, float)), name
                assert not isinstance(value, (np.generic, torch.Tensor)), name
                assert value is None or math.isfinite(value), name

    @pytest.mark.parametrize(
        "dtypes", [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=["bf16", "mixed"]
    )
    @pytest.mark.parametrize("beta", [0.0, 0.1])
    def test_actors_keep_their_precision(self, build, dtypes, beta):
        actors = [lm(0).to(dtypes[0]), gpt2(1).to(dtypes[1])]
        trainer = build(kwargs={"agents": actors}, beta=beta, max_steps=2, learning_rate=5e-2)
        self.assert_trains(trainer)
        assert tuple(actor.dtype for actor in trainer.agents) == dtypes

    @pytest.mark.parametrize("critic_type", ["v", "q"])
    @pytest.mark.parametrize("hidden_dim", [None, 8])
    def test_a_critic_in_bf16_has_a_head_in_float32(self, build_maac, critic_type, hidden_dim):
        trainer = build_maac(
            kwargs={"agents": [lm(0).bfloat16(), lm(1)], "critic_model": lm(5).bfloat16()},
            critic_type=critic_type,
            critic_value_head_hidden_dim=hidden_dim,
            learning_rate=5e-2,
            max_steps=2,
        )
        self.assert_trains(trainer)
        critic = trainer.critics[0]
        assert critic.backbone.dtype == torch.bfloat16
        assert {p.dtype for p in critic.value_head.parameters()} == {torch.float32}
        values = critic(torch.tensor([[3, 4]]), torch.tensor([[1, 1]]))
        assert values.dtype == torch.float32 and torch.isfinite(values).all()

    def test_float32_models_train_under_bf16_autocast(self, build_maac):
        trainer = build_maac(bf16=True, max_steps=2)
        self.assert_trains(trainer)
        assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}

    def test_rewards_in_half_precision_are_taken(self, build):
        trainer = build(lambda a, b: torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
        self.assert_trains(trainer)
