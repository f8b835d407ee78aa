# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""What each critic-free trainer puts into its losses, against numbers computed by hand."""

import math
import statistics

import pytest
import torch
from tiny import dataset, lm, logged, parameters, record_batches, stub_rollouts, team_args, tok

from trl_multiagent import (
    MAGRPOConfig,
    MAGRPOTrainer,
    MAREINFORCEConfig,
    MAREINFORCETrainer,
    MAReMaxConfig,
    MAReMaxTrainer,
    MARLOOConfig,
    MARLOOTrainer,
)


NAN = float("nan")
TRAINERS = {
    "MAGRPO": (MAGRPOTrainer, MAGRPOConfig),
    "MAREINFORCE": (MAREINFORCETrainer, MAREINFORCEConfig),
    "MARLOO": (MARLOOTrainer, MARLOOConfig),
    "MAReMax": (MAReMaxTrainer, MAReMaxConfig),
}
COMPARING = ["MAGRPO", "MARLOO", "MAReMax"]  # those with a baseline by default


def saying(*numbers):
    """Token ids of the texts `w<number>`."""
    return [[3 + number] for number in numbers]


def number(text):
    return int(text[1:])


@pytest.fixture
def build(tmp_path, monkeypatch):
    """
    A team that answers fixed texts: `said[i][j]` is what actor i answers in row j, by default `w0`, `w1`, ... The
    generation batch is `rows` prompts, one micro-step.
    """

    def build(name, reward_func, rows=1, said=None, num_agents=2, num_generations=4, **options):
        trainer_class, config_class = TRAINERS[name]
        kwargs = {key: options.pop(key) for key in ("external_transition", "eval_dataset") if key in options}
        args = dict(
            num_generations=num_generations,
            per_device_train_batch_size=rows * num_generations,
            shuffle_dataset=False,
            influence_steps=0,
        )
        trainer = trainer_class(
            agents=[lm(seed) for seed in range(num_agents)],
            tokenizer=tok(),
            reward_func=reward_func,
            train_dataset=dataset(rows),
            args=team_args(config_class, tmp_path, **{**args, **options}),
            **kwargs,
        )
        stub_rollouts(monkeypatch, trainer, said or [saying(*range(num_generations))] * num_agents)
        return trainer

    return build


def fixed(values):
    """A reward function that gives the joint responses of each task these values."""

    def fixed_reward(*completions):
        return list(values)

    return fixed_reward


def by_task(values):
    """A reward function that gives the only joint response of each task a value of its own."""

    def task_reward(*completions, batch_items):
        return [values[number(row["gold"])] for row in batch_items]

    return task_reward


def trained(trainer):
    """Advantages of each generation batch and actor, after training."""
    batches = record_batches(trainer)
    trainer.train()
    return [[batch[f"agent_{i}/advantages"].tolist() for i in range(len(trainer.agents))] for batch in batches]


def approx(values):
    return pytest.approx(values, abs=1e-5)


# [1, 2, 3, 6]: mean 3, squared differences 4, 1, 0, 9
DEVIATION = math.sqrt(14 / 3) + 1e-4
BY_DEFAULT = {
    "MAGRPO": [-2 / DEVIATION, -1 / DEVIATION, 0.0, 3 / DEVIATION],
    "MAREINFORCE": [1.0, 2.0, 3.0, 6.0],
    "MARLOO": [-2.6667, -1.3333, 0.0, 4.0],
    "MAReMax": [-5.0, -4.0, -3.0, 0.0],
}


