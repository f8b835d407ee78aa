# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""A team with a lazy actor is noticed, at a bounded cost and without a trace in what is learned."""

import logging
import random

import numpy as np
import pytest
import torch
from tiny import dataset, lm, logged, stub_rollouts, team_args, tok, weights_hash

from trl_multiagent import MAGRPOConfig, MAGRPOTrainer
from trl_multiagent.rollouts import influence


NAMES = ["worker", "idler"]
WORD = 3  # id of the word w0
FOUR = [[WORD + value] for value in range(4)]
OTHER_FOUR = [[WORD + 10 + value] for value in range(4)]
ENOUGH_TASKS = influence.ENOUGH_TASKS


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Four tasks are enough: with two in a step, an actor without effect is named in the second."""
    monkeypatch.setattr(influence, "ENOUGH_TASKS", 4)


class Reward:
    """Any function of two texts, with its calls counted."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, first, second):
        self.calls += 1
        return [self.function(a, b) for a, b in zip(first, second, strict=True)]


def number(text):
    """The sum of the words' numbers."""
    return float(sum(int(word[1:]) for word in text.split() if word.startswith("w")))


def of_first(first, second):
    return number(first)


def of_second(first, second):
    return number(second)


def of_both(first, second):
    return number(first) + 0.5 * number(second)


