# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Shares of the reward's variance, by hand on tables."""

import itertools
import json
import logging
import random

import pytest
import torch
from accelerate import Accelerator

from trl_multiagent.rewards import JointReward
from trl_multiagent.rollouts import influence
from trl_multiagent.rollouts.batch import JointBatch
from trl_multiagent.rollouts.influence import InfluenceMonitor
from trl_multiagent.rollouts.interaction import Branch, Turn
from trl_multiagent.rollouts.pairing import aligned, crossed
from trl_multiagent.rollouts.transition import History


class Table:
    """A reward `table[a][b]` of the numbers that the actors say; keeps what it was asked."""

    def __init__(self, table):
        self.table, self.asked = table, []

    def __call__(self, first, second, batch_items):
        pairs = [(int(a), int(b)) for a, b in zip(first, second, strict=True)]
        self.asked.append((pairs, [item["task"] for item in batch_items]))
        return [self.table[a][b] for a, b in pairs]


def monitor(table, every=1, watched=(0, 1)):
    reward = JointReward(Table(table), 2)
    return InfluenceMonitor(["left", "right"], watched, reward, lambda r: r.sum(-1), Accelerator(cpu=True), every)


def measured_by(monitor, batch, crossed=False):
    """The shares that a training batch brings, none if it is not due."""
    agents = monitor.due(crossed)
    return monitor.measure(batch, crossed, agents) if agents else {}