class TestByDefault:
    @pytest.mark.parametrize("name", TRAINERS)
    def test_each_trainer_uses_its_own_estimator(self, name, build):
        (advantages,) = trained(build(name, fixed([1, 2, 3, 6])))
        assert advantages == [pytest.approx(BY_DEFAULT[name], abs=5e-5)] * 2

    @pytest.mark.parametrize("name", TRAINERS)
    def test_each_task_is_compared_within_itself(self, name, build):
        def reward(first, second, batch_items):
            return [[1, 2, 3, 6], [101, 102, 103, 106]][number(batch_items[0]["gold"])]

        (advantages,) = trained(build(name, reward, rows=2))
        shifted = [a + 100 for a in BY_DEFAULT[name]] if name == "MAREINFORCE" else BY_DEFAULT[name]
        assert advantages == [pytest.approx([*BY_DEFAULT[name], *shifted], abs=5e-5)] * 2

    @pytest.mark.parametrize("missing", [None, NAN, float("inf"), float("-inf")])
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("MAGRPO", [0.0, -0.9999, 0.0, 0.9999]),
            ("MAREINFORCE", [0.0, 1.0, 2.0, 3.0]),
            ("MARLOO", [0.0, -1.5, 0.0, 1.5]),
            ("MAReMax", [0.0, -2.0, -1.0, 0.0]),
        ],
    )
    def test_a_missing_or_infinite_reward_is_in_no_baseline(self, name, expected, missing, build):
        """B24"""
        trainer = build(name, fixed([missing, 1, 2, 3]))
        (advantages,) = trained(trainer)
        assert advantages == [approx(expected)] * 2
        assert parameters(trainer.model).isfinite().all()

    @pytest.mark.parametrize("name", TRAINERS)
    def test_a_reward_that_is_left_alone_has_no_baseline(self, name, build):
        """B24"""
        (advantages,) = trained(build(name, fixed([None, None, 5, None])))
        assert advantages == [[0.0, 0.0, 5.0 if name == "MAREINFORCE" else 0.0, 0.0]] * 2

    @pytest.mark.parametrize("name", TRAINERS)
    def test_without_any_reward_nothing_moves(self, name, build):
        """B24"""
        trainer = build(name, fixed([None] * 4), weight_decay=0.1)
        before = parameters(trainer.model)
        (advantages,) = trained(trainer)
        assert advantages == [[0.0] * 4] * 2
        assert torch.equal(parameters(trainer.model), before)

    @pytest.mark.parametrize("weight_decay", [0.0, 0.1])
    @pytest.mark.parametrize("values", [[2.5] * 4, [0.0, 1e-9, -1e-9, 5e-10]])
    @pytest.mark.parametrize("name", COMPARING)
    def test_equal_rewards_move_nothing(self, name, values, weight_decay, build):
        """B23"""
        trainer = build(name, fixed(values), weight_decay=weight_decay)
        before = parameters(trainer.model)
        (advantages,) = trained(trainer)
        assert advantages == [[0.0] * 4] * 2
        assert torch.equal(parameters(trainer.model), before)

    @pytest.mark.parametrize("name", TRAINERS)
    def test_different_rewards_move_every_actor(self, name, build):
        trainer = build(name, fixed([1, 2, 3, 6]))
        before = [parameters(actor) for actor in trainer.agents]
        trainer.train()
        assert not any(torch.equal(parameters(a), b) for a, b in zip(trainer.agents, before, strict=True))

    def test_without_a_baseline_equal_rewards_teach(self, build):
        trainer = build("MAREINFORCE", fixed([2.5] * 4))
        before = parameters(trainer.model)
        (advantages,) = trained(trainer)
        assert advantages == [[2.5] * 4] * 2
        assert not torch.equal(parameters(trainer.model), before)

    @pytest.mark.parametrize("name", TRAINERS)
    def test_actors_with_rewards_of_their_own_are_compared_with_themselves(self, name, build):
        """B26"""
        (advantages,) = trained(build(name, fixed([[1, 2, 3, 6], [0, 0, 0, 0]])))
        assert advantages == [pytest.approx(BY_DEFAULT[name], abs=5e-5), [0.0] * 4]

    @pytest.mark.parametrize("name", TRAINERS)
    def test_every_joint_response_is_counted(self, name, build):
        trainer = build(name, fixed([1, 2, 3, 6]), rows=2, max_steps=2)
        trainer.train()
        assert logged(trainer, "env_step")[:2] == [8, 16]
        assert trainer.env_step == 16

    @pytest.mark.parametrize("name", TRAINERS)
    def test_the_size_of_the_advantages_is_logged(self, name, build):
        trainer = build(name, fixed([1, 2, 3, 6]))
        trainer.train()
        expected = statistics.fmean(a * a for a in BY_DEFAULT[name])
        for actor in range(2):
            assert logged(trainer, f"agent_{actor}/advantage_second_moment") == [pytest.approx(expected, rel=1e-3)]