@pytest.fixture
def warnings_of_influence(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [r.getMessage() for r in caplog.records if r.name == "trl_multiagent.rollouts.influence"]


@pytest.fixture
def build(tmp_path, monkeypatch):
    """A team with two tasks of four samples; `rows` are the answers of each actor, or None to sample."""

    def build(reward, rows=(FOUR, OTHER_FOUR), kwargs=None, **options):
        options = {"num_generations": 4, "per_device_train_batch_size": 8, "agent_names": NAMES, **options}
        kwargs = {"agents": [lm(0), lm(1)], "train_dataset": dataset(2), **(kwargs or {})}
        trainer = MAGRPOTrainer(
            tokenizer=tok(), reward_func=reward, args=team_args(MAGRPOConfig, tmp_path, **options), **kwargs
        )
        if rows is not None:
            stub_rollouts(monkeypatch, trainer, rows)
        return trainer

    return build


def shares(trainer, name):
    return logged(trainer, f"{name}/reward_variance_share")


class TestLazyActor:
    @pytest.mark.parametrize("influence_steps", [1, 50])
    def test_it_is_named_once_and_its_share_is_zero(self, influence_steps, build, warnings_of_influence):
        trainer = build(Reward(of_first), max_steps=6, influence_steps=influence_steps)
        trainer.train()
        (message,) = warnings_of_influence()
        assert "The reward of idler seems not to depend on what it says" in message and "worker" not in message
        assert set(shares(trainer, "idler")) == {0.0}
        # Rewards 0, 1, 2, 3 against 1, 2, 3, 0: half of their squared distance is 1.5, their variance 5/3
        assert shares(trainer, "worker") == pytest.approx([0.9] * len(shares(trainer, "worker")))
        # Known to act after the first step, it is measured when it is due only; the other one until it is named
        assert len(shares(trainer, "worker")) == (6 if influence_steps == 1 else 1)
        assert len(shares(trainer, "idler")) == (6 if influence_steps == 1 else 2)

    def test_it_is_named_in_the_sixteenth_step_of_two_tasks(self, build, warnings_of_influence, monkeypatch):
        monkeypatch.setattr(influence, "ENOUGH_TASKS", ENOUGH_TASKS)
        reward = Reward(of_first)
        trainer = build(reward, max_steps=18, influence_steps=1000)
        trainer.train()
        (message,) = warnings_of_influence()
        assert "The reward of idler" in message and "in 32 tasks" in message
        assert len(shares(trainer, "idler")) == 16
        assert reward.calls == 2 * (18 + 1 + 16)

    def test_with_crossed_joint_responses_it_costs_no_call(self, build, warnings_of_influence):
        reward = Reward(of_first)
        trainer = build(reward, max_steps=3, joint_mode="cross")
        trainer.train()
        assert reward.calls == 2 * 3  # two tasks in each of three steps
        (message,) = warnings_of_influence()
        assert "The reward of idler seems not to depend on what it says" in message
        assert shares(trainer, "idler") == [0.0] * 3
        assert all(share > 0.5 for share in shares(trainer, "worker"))

    @pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
    def test_it_may_be_any_actor(self, joint_mode, build, warnings_of_influence):
        trainer = build(Reward(of_second), max_steps=3, joint_mode=joint_mode)
        trainer.train()
        (message,) = warnings_of_influence()
        assert "The reward of worker" in message
        assert set(shares(trainer, "worker")) == {0.0}
        assert all(share > 0.5 for share in shares(trainer, "idler"))

    def test_it_is_judged_by_its_own_reward(self, build, warnings_of_influence):
        """With rewards of their own, it may move those of others."""

        def reward(first, second):
            return [[of_both(a, b) for a, b in zip(first, second, strict=True)], [number(a) for a in first]]

        build(reward, max_steps=3).train()
        (message,) = warnings_of_influence()
        assert "The reward of idler" in message

    def test_it_is_judged_by_the_weighted_sum_of_the_functions(self, build, warnings_of_influence):
        trainer = build([Reward(of_first), Reward(of_second)], max_steps=3, reward_weights=[1.0, 0.0])
        trainer.train()
        (message,) = warnings_of_influence()
        assert "The reward of idler" in message
        assert set(shares(trainer, "idler")) == {0.0}

    def test_with_sampled_answers_too(self, build, warnings_of_influence):
        trainer = build(Reward(of_first), rows=None, max_steps=6)
        trainer.train()
        (message,) = warnings_of_influence()
        assert "idler" in message
        assert set(shares(trainer, "idler")) == {0.0} and shares(trainer, "worker")[-1] > 0.5

    def test_a_resumed_run_knows_what_was_measured(self, build, tmp_path, warnings_of_influence, caplog):
        """B06: it is not named again, and the shares go on."""
        options = {"max_steps": 4, "influence_steps": 1, "save_strategy": "steps", "save_steps": 1}
        whole = build(Reward(of_first), **options)
        whole.train()
        assert len(warnings_of_influence()) == 1
        for step, warnings in ((1, 1), (3, 0)):
            caplog.clear()
            reward = Reward(of_first)
            resumed = build(reward, **options)
            resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
            assert len(warnings_of_influence()) == warnings  # four tasks are reached in step 2
            assert reward.calls == (4 - step) * (2 + 2 * 2)
            assert shares(resumed, "worker")[step:] == shares(whole, "worker")[step:]

    def test_the_last_of_a_sequential_turn_is_named(self, build, warnings_of_influence):
        trainer = build(Reward(of_first), max_steps=4, turn_order="sequential", kwargs={"formatters": [plain, hears]})
        trainer.train()
        (message,) = warnings_of_influence()
        assert "The reward of idler" in message


def plain(row):
    return row["prompt"]


def hears(row, earlier_completions):
    return " ".join([row["prompt"], *earlier_completions])


class TestNoFalseAlarm:
    @pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
    @pytest.mark.parametrize(
        "function",
        [
            of_both,
            lambda a, b: number(a) * number(b),
            lambda a, b: max(number(a), number(b) - 10),
            lambda a, b: number(a) + 1e-2 * number(b),
        ],
        ids=["sum", "product", "maximum", "little"],
    )
    def test_where_both_matter(self, function, joint_mode, build, warnings_of_influence):
        trainer = build(Reward(function), max_steps=4, influence_steps=1, joint_mode=joint_mode)
        trainer.train()
        assert not warnings_of_influence()
        assert all(share > 0 for name in NAMES for share in shares(trainer, name))

    @pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
    @pytest.mark.parametrize("value", [0.0, 2.5, None])
    def test_where_all_rewards_are_equal(self, value, joint_mode, build, warnings_of_influence):
        """B23, B24: nothing varies, so nobody's share is known."""
        trainer = build(Reward(lambda a, b: value), max_steps=4, joint_mode=joint_mode)
        trainer.train()
        assert not warnings_of_influence()
        assert not shares(trainer, "worker") and not shares(trainer, "idler")

    @pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
    def test_where_it_always_says_the_same(self, joint_mode, build, warnings_of_influence):
        """Other words of it might have changed the reward."""
        trainer = build(Reward(of_both), rows=[FOUR, [[20]]], max_steps=6, influence_steps=1, joint_mode=joint_mode)
        trainer.train()
        assert not warnings_of_influence()

    def test_where_all_texts_are_equal(self, build, warnings_of_influence):
        trainer = build(Reward(of_both), rows=[[[20]], [[21]]], max_steps=4, influence_steps=1)
        trainer.train()
        assert not warnings_of_influence()

    def test_where_a_later_actor_hears_it(self, build, warnings_of_influence):
        """In sequential turns it acts through the other one."""
        reward = Reward(of_second)
        trainer = build(reward, max_steps=4, turn_order="sequential", kwargs={"formatters": [plain, hears]})
        trainer.train()
        assert not warnings_of_influence()
        assert not shares(trainer, "worker") and shares(trainer, "idler") == pytest.approx([0.9])

    def test_where_it_does_not_learn(self, build, warnings_of_influence):
        reward = Reward(of_first)
        trainer = build(reward, max_steps=4, influence_steps=1, trainable_agents=[True, False])
        trainer.train()
        assert not warnings_of_influence()
        assert not shares(trainer, "idler")
        assert reward.calls == 4 * (2 + 2)  # one measured actor

    def test_where_there_is_one_actor(self, tmp_path, warnings_of_influence):
        calls = []

        def reward(texts):
            calls.append(len(texts))
            return [number(text) for text in texts]

        args = team_args(MAGRPOConfig, tmp_path, influence_steps=1)
        MAGRPOTrainer(agents=[lm(0)], tokenizer=tok(), reward_func=reward, args=args, train_dataset=dataset(2)).train()
        assert calls == [2, 2] and not warnings_of_influence()


class TestCost:
    @pytest.mark.parametrize("options", [{"influence_steps": 0}, {"influence_steps": 1, "num_turns": 2}])
    def test_there_are_no_more_calls(self, options, build, warnings_of_influence):
        """Switched off, or over several turns, where the measure is not offered."""
        reward = Reward(of_first)
        turns = options.get("num_turns", 1)
        trainer = build(
            reward,
            max_steps=3,
            rollout_mode="chain",
            kwargs={"external_transition": lambda prompt, agent_completions, num_agents: [prompt] * num_agents},
            **options,
        )
        trainer.train()
        assert reward.calls == 2 * 3 * turns
        assert not warnings_of_influence() and not shares(trainer, "worker")

    def test_over_several_turns_combinations_are_not_measured_either(self, build, warnings_of_influence):
        """What is said in one turn acts by way of the next ones."""
        trainer = build(
            Reward(of_first),
            max_steps=3,
            num_turns=2,
            joint_mode="cross",
            num_generations=2,
            per_device_train_batch_size=4,
            kwargs={"external_transition": lambda prompt, agent_completions, num_agents: [prompt] * num_agents},
        )
        trainer.train()
        assert not warnings_of_influence()
        assert not shares(trainer, "worker") and not shares(trainer, "idler")

    def test_more_than_four_tasks_are_not_asked_again(self, build):
        reward = Reward(of_both)
        build(reward, num_generations=2, per_device_train_batch_size=12, kwargs={"train_dataset": dataset(6)}).train()
        assert reward.calls == 6 + 2 * 4

    def test_once_all_are_known_to_act_there_is_one_measurement_in_influence_steps(self, build):
        reward = Reward(of_both)
        trainer = build(reward, max_steps=7, influence_steps=3)
        trainer.train()
        # Two tasks in each of seven steps, and again for two actors in steps 1, 4 and 7
        assert reward.calls == 2 * 7 + 2 * 2 * 3
        assert len(shares(trainer, "worker")) == len(shares(trainer, "idler")) == 3

    def test_until_then_there_is_one_in_every_step_of_those_without_effect(self, build):
        reward = Reward(of_first)
        build(reward, max_steps=5, influence_steps=50).train()
        # Both actors in the first step, the idler in the second, in which it is named
        assert reward.calls == 2 * 5 + 2 * 2 + 2

    def test_where_it_never_gets_known_the_tries_end(self, build):
        reward = Reward(lambda a, b: 1.0)
        build(reward, max_steps=20, influence_steps=50).train()
        assert reward.calls == 2 * 20 + 2 * 2 * 16

    def test_evaluation_does_not_measure(self, build):
        reward = Reward(of_both)
        trainer = build(reward, influence_steps=1, kwargs={"eval_dataset": dataset(2)}, num_generations_eval=2)
        trainer.evaluate()
        assert reward.calls == 2

    def test_steps_of_the_environment_do_not_count_it(self, build):
        trainer = build(Reward(of_first), max_steps=2, influence_steps=1)
        trainer.train()
        assert logged(trainer, "env_step")[:2] == [8, 16]


class TestLearning:
    @pytest.mark.parametrize("draws", ["python", "numpy", "torch", "all", "none"])
    @pytest.mark.parametrize("noisy", [False, True], ids=["draws for nothing", "noisy"])
    def test_measuring_changes_no_weight(self, noisy, draws, build):
        """Also where the reward draws random numbers, whether they matter or not."""

        def function(first, second):
            noise = 0.0
            if draws in ("python", "all"):
                noise += random.random()
            if draws in ("numpy", "all"):
                noise += float(np.random.rand())
            if draws in ("torch", "all"):
                noise += torch.rand(1).item()
            return of_both(first, second) + noise * noisy

        weights, rewards = [], []
        for influence_steps in (0, 1):
            trainer = build(Reward(function), rows=None, max_steps=3, influence_steps=influence_steps)
            before = [weights_hash(agent) for agent in trainer.agents]
            trainer.train()
            weights.append([weights_hash(agent) for agent in trainer.agents])
            rewards.append(logged(trainer, "reward"))
            assert len(shares(trainer, "worker")) == 3 * influence_steps
            assert all(old != new for old, new in zip(before, weights[-1], strict=True))
        assert weights[0] == weights[1] and rewards[0] == rewards[1]

    def test_measuring_does_not_change_the_logged_rewards(self, build):
        rewards = []
        for influence_steps in (0, 1):
            trainer = build(Reward(of_first), max_steps=2, influence_steps=influence_steps)
            trainer.train()
            rewards.append([logged(trainer, name) for name in ("reward", "reward_std", "rewards/Reward/mean")])
        assert rewards[0] == rewards[1]
