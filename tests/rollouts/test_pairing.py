# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Which samples form joint responses, and which joint responses a sample is credited with."""

import itertools
import random

import pytest
import torch

from trl_multiagent.rollouts.pairing import aligned, crossed


def members_of(pairing, agent, sample):
    """The joint responses of one sample, as tuples of samples, in the order of its columns."""
    return [tuple(pairing.members[joint].tolist()) for joint in pairing.columns[agent][sample].tolist()]


def teammates_of(pairing, agent, sample):
    return [joint[:agent] + joint[agent + 1 :] for joint in members_of(pairing, agent, sample)]


class TestAligned:
    @pytest.mark.parametrize("num_agents", [1, 2, 3])
    def test_sample_j_of_every_actor_forms_joint_response_j(self, num_agents):
        pairing = aligned(4, num_agents)
        assert pairing.members.tolist() == [[j] * num_agents for j in range(4)]
        assert [column.tolist() for column in pairing.columns] == [[[0], [1], [2], [3]]] * num_agents

    def test_without_samples_there_is_no_joint_response(self):
        pairing = aligned(0, 2)
        assert pairing.members.shape == (0, 2) and [column.shape for column in pairing.columns] == [(0, 1)] * 2


class TestCrossed:
    def test_two_actors_with_two_samples_each(self):
        pairing = crossed([[0, 1]], 2, None, "seed")
        assert sorted(pairing.members.tolist()) == [[0, 0], [0, 1], [1, 0], [1, 1]]
        assert members_of(pairing, 0, 0) == [(0, 0), (0, 1)]
        assert members_of(pairing, 0, 1) == [(1, 0), (1, 1)]
        assert members_of(pairing, 1, 0) == [(0, 0), (1, 0)]
        assert members_of(pairing, 1, 1) == [(0, 1), (1, 1)]

    def test_three_actors_with_two_samples_each(self):
        pairing = crossed([[0, 1]], 3, None, "seed")
        assert sorted(map(tuple, pairing.members.tolist())) == [
            (0, 0, 0),
            (0, 0, 1),
            (0, 1, 0),
            (0, 1, 1),
            (1, 0, 0),
            (1, 0, 1),
            (1, 1, 0),
            (1, 1, 1),
        ]
        assert members_of(pairing, 0, 1) == [(1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]
        assert members_of(pairing, 1, 0) == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]
        assert members_of(pairing, 2, 1) == [(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)]

    def test_samples_of_different_contexts_never_meet(self):
        pairing = crossed([[0, 1], [2, 3]], 2, None, "seed")
        assert len(pairing.members) == 8
        assert members_of(pairing, 0, 2) == [(2, 2), (2, 3)] and members_of(pairing, 1, 3) == [(2, 3), (3, 3)]

    def test_columns_are_by_sample_also_where_contexts_lie_between_each_other(self):
        pairing = crossed([[0, 2], [1, 3]], 2, None, "seed")
        assert members_of(pairing, 0, 1) == [(1, 1), (1, 3)]
        assert members_of(pairing, 0, 2) == [(2, 0), (2, 2)]
        assert members_of(pairing, 1, 3) == [(1, 3), (3, 3)]

    def test_joint_responses_of_one_context_are_neighbours(self):
        pairing = crossed([[0, 1], [2, 3], [4, 5]], 3, 2, "seed")
        contexts = [sample // 2 for sample in pairing.members[:, 0].tolist()]
        assert contexts == sorted(contexts)

    def test_one_actor_alone_is_aligned(self):
        pairing = crossed([[0, 1], [2, 3]], 1, None, "seed")
        assert pairing.members.tolist() == [[0], [1], [2], [3]]
        assert pairing.columns[0].tolist() == [[0], [1], [2], [3]]

    def test_a_group_of_one_has_one_joint_response(self):
        assert crossed([[0], [1]], 3, None, "seed").members.tolist() == [[0, 0, 0], [1, 1, 1]]


class TestSampledTuples:
    """`num_tuples` P of the G ** (N - 1) tuples of teammates, for each actor of N."""

    @staticmethod
    def draw(num_agents, group, num_tuples, seed="seed", num_contexts=2):
        contexts = [list(range(c * group, (c + 1) * group)) for c in range(num_contexts)]
        return contexts, crossed(contexts, num_agents, num_tuples, seed)

    @pytest.mark.parametrize(("num_agents", "group", "num_tuples"), [(2, 4, 1), (2, 4, 3), (3, 3, 2), (3, 4, 7)])
    @pytest.mark.parametrize("seed", ["a", "b", "c"])
    def test_what_must_hold_for_every_draw(self, num_agents, group, num_tuples, seed):
        contexts, pairing = self.draw(num_agents, group, num_tuples, seed)
        members = [tuple(joint) for joint in pairing.members.tolist()]
        assert len(set(members)) == len(members) <= len(contexts) * num_agents * group * num_tuples
        for agent, samples in itertools.product(range(num_agents), contexts):
            met = [teammates_of(pairing, agent, sample) for sample in samples]
            # all samples of a context meet the same teammates in the same columns ...
            assert met == [met[0]] * group
            # ... which are P different ones, of this context
            assert len(set(met[0])) == len(met[0]) == num_tuples
            assert {teammate for tuple_ in met[0] for teammate in tuple_} <= set(samples)
            for sample in samples:
                assert all(joint[agent] == sample for joint in members_of(pairing, agent, sample))

    def test_no_joint_response_is_without_a_sample_that_it_credits(self):
        _, pairing = self.draw(3, 4, 3)
        credited = {joint for column in pairing.columns for joint in column.flatten().tolist()}
        assert credited == set(range(len(pairing.members)))

    @pytest.mark.parametrize("num_tuples", [9, 10, 100])
    def test_as_many_as_there_are_or_more_are_all(self, num_tuples):
        _, some = self.draw(3, 3, num_tuples)
        _, every = self.draw(3, 3, None)
        assert torch.equal(some.members, every.members) and len(every.members) == 2 * 27
        assert all(torch.equal(a, b) for a, b in zip(some.columns, every.columns, strict=True))

    def test_the_same_seed_gives_the_same_draw_and_another_seed_another(self):
        draws = {seed: [self.draw(3, 4, 3, seed)[1] for _ in range(2)] for seed in ("1/2", "1/3")}
        for first, second in draws.values():
            assert torch.equal(first.members, second.members)
            assert all(torch.equal(a, b) for a, b in zip(first.columns, second.columns, strict=True))
        columns = {seed: teammates_of(pairings[0], 0, 0) for seed, pairings in draws.items()}
        assert columns["1/2"] != columns["1/3"]

    def test_a_draw_leaves_the_global_random_state_alone(self):
        random.seed(5)
        expected = random.random()
        random.seed(5)
        self.draw(3, 4, 3)
        assert random.random() == expected

    def test_contexts_and_actors_are_drawn_apart(self):
        contexts, pairing = self.draw(2, 6, 2, num_contexts=6)
        met = [
            tuple(teammate[0] - samples[0] for teammate in teammates_of(pairing, agent, samples[0]))
            for agent, samples in itertools.product(range(2), contexts)
        ]
        assert len(set(met)) > 6

    def test_every_tuple_is_drawn_equally_often(self):
        """Else the mean over the drawn ones would be biased. Here 2 of 9 tuples: each in two ninths of the draws."""
        count = dict.fromkeys(itertools.product(range(3), repeat=2), 0)
        for seed in range(900):
            for teammates in teammates_of(crossed([[0, 1, 2]], 3, 2, str(seed)), 1, 0):
                count[teammates] += 1
        assert all(150 < number < 250 for number in count.values()), count  # 200 expected, deviation 12.5