class TestScaling:
    @pytest.mark.parametrize("name", COMPARING)
    def test_by_the_groups_deviation_it_divides_and_does_not_centre(self, name, build):
        unscaled = {"MAGRPO": [-2, -1, 0, 3], "MARLOO": [-8 / 3, -4 / 3, 0, 4], "MAReMax": [-5, -4, -3, 0]}[name]
        (advantages,) = trained(build(name, fixed([1, 2, 3, 6]), scale_rewards="group"))
        assert advantages == [approx([a / DEVIATION for a in unscaled])] * 2
        (advantages,) = trained(build(name, fixed([1, 2, 3, 6]), scale_rewards="none"))
        assert advantages == [approx(unscaled)] * 2

    @pytest.mark.parametrize("name", COMPARING)
    def test_by_the_batchs_deviation_it_is_the_same_for_all_tasks(self, name, build):
        def reward(first, second, batch_items):
            return [[1, 3], [10, 20]][number(batch_items[0]["gold"])]

        deviation = statistics.stdev([1, 3, 10, 20]) + 1e-4
        unscaled = {"MAGRPO": [-1, 1, -5, 5], "MARLOO": [-2, 2, -10, 10], "MAReMax": [-2, 0, -10, 0]}[name]
        (advantages,) = trained(build(name, reward, rows=2, num_generations=2, scale_rewards="batch"))
        assert advantages == [approx([a / deviation for a in unscaled])] * 2

    @pytest.mark.parametrize("scale_rewards", ["group", "batch"])
    @pytest.mark.parametrize(
        "options",
        [
            {"name": "MAREINFORCE"},
            {"name": "MAGRPO", "advantage_groups": "role"},
            {"name": "MAReMax", "remax_baseline": "greedy"},
        ],
        ids=["no baseline", "role", "greedy"],
    )
    def test_without_a_baseline_of_the_group_it_is_refused(self, options, scale_rewards, build):
        with pytest.raises(ValueError, match=f"scale_rewards='{scale_rewards}'"):
            build(reward_func=fixed([1, 2, 3, 6]), scale_rewards=scale_rewards, **options)

    @pytest.mark.parametrize("name", ["MAREINFORCE", "MARLOO", "MAReMax"])
    def test_what_would_turn_an_estimator_into_another_is_refused(self, name, build):
        with pytest.raises(ValueError, match="normalize_then_sum"):
            build(name, fixed([1, 2, 3, 6]), multi_objective_aggregation="normalize_then_sum")


class TestOneSample:
    @pytest.mark.parametrize("options", [{}, {"advantage_groups": "role"}], ids=["no baseline", "role"])
    def test_without_a_group_it_teaches(self, options, build):
        trainer = build("MAREINFORCE", by_task([1, 2, 3, 6]), rows=4, num_generations=1, **options)
        before = parameters(trainer.model)
        trainer.train()
        assert not torch.equal(parameters(trainer.model), before)
        assert trainer.env_step == 4

    @pytest.mark.parametrize("name", COMPARING)
    def test_with_a_role_baseline_it_teaches_in_every_trainer(self, name, build):
        trainer = build(
            name,
            by_task([1, 2, 3, 6]),
            rows=4,
            num_generations=1,
            advantage_groups="role",
            scale_rewards="none",
        )
        before = parameters(trainer.model)
        trainer.train()
        assert not torch.equal(parameters(trainer.model), before)

    def test_without_reward_nothing_is_taught(self, build):
        trainer = build("MAREINFORCE", by_task([0] * 4), rows=4, num_generations=1)
        before = parameters(trainer.model)
        trainer.train()
        assert torch.equal(parameters(trainer.model), before)

    @pytest.mark.parametrize("name", COMPARING)
    def test_a_group_of_one_is_an_error_that_names_the_option(self, name, build):
        """B23"""
        with pytest.raises(ValueError, match="num_generations=1"):
            build(name, fixed([1]), num_generations=1)


TABLE = [[3.0, -1.0, 4.0], [1.0, 5.0, -9.0], [2.0, 6.0, 5.0]]
GRAND = sum(map(sum, TABLE)) / 9
ROWS = [sum(row) / 3 - GRAND for row in TABLE]
COLUMNS = [sum(row[j] for row in TABLE) / 3 - GRAND for j in range(3)]