def batch(table, said, cross=False, group=2):
    """A batch in which actor i answers `said[i]`; rewards come from the table."""
    samples = len(said[0])
    tasks = [sample // group for sample in range(samples)]
    contexts = [list(range(start, start + group)) for start in range(0, samples, group)]
    pairing = crossed(contexts, 2, None, "seed") if cross else aligned(samples, 2)
    rewards = torch.tensor([table[said[0][a]][said[1][b]] for a, b in pairing.members.tolist()], dtype=torch.float)
    rewards = rewards.expand(2, -1)
    texts = [[str(number) for number in numbers] for numbers in said]
    turn = Turn(
        number=1,
        tasks=tasks,
        contexts=tasks,
        counts=[samples],
        process_index=0,
        pairing=pairing,
        parents=torch.full((len(pairing.members),), -1),
        branches=[Branch({"task": task}, History.empty(2)) for task in tasks],
        prompts=[["?"] * samples] * 2,
        completions=texts,
        rewards=rewards.unsqueeze(-1),
    )
    return JointBatch([turn], [rewards], [rewards], samples, group, "train")


def warned(caplog):
    return [record.getMessage() for record in caplog.records]


ADDITIVE = [[0.0, 2.0], [1.0, 3.0]]  # a + 2 b
LEFT_ALONE = [[0.0, 0.0], [2.0, 2.0]]
BOTH_NEEDED = [[0.0, 0.0], [0.0, 1.0]]


class TestExchanged:
    def test_shares_of_an_additive_table(self):
        # Said (0, 0) and (1, 1): rewards 0 and 3, variance 4.5. With the left answers exchanged 1 and 2: each reward
        # moves by 1, so the effect is 1/2. With the right ones 2 and 1: each moves by 2, the effect is 2.
        shares = measured_by(monitor(ADDITIVE), batch(ADDITIVE, [[0, 1], [0, 1]]))
        assert shares == pytest.approx({0: 0.5 / 4.5, 1: 2 / 4.5})

    def test_one_that_decides_alone_has_all_and_the_other_nothing(self):
        shares = measured_by(monitor(LEFT_ALONE), batch(LEFT_ALONE, [[0, 1], [0, 1]]))
        assert shares == {0: 1.0, 1: 0.0}

    def test_actors_that_act_together_have_more_than_one_in_sum(self):
        # Rewards 0 and 1, variance 1/2; with the answers of either exchanged both are 0
        shares = measured_by(monitor(BOTH_NEEDED), batch(BOTH_NEEDED, [[0, 1], [0, 1]]))
        assert shares == pytest.approx({0: 0.5, 1: 0.5})

    def test_three_samples_move_on_by_one(self):
        table = [[0.0] * 3, [1.0] * 3, [5.0] * 3]
        measured = monitor(table)
        shares = measured_by(measured, batch(table, [[0, 1, 2], [2, 1, 0]], group=3))
        # 0, 1, 5 become 1, 5, 0: (1 + 16 + 25) / 2 / 3 = 7, and their variance is 7
        assert shares == pytest.approx({0: 1.0, 1: 0.0})
        (left, right) = measured.reward.funcs[0].asked
        assert left == ([(1, 2), (2, 1), (0, 0)], [0, 0, 0])
        assert right == ([(0, 1), (1, 0), (2, 2)], [0, 0, 0])

    @pytest.mark.parametrize(("tasks", "asked"), [(1, 1), (2, 2), (4, 4), (6, 4)])
    def test_up_to_four_tasks_are_asked_again_for_each_actor(self, tasks, asked):
        measured = monitor(ADDITIVE)
        measured_by(measured, batch(ADDITIVE, [[0, 1] * tasks, [0, 1] * tasks]))
        again = [[task, task] for task in range(asked)]
        assert [of_tasks for _, of_tasks in measured.reward.funcs[0].asked] == again * 2

    def test_a_share_is_that_of_all_measured_tasks(self):
        # Rewards 0, 3 and 2, 1: variances 9/2 and 1/2. Left answers exchanged: each reward moves by 1, effect 1/2.
        # Right answers exchanged: each moves by 2, effect 2.
        shares = measured_by(monitor(ADDITIVE), batch(ADDITIVE, [[0, 1, 0, 1], [0, 1, 1, 0]]))
        assert shares == pytest.approx({0: 0.5 / 2.5, 1: 2 / 2.5})

    def test_a_running_share_weighs_what_was_measured_before_by_nine_tenths(self):
        measured = monitor(ADDITIVE)
        measured_by(measured, batch(ADDITIVE, [[0, 1], [0, 1]]))
        # Said (0, 1) and (1, 0): rewards 2 and 1, variance 1/2; exchanged on the left 3 and 0, on the right 0 and 3
        shares = measured_by(measured, batch(ADDITIVE, [[0, 1], [1, 0]]))
        variance = 0.9 * 4.5 + 0.5
        assert shares == pytest.approx({0: (0.9 * 0.5 + 0.5) / variance, 1: (0.9 * 2 + 2) / variance})

    @pytest.mark.parametrize("group", [1, 2])
    def test_without_alternatives_or_spread_nothing_is_known(self, group, caplog):
        """B23: one sample of each task, or equal rewards."""
        shares = measured_by(monitor(ADDITIVE), batch(ADDITIVE, [[1, 1], [0, 0]], group=group))
        assert shares == {} and not warned(caplog)

    def test_missing_rewards_are_left_out(self):
        """B24: of three exchanges those with a reward before and after count."""
        table = [[0.0] * 3, [None] * 3, [4.0] * 3]
        numbers = [[0.0] * 3, [float("nan")] * 3, [4.0] * 3]
        shares = measured_by(monitor(table), batch(numbers, [[0, 1, 2], [0, 1, 2]], group=3))
        # Left 0, -, 4 become -, 4, 0: one pair, 4 against 0, effect 8; the variance of 0 and 4 is 8
        assert shares == pytest.approx({0: 1.0, 1: 0.0})


class TestCrossed:
    def test_no_reward_is_asked_for(self):
        measured = monitor(ADDITIVE)
        measured_by(measured, batch(ADDITIVE, [[0, 1], [0, 1]], cross=True), crossed=True)
        assert measured.reward.funcs[0].asked == []

    def test_one_that_decides_alone_has_all_and_the_other_nothing(self):
        shares = measured_by(monitor(LEFT_ALONE), batch(LEFT_ALONE, [[0, 1], [0, 1]], cross=True), crossed=True)
        assert shares == pytest.approx({0: 1.0, 1: 0.0})

    def test_shares_of_an_additive_table_sum_to_one(self):
        # Variance over own answers 1/2 and 2; joint responses that differ in both are 3 or 1 apart: (9 + 1) / 2 / 2
        shares = measured_by(monitor(ADDITIVE), batch(ADDITIVE, [[0, 1], [0, 1]], cross=True), crossed=True)
        assert shares == pytest.approx({0: 0.2, 1: 0.8})

    def test_shares_stand_to_each_other_as_the_effects(self):
        shares = measured_by(monitor(ADDITIVE), batch(ADDITIVE, [[0, 1], [0, 1]], cross=True), crossed=True)
        assert shares[1] / shares[0] == pytest.approx(4.0)  # effects 2 and 1/2

    def test_all_tasks_count(self):
        # The second task is flat for the right actor as well, so its effects are those of the first, halved
        flat = [[0.0, 2.0, 7.0], [1.0, 3.0, 7.0], [7.0, 7.0, 7.0]]
        one = measured_by(monitor(flat), batch(flat, [[0, 1], [0, 1]], cross=True), crossed=True)
        two = measured_by(monitor(flat), batch(flat, [[0, 1, 2, 2], [0, 1, 2, 2]], cross=True), crossed=True)
        assert two == pytest.approx(one)

    def test_it_is_measured_in_every_batch_even_if_switched_off(self):
        measured = monitor(ADDITIVE, every=0)
        for _ in range(3):
            assert set(measured_by(measured, batch(ADDITIVE, [[0, 1], [0, 1]], cross=True), crossed=True)) == {0, 1}


class TestWhen:
    def test_switched_off_nothing_is_measured(self):
        measured = monitor(ADDITIVE, every=0)
        assert [measured.due(crossed=False) for _ in range(20)] == [[]] * 20
        assert measured_by(measured, batch(ADDITIVE, [[0, 1], [0, 1]])) == {}
        assert measured.reward.funcs[0].asked == []

    def test_once_all_act_every_so_many_batches_are_measured(self):
        measured = monitor(ADDITIVE, every=4)
        counts = [len(measured_by(measured, batch(ADDITIVE, [[0, 1], [0, 1]]))) for _ in range(9)]
        assert counts == [2, 0, 0, 0, 2, 0, 0, 0, 2]

    def test_in_the_first_sixteen_batches_those_without_effect_so_far_are_measured_in_between(self):
        measured, seen = monitor(LEFT_ALONE, every=10), []
        for _ in range(31):
            agents = measured.due(crossed=False)
            seen.append(agents)
            measured.measure(batch(LEFT_ALONE, [[0, 1], [0, 1]]), False, agents)
        both, right, none = [0, 1], [1], []
        assert seen == [both, *[right] * 9, both, *[right] * 5, *[none] * 4, both, *[none] * 9, both]
        assert len(measured.reward.funcs[0].asked) == 4 * 2 + 14

    def test_one_that_was_named_is_not_measured_in_between(self, monkeypatch):
        monkeypatch.setattr(influence, "ENOUGH_TASKS", 3)
        measured = monitor(LEFT_ALONE, every=10)
        counts = [len(measured_by(measured, batch(LEFT_ALONE, [[0, 1], [0, 1]]))) for _ in range(12)]
        assert counts == [2, 1, 1, *[0] * 7, 2, 0]

    def test_an_effect_in_one_batch_is_enough_to_act(self):
        measured, later = monitor(LEFT_ALONE, every=100), JointReward(Table(ADDITIVE), 2)
        for number in range(6):
            measured.reward = later if number == 2 else measured.reward
            measured_by(measured, batch(ADDITIVE if number == 2 else LEFT_ALONE, [[0, 1], [0, 1]]))
        assert measured.due(crossed=False) == []

    def test_only_watched_actors_are_measured(self):
        measured = monitor(ADDITIVE, watched=[1])
        assert set(measured_by(measured, batch(ADDITIVE, [[0, 1], [0, 1]]))) == {1}
        assert measured_by(monitor(ADDITIVE, watched=[]), batch(ADDITIVE, [[0, 1], [0, 1]])) == {}

    def test_what_was_known_before_a_break_is_known_after_it(self):
        before, after = monitor(LEFT_ALONE, every=100), monitor(LEFT_ALONE, every=100)
        measured_by(before, batch(LEFT_ALONE, [[0, 1], [0, 1]]))
        after.load(json.loads(json.dumps(before.state())))
        due = [after.due(crossed=False) for _ in range(16)]
        assert due == [[1]] * 15 + [[]]  # the first of sixteen batches was before the break


class TestWarning:
    @pytest.mark.parametrize(
        ("crossed", "tasks", "last"), [(False, 1, 32), (False, 4, 8), (True, 1, 32), (True, 4, 8)]
    )
    def test_it_comes_once_after_32_tasks(self, crossed, tasks, last, caplog):
        caplog.set_level(logging.WARNING)
        measured = monitor(LEFT_ALONE)
        said = batch(LEFT_ALONE, [[0, 1] * tasks, [0, 1] * tasks], cross=crossed)
        for number in range(1, last + 5):
            measured_by(measured, said, crossed)
            assert len(warned(caplog)) == (1 if number >= last else 0)
        assert "The reward of right seems not to depend on what it says: in 32 tasks" in warned(caplog)[0]

    def test_two_tasks_a_batch_are_enough_to_name_it_while_it_is_looked_for(self, caplog):
        """In the sixteenth batch, however seldom is measured later."""
        caplog.set_level(logging.WARNING)
        measured = monitor(LEFT_ALONE, every=1000)
        for number in range(1, 41):
            measured_by(measured, batch(LEFT_ALONE, [[0, 1] * 2, [0, 1] * 2]))
            assert len(warned(caplog)) == (1 if number >= 16 else 0)
        assert "The reward of right" in warned(caplog)[0]

    @pytest.mark.parametrize("crossed", [False, True])
    def test_tasks_with_equal_answers_do_not_count(self, crossed, caplog):
        caplog.set_level(logging.WARNING)
        measured = monitor(LEFT_ALONE)
        for _ in range(40):
            measured_by(measured, batch(LEFT_ALONE, [[0, 1], [1, 1]], cross=crossed), crossed)
        assert not warned(caplog)

    def test_tasks_with_equal_rewards_do_not_count(self, caplog, monkeypatch):
        """Of two tasks in a batch one has a reward that varies: five batches for five tasks."""
        caplog.set_level(logging.WARNING)
        monkeypatch.setattr(influence, "ENOUGH_TASKS", 5)
        table = [[0.0, 0.0], [2.0, 2.0], [2.0, 2.0]]
        measured = monitor(table)
        for number in range(1, 8):
            measured_by(measured, batch(table, [[0, 1, 1, 2], [0, 1, 0, 1]]))
            assert len(warned(caplog)) == (1 if number >= 5 else 0)

    def test_what_was_measured_before_a_break_counts_after_it(self, caplog, monkeypatch):
        """Through JSON: neither the tasks nor a warning that was given are lost."""
        caplog.set_level(logging.WARNING)
        monkeypatch.setattr(influence, "ENOUGH_TASKS", 4)
        before = monitor(LEFT_ALONE)
        for number in range(6):
            measured_by(before, batch(LEFT_ALONE, [[0, 1], [0, 1]]))
            after = monitor(LEFT_ALONE)
            after.load(json.loads(json.dumps(before.state())))
            before = after
            assert len(warned(caplog)) == (1 if number >= 3 else 0)

    def test_running_shares_go_on_after_a_break(self):
        first, second = batch(ADDITIVE, [[0, 1], [0, 1]]), batch(ADDITIVE, [[0, 1], [1, 0]])
        whole, before, after = monitor(ADDITIVE), monitor(ADDITIVE), monitor(ADDITIVE)
        measured_by(whole, first)
        measured_by(before, first)
        after.load(json.loads(json.dumps(before.state())))
        assert measured_by(after, second) == measured_by(whole, second)

    def test_one_that_acted_once_is_never_named(self, caplog):
        caplog.set_level(logging.WARNING)
        measured = monitor(ADDITIVE)
        measured_by(measured, batch(ADDITIVE, [[0, 1], [0, 1]]))
        measured.reward = JointReward(Table(LEFT_ALONE), 2)
        for _ in range(40):
            measured_by(measured, batch(LEFT_ALONE, [[0, 1], [0, 1]]))
        assert not warned(caplog)


# Numbers below 50 are right answers, the others wrong ones; the joint response is right if both are
HALF = 50
BOTH_RIGHT = [[float(a < HALF and b < HALF) for b in range(2 * HALF)] for a in range(2 * HALF)]
GROUP = 4


def answers(draw, share, count):
    """Different texts, each right with probability `share`."""
    numbers = draw.sample(range(HALF), count)
    return [number if draw.random() < share else number + HALF for number in numbers]


def probability_of_silence(share, other):
    """
    How probable it is that a task which counts, or shows an effect, shows none: over all outcomes of a group of an
    actor that is right with probability `share`, beside one with `other`.
    """
    silent, told = 0.0, 0.0
    for own in itertools.product([True, False], repeat=GROUP):
        for theirs in itertools.product([True, False], repeat=GROUP):
            weight = 1.0
            for mine, yours in zip(own, theirs, strict=True):
                weight *= (share if mine else 1 - share) * (other if yours else 1 - other)
            before = [a and b for a, b in zip(own, theirs, strict=True)]
            after = [a and b for a, b in zip(own[1:] + own[:1], theirs, strict=True)]
            told += weight * (before != after or len(set(before)) > 1)
            silent += weight * (before == after and len(set(before)) > 1)
    return silent / told


class TestStrongActor:
    """One that is nearly always right shows its effect in few tasks."""

    RUNS = 200

    def test_it_is_hardly_ever_called_lazy(self, caplog):
        """A right in 95 % and B in 50 %: the reward is 1 where both are."""
        caplog.set_level(logging.WARNING)
        expected = probability_of_silence(0.95, 0.5) ** 32
        assert expected < 0.01
        named = 0
        for seed in range(self.RUNS):
            caplog.clear()
            draw, measured, shares = random.Random(seed), monitor(BOTH_RIGHT), {}
            while not warned(caplog) and not shares.get(0):
                said = [answers(draw, share, 2 * GROUP) for share in (0.95, 0.5)]
                shares = measured_by(measured, batch(BOTH_RIGHT, said, group=GROUP))
            named += bool(warned(caplog))
        # About one is expected; six or more have a probability below one in a thousand
        assert named <= 5
        assert self.RUNS * expected < 1.5

    def test_eight_tasks_would_not_be_enough(self):
        assert probability_of_silence(0.95, 0.5) ** 8 > 0.1