class Counted:
    """A reward of the numbers that the actors said; remembers what it was asked."""

    __name__ = "counted"

    def __init__(self, value):
        self.value = value
        self.asked = []

    def __call__(self, *completions):
        joints = [tuple(map(number, joint)) for joint in zip(*completions, strict=True)]
        self.asked += joints
        return [self.value(*joint) for joint in joints]


def from_table(i, j):
    return TABLE[i][j]


class TestCrossed:
    """Samples form joint responses in all combinations."""

    def test_two_actors_get_row_and_column_means_minus_the_grand_mean(self, build):
        reward = Counted(from_table)
        trainer = build("MAGRPO", reward, num_generations=3, joint_mode="cross", scale_rewards="none")
        (advantages,) = trained(trainer)
        assert advantages == [pytest.approx(ROWS, abs=1e-6), pytest.approx(COLUMNS, abs=1e-6)]
        assert sorted(reward.asked) == [(i, j) for i in range(3) for j in range(3)]
        assert logged(trainer, "env_step")[0] == trainer.env_step == 9

    def test_leave_one_out_is_three_halves_of_it(self, build):
        (advantages,) = trained(build("MARLOO", Counted(from_table), num_generations=3, joint_mode="cross"))
        assert advantages == [approx([1.5 * a for a in ROWS]), approx([1.5 * a for a in COLUMNS])]

    def test_the_maximum_is_that_of_the_same_teammates(self, build):
        (advantages,) = trained(build("MAReMax", Counted(from_table), num_generations=3, joint_mode="cross"))
        best = [max(row[j] for row in TABLE) for j in range(3)]
        first = [statistics.fmean(TABLE[i][j] - best[j] for j in range(3)) for i in range(3)]
        second = [statistics.fmean(TABLE[i][j] - max(TABLE[i]) for i in range(3)) for j in range(3)]
        assert advantages == [approx(first), approx(second)]

    def test_without_a_baseline_it_is_the_mean_over_the_teammates(self, build):
        (advantages,) = trained(build("MAREINFORCE", Counted(from_table), num_generations=3, joint_mode="cross"))
        assert advantages == [approx([a + GRAND for a in ROWS]), approx([a + GRAND for a in COLUMNS])]

    def test_the_deviation_of_the_group_is_that_of_the_samples_means(self, build):
        (advantages,) = trained(
            build("MAGRPO", Counted(from_table), num_generations=3, joint_mode="cross", scale_rewards="group")
        )
        assert advantages == [
            approx([a / (statistics.stdev(ROWS) + 1e-4) for a in ROWS]),
            approx([a / (statistics.stdev(COLUMNS) + 1e-4) for a in COLUMNS]),
        ]

    def test_a_missing_reward_is_left_out(self, build):
        # Only (0, 0) is missing: its column for the first actor is [1, 2], its row for the second [-1, 4]
        reward = Counted(lambda i, j: None if i == j == 0 else TABLE[i][j])
        (advantages,) = trained(build("MAGRPO", reward, num_generations=3, joint_mode="cross", scale_rewards="none"))
        columns = [[NAN, 1.0, 2.0], [-1.0, 5.0, 6.0], [4.0, -9.0, 5.0]]
        rows = [[NAN, -1.0, 4.0], [1.0, 5.0, -9.0], [2.0, 6.0, 5.0]]
        for own, lines in zip(advantages, [columns, rows], strict=True):
            expected = []
            for choice in range(3):
                known = [line for line in lines if not math.isnan(line[choice])]
                means = [statistics.fmean(v for v in line if not math.isnan(v)) for line in known]
                expected.append(statistics.fmean(line[choice] - mean for line, mean in zip(known, means, strict=True)))
            assert own == approx(expected)

    def test_as_many_teammates_as_there_are_equal_all(self, build):
        reward = Counted(from_table)
        trainer = build("MAGRPO", reward, num_generations=3, joint_mode="cross", cross_samples=3, scale_rewards="none")
        (advantages,) = trained(trainer)
        assert advantages == [approx(ROWS), approx(COLUMNS)]
        assert len(reward.asked) == trainer.env_step == 9

    @pytest.mark.parametrize(("num_agents", "cross_samples"), [(2, 1), (2, 2), (3, 1), (3, 2)])
    def test_sampled_teammates_are_the_same_for_a_whole_group(self, num_agents, cross_samples, build):
        """In a reward that is a sum, an actor's part minus its mean: teammates cancel, whoever was drawn."""
        weights = [1.0, 10.0, 100.0]
        reward = Counted(lambda *said: sum(weight * choice**2 for weight, choice in zip(weights, said, strict=False)))
        trainer = build(
            "MAGRPO",
            reward,
            rows=2,
            num_agents=num_agents,
            num_generations=3,
            joint_mode="cross",
            cross_samples=cross_samples,
            scale_rewards="none",
        )
        (advantages,) = trained(trainer)
        own = [-5 / 3, -2 / 3, 7 / 3]  # 0, 1, 4 minus 5/3
        for actor, result in enumerate(advantages):
            assert result == pytest.approx([weights[actor] * a for a in own + own], abs=1e-4)
        evaluations = len(reward.asked)
        assert evaluations == trainer.env_step == logged(trainer, "env_step")[0]
        assert evaluations <= 2 * min(num_agents * 3 * cross_samples, 3**num_agents)

    def test_three_actors_ask_for_every_combination_once(self, build):
        reward = Counted(lambda i, j, k: i * j + k)
        trainer = build(
            "MAGRPO",
            reward,
            rows=2,
            num_agents=3,
            num_generations=3,
            joint_mode="cross",
            scale_rewards="none",
            max_steps=2,
        )
        advantages = trained(trainer)
        # i * 1 + 1, 1 * j + 1 and 1 + k on average, each minus 2
        assert advantages == [[approx([-1.0, 0.0, 1.0] * 2)] * 3] * 2
        assert len(reward.asked) == 2 * 54 and len(set(reward.asked)) == 27
        assert logged(trainer, "env_step")[:2] == [54, 108]

    @pytest.mark.parametrize("name", COMPARING)
    def test_an_actor_without_influence_learns_nothing(self, name, build):
        trainer = build(name, Counted(lambda i, j: float(i)), num_generations=3, joint_mode="cross", weight_decay=0.1)
        before = [parameters(actor) for actor in trainer.agents]
        ((first, second),) = trained(trainer)
        assert any(first) and second == [0.0] * 3
        assert not torch.equal(parameters(trainer.agents[0]), before[0])
        assert torch.equal(parameters(trainer.agents[1]), before[1])

    @pytest.mark.parametrize("scale_rewards", ["none", "group", "batch"])
    @pytest.mark.parametrize("name", ["MAGRPO", "MARLOO"])
    def test_combinations_that_cancel_each_other_teach_nothing(self, name, scale_rewards, build):
        """B23: 0.7 where the choices differ, 0.1 where they do not, so that no choice is better than the other."""
        reward = Counted(lambda i, j: 0.7 if (i + j) % 2 else 0.1)
        trainer = build(
            name, reward, joint_mode="cross", scale_rewards=scale_rewards, weight_decay=0.1, beta=0.0, rows=2
        )
        before = [parameters(actor) for actor in trainer.agents]
        (advantages,) = trained(trainer)
        assert advantages == [[0.0] * 8] * 2
        for actor, old in zip(trainer.agents, before, strict=True):
            assert torch.equal(parameters(actor), old)

    def test_aligned_asks_for_equal_numbers_only(self, build):
        reward = Counted(from_table)
        trainer = build("MAGRPO", reward, num_generations=3, scale_rewards="none")
        (advantages,) = trained(trainer)
        # 3, 5, 5 minus 13/3
        assert advantages == [approx([-4 / 3, 2 / 3, 2 / 3])] * 2
        assert reward.asked == [(0, 0), (1, 1), (2, 2)] and trainer.env_step == 3


def answers(trainer, actor, sampled, greedy):
    """What an actor answers: `sampled` in turn, and one text when it takes its most probable tokens."""

    def say(prompt_ids):
        if trainer.agent_trainers[actor].generation_config.do_sample:
            return [sampled[row % len(sampled)] for row in range(len(prompt_ids))]
        return [greedy] * len(prompt_ids)

    return say


class TestGreedyBaseline:
    @pytest.fixture
    def build_greedy(self, build, monkeypatch):
        def build_greedy(reward, **options):
            trainer = build("MAReMax", reward, remax_baseline="greedy", **options)
            first = answers(trainer, 0, saying(1, 2, 3, 6), *saying(4))
            second = answers(trainer, 1, saying(0), *saying(1))
            stub_rollouts(monkeypatch, trainer, [first, second])
            return trainer

        return build_greedy

    def test_it_is_the_reward_of_one_greedy_joint_response(self, build_greedy):
        reward = Counted(lambda i, j: i + j)
        trainer = build_greedy(reward)
        (advantages,) = trained(trainer)
        assert reward.asked == [(1, 0), (2, 0), (3, 0), (6, 0), (4, 1)]
        assert advantages == [[-4.0, -3.0, -2.0, 1.0]] * 2  # minus 5

    def test_each_task_takes_one_more_reward_that_is_counted(self, build_greedy):
        reward = Counted(lambda i, j: i + j)
        trainer = build_greedy(reward, rows=2, max_steps=2)
        advantages = trained(trainer)
        assert advantages == [[[-4.0, -3.0, -2.0, 1.0] * 2] * 2] * 2
        assert reward.asked.count((4, 1)) == 4
        assert logged(trainer, "env_step")[:2] == [10, 20] and trainer.env_step == len(reward.asked) == 20

    def test_each_task_has_a_baseline_of_its_own(self, build_greedy):
        def reward(first, second, batch_items):
            return [number(text) * (1 + number(row["gold"])) for text, row in zip(first, batch_items, strict=True)]

        (advantages,) = trained(build_greedy(reward, rows=2))
        assert advantages == [[-3.0, -2.0, -1.0, 2.0, -6.0, -4.0, -2.0, 4.0]] * 2

    def test_each_actor_has_a_baseline_of_its_own_rewards(self, build_greedy):
        def reward(first, second):
            return [[number(text) for text in first], [10 * number(text) for text in second]]

        (advantages,) = trained(build_greedy(reward))
        assert advantages == [[-3.0, -2.0, -1.0, 2.0], [-10.0] * 4]

    def test_a_missing_greedy_reward_teaches_nothing(self, build_greedy):
        """B24"""
        (advantages,) = trained(build_greedy(Counted(lambda i, j: None if i == 4 else i)))
        assert advantages == [[0.0] * 4] * 2

    def test_a_missing_reward_has_advantage_zero(self, build_greedy):
        """B24"""
        (advantages,) = trained(build_greedy(Counted(lambda i, j: None if i == 2 else i)))
        assert advantages == [[-3.0, 0.0, -1.0, 2.0]] * 2

    def test_one_sample_is_enough(self, build_greedy):
        trainer = build_greedy(Counted(lambda i, j: i), rows=4, num_generations=1)
        (advantages,) = trained(trainer)
        assert advantages == [[-3.0, -2.0, -1.0, 2.0]] * 2
        assert trainer.env_step == 8

    def test_the_metrics_are_those_of_what_is_trained(self, build_greedy):
        trainer = build_greedy(Counted(lambda i, j: i))
        trainer.train()
        assert logged(trainer, "reward") == [3.0]
        assert logged(trainer, "agent_0/completions/mean_length") == [1.0]

    def test_sampling_goes_on_afterwards_as_before(self, build_greedy):
        trainer = build_greedy(Counted(lambda i, j: i + j))
        before = [agent.generation_config.to_dict() for agent in trainer.agent_trainers]
        trainer.train()
        assert [agent.generation_config.to_dict() for agent in trainer.agent_trainers] == before

    def test_over_two_turns_it_is_the_return_from_the_same_turn_on(self, build_greedy):
        def reward(first, second, turn):
            return [turn * number(text) for text in first]

        trainer = build_greedy(
            reward,
            num_turns=2,
            rollout_mode="chain",
            discount=0.5,
            external_transition=lambda prompt, agent_completions, num_agents: ["w9"] * num_agents,
        )
        (advantages,) = trained(trainer)
        # Turn 1: 2 i against 2 * 4, turn 2: 2 i against 2 * 4
        assert advantages == [[-6.0, -4.0, -2.0, 4.0, -6.0, -4.0, -2.0, 4.0]] * 2
        assert trainer.env_step == 8 + 2

    def test_with_combinations_it_is_compared_with_the_mean_over_the_teammates(self, build, monkeypatch):
        reward = Counted(lambda i, j: 10 * i + j)
        trainer = build("MAReMax", reward, remax_baseline="greedy", num_generations=2, joint_mode="cross")
        first = answers(trainer, 0, saying(1, 2), *saying(3))
        second = answers(trainer, 1, saying(4, 8), *saying(5))
        stub_rollouts(monkeypatch, trainer, [first, second])
        (advantages,) = trained(trainer)
        # Means 16 and 26, then 19 and 23, minus 35
        assert advantages == [[-19.0, -9.0], [-16.0, -12.0]]
        assert reward.asked[-1] == (3, 5) and trainer.env_step == len(reward.asked) == 5

    def test_an_evaluation_takes_no_greedy_response(self, build_greedy):
        reward = Counted(lambda i, j: i)
        trainer = build_greedy(reward, eval_dataset=dataset(1))
        assert trainer.evaluate()["eval_reward"] == 3.0
        assert reward.asked == [(1, 0), (2, 0), (3, 0), (6, 0)] and trainer.env_step == 0

    def test_it_takes_the_most_probable_tokens_of_a_real_model(self, tmp_path):
        asked = []

        def reward(completions):
            asked.append(list(completions))
            return [float(len(text)) for text in completions]

        trainer = MAReMaxTrainer(
            agents=[lm(0)],
            tokenizer=tok(),
            reward_func=reward,
            train_dataset=dataset(1),
            args=team_args(
                MAReMaxConfig, tmp_path, remax_baseline="greedy", num_generations=4, max_completion_length=3
            ),
        )
        ids = trainer.tokenizers[0](dataset(1)[0]["prompt"])["input_ids"]
        model, said = trainer.agents[0], []
        with torch.no_grad():
            while len(said) < 3 and said[-1:] != [2]:
                said.append(model(torch.tensor([ids + said])).logits[0, -1].argmax().item())
        trainer.train()
        assert asked[-1] == [trainer.tokenizers[0].decode(said, skip_special_tokens=True)]


class TestRoleBaselines:
    """Returns against a running mean of each actor's own."""

    OPTIONS = dict(rows=4, num_generations=1, advantage_groups="role", role_baseline_decay=0.5)
    # The mean before each return: 0, 0.5, 1.25, 2.125; then 4.0625, 2.53125, 2.265625, 2.6328125
    FIRST = [1.0, 1.5, 1.75, 3.875]
    SECOND = [-3.0625, -0.53125, 0.734375, 3.3671875]

    def test_the_mean_is_carried_from_step_to_step(self, build):
        trainer = build("MAREINFORCE", by_task([1, 2, 3, 6]), max_steps=2, **self.OPTIONS)
        assert trained(trainer) == [[self.FIRST] * 2, [self.SECOND] * 2]
        for actor in range(2):
            assert logged(trainer, f"agent_{actor}/role_baseline") == [4.0625, 4.31640625]

    def test_the_samples_of_a_task_count_one_after_the_other(self, build):
        options = {**self.OPTIONS, "rows": 1, "num_generations": 4}
        assert trained(build("MAREINFORCE", fixed([1, 2, 3, 6]), **options)) == [[self.FIRST] * 2]

    def test_by_default_the_mean_keeps_95_percent(self, build):
        options = {**self.OPTIONS}
        del options["role_baseline_decay"]
        ((advantages, _),) = trained(build("MAREINFORCE", by_task([1, 2, 3, 6]), **options))
        # Means 0, 0.05, 0.1475, 0.290125
        assert advantages == approx([1.0, 1.95, 2.8525, 5.709875])

    def test_each_actor_has_a_mean_of_its_own(self, build):
        def reward(first, second, batch_items):
            own = number(batch_items[0]["gold"])
            return [[[1, 2, 3, 6][own]], [[0, 0, 0, 8][own]]]

        ((first, second),) = trained(build("MAREINFORCE", reward, **self.OPTIONS))
        assert first == self.FIRST and second == [0.0, 0.0, 0.0, 8.0]

    def test_each_game_has_a_mean_of_its_own(self, build):
        trainer = build("MAREINFORCE", by_task([1, 2, 3, 6]), max_steps=2, role_baseline_column="gold", **self.OPTIONS)
        assert trained(trainer) == [[[1.0, 2.0, 3.0, 6.0]] * 2, [[0.5, 1.0, 1.5, 3.0]] * 2]

    def test_a_game_that_is_no_column_is_an_error_that_names_the_columns(self, build):
        with pytest.raises(ValueError, match=r"role_baseline_column='game' .*gold.*prompt"):
            build("MAREINFORCE", by_task([1, 2, 3, 6]), role_baseline_column="game", **self.OPTIONS)

    def test_a_missing_reward_leaves_the_mean_as_it_is(self, build):
        """B24"""
        ((advantages, _),) = trained(build("MAREINFORCE", by_task([1, None, 2, 4]), **self.OPTIONS))
        # Means 0, 0.5, 0.5, 1.25
        assert advantages == [1.0, 0.0, 1.5, 2.75]

    def test_an_evaluation_leaves_the_mean_as_it_is(self, build):
        trainer = build("MAREINFORCE", by_task([1, 2, 3, 6]), eval_dataset=dataset(4), max_steps=1, **self.OPTIONS)
        trainer.train()
        before = dict(trainer._role_baselines)
        trainer.evaluate()
        assert set(before.values()) == {4.0625}
        assert trainer._role_baselines == before and trainer.env_step == 4

    def test_a_resumed_run_goes_on_with_the_saved_means(self, build, tmp_path):
        """B06"""
        options = {**self.OPTIONS, "save_strategy": "steps", "save_steps": 2, "role_baseline_decay": 0.7}
        whole = build("MAREINFORCE", by_task([1, 2, 3, 6]), max_steps=4, **options)
        expected = trained(whole)
        resumed = build("MAREINFORCE", by_task([1, 2, 3, 6]), max_steps=4, **options)
        batches = record_batches(resumed)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert len(batches) == 2
        for batch, own in zip(batches, expected[2:], strict=True):
            assert [batch[f"agent_{actor}/advantages"].tolist() for actor in range(2)] == own
        assert resumed._role_baselines == whole._role_baselines and len(whole._role_baselines) == 2
        assert resumed.env_step == whole.env_step == 16
        assert logged(resumed, "env_step") == logged(whole, "env_step")


class TestAllThatAnActorSaid:
    """Returns against those of all turns of the same actor and task."""

    OPTIONS = dict(
        advantage_groups="actor",
        scale_rewards="none",
        num_turns=2,
        rollout_mode="chain",
        num_generations=2,
        external_transition=lambda prompt, agent_completions, num_agents: ["w9"] * num_agents,
    )

    def test_turns_are_compared_with_each_other(self, build):
        def reward(first, second, turn):
            return [[1, 2], [5, 8]][turn - 1]

        # Returns 6 and 10, then 5 and 8: the mean is (5.5 + 9) / 2 = 7.25
        (advantages,) = trained(build("MAGRPO", reward, **self.OPTIONS))
        assert advantages == [[-1.25, 2.75, -2.25, 0.75]] * 2

    def test_a_trajectory_that_ended_early_counts_as_much(self, build):
        # Above 4 it ends: returns 5, then 1 + 2 = 3 and 2. The mean is (5 + 2.5) / 2 = 3.75
        def reward(first, second, turn):
            return [5, 1] if turn == 1 else [2]

        trainer = build("MAGRPO", reward, early_termination_threshold=4.0, **self.OPTIONS)
        (advantages,) = trained(trainer)
        assert [own[:3] for own in advantages] == [[1.25, -0.75, -1.75]] * 2
        assert not any(any(own[3:]) for own in advantages) and trainer.env_step == 3

    def test_a_reward_of_the_last_turn_alone_teaches(self, build):
        """B24: the turns without a reward take nothing from those that have one."""

        def reward(first, second, turn):
            return [None, None] if turn == 1 else [1, 3]

        (advantages,) = trained(build("MAGRPO", reward, **self.OPTIONS))
        assert advantages == [[0.0, 0.0, -1.0, 1.0]] * 2

    def test_a_trajectory_counts_as_much_where_one_of_its_rewards_is_missing(self, build):
        """B24"""

        def reward(first, second, turn):
            return [None, 1] if turn == 1 else [4, 1]

        # Trajectories [missing, 4] and [2, 1]: the mean is (4 + 1.5) / 2 = 2.75
        (advantages,) = trained(build("MAGRPO", reward, **self.OPTIONS))
        assert advantages == [[0.0, -0.75, 1.25, -1.75]] * 2
