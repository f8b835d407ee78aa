# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""From joint responses to the samples of an actor, and from samples to the rows of the losses."""

import pytest
import torch

from trl_multiagent.rollouts.batch import JointBatch, split_batch
from trl_multiagent.rollouts.interaction import Branch, Turn
from trl_multiagent.rollouts.pairing import Pairing, aligned
from trl_multiagent.rollouts.transition import History


NAN = float("nan")


def turn(number, counts, process_index=0, pairing=None, num_agents=2):
    """Turn k with these samples of each process: actor i is asked `k?i:s` and answers `k!i:s` in sample s."""
    samples = sum(counts)
    start = sum(counts[:process_index])
    own = range(start, start + counts[process_index])
    return Turn(
        number=number,
        tasks=[0] * samples,
        contexts=[0] * samples,
        counts=list(counts),
        process_index=process_index,
        pairing=pairing or aligned(samples, num_agents),
        parents=torch.full((samples,), -1),
        branches=[Branch({}, History.empty(num_agents)) for _ in own],
        prompts=[[f"{number}?{agent}:{sample}" for sample in own] for agent in range(num_agents)],
        completions=[[f"{number}!{agent}:{sample}" for sample in own] for agent in range(num_agents)],
    )


def batch(turns, num_rows=4):
    return JointBatch(turns, rewards=[], returns=[], num_rows=num_rows, num_generations=2, mode="train")


# Two actors with two samples, all combinations
CROSSED = Pairing(
    torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]]), [torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0, 2], [1, 3]])]
)


class TestOfSamples:
    def test_aligned_a_samples_value_is_its_joint_responses(self):
        values = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])]
        both = batch([turn(1, [2]), turn(2, [3])])
        for agent in range(2):
            assert [v.tolist() for v in both.of_samples(agent, values)] == [[1.0, 2.0], [3.0, 4.0, 5.0]]

    def test_crossed_it_is_the_mean_over_the_samples_own(self):
        crossed = batch([turn(1, [2], pairing=CROSSED)])
        table = torch.tensor([1.0, 3.0, 10.0, 30.0])  # rows of the first actor: 1 3, 10 30
        assert crossed.of_samples(0, [table])[0].tolist() == [2.0, 20.0]
        assert crossed.of_samples(1, [table])[0].tolist() == [5.5, 16.5]

    def test_a_missing_value_is_left_out_of_the_mean(self):
        """B24."""
        crossed = batch([turn(1, [2], pairing=CROSSED)])
        values = crossed.of_samples(0, [torch.tensor([NAN, 3.0, NAN, NAN])])[0]
        assert values[0] == 3.0 and values[1].isnan()

    def test_values_of_several_functions_stay_apart(self):
        crossed = batch([turn(1, [2], pairing=CROSSED)])
        table = torch.tensor([[1.0, -1.0], [3.0, -3.0], [10.0, 0.0], [30.0, NAN]])  # (J, F)
        assert crossed.of_samples(0, [table])[0].tolist() == [[2.0, -2.0], [20.0, 0.0]]


class TestRows:
    """A process's rows are its samples of all turns, in order, then padding."""

    def test_one_process(self):
        rows = batch([turn(1, [2]), turn(2, [1])]).to_rows(
            [torch.tensor([1.0, 2.0]), torch.tensor([3.0])], padding=-9.0
        )
        assert rows.tolist() == [1.0, 2.0, 3.0, -9.0]

    def test_two_processes_with_different_numbers_of_samples(self):
        turns = [turn(1, [2, 2]), turn(2, [0, 3])]
        values = [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([5.0, 6.0, 7.0])]
        rows = batch(turns, num_rows=5).to_rows(values, padding=0.0)
        assert rows.tolist() == [1.0, 2.0, 0.0, 0.0, 0.0, 3.0, 4.0, 5.0, 6.0, 7.0]

    def test_values_may_have_more_dimensions_and_padding_may_be_nan(self):
        rows = batch([turn(1, [1])], num_rows=2).to_rows([torch.tensor([[1.0, 2.0]])], padding=NAN)
        assert rows[0].tolist() == [1.0, 2.0] and rows[1].isnan().tolist() == [True, True]

    @pytest.mark.parametrize(("process", "expected"), [(0, [0, 1, 2]), (1, [3, 4, 5])])
    def test_each_process_takes_its_own_part(self, process, expected):
        own = batch([turn(1, [2, 2], process)], num_rows=3)
        assert own.process_index == process and own.local(torch.arange(6)).tolist() == expected

    def test_prompts_are_those_of_this_process_in_the_order_of_its_rows(self):
        both = batch([turn(1, [2, 1], 1), turn(2, [1, 2], 1)])
        assert both.prompts(0) == ["1?0:2", "2?0:1", "2?0:2"]
        assert both.prompts(1) == ["1?1:2", "2?1:1", "2?1:2"]

    def test_joint_responses_of_all_turns_and_processes_are_counted(self):
        assert batch([turn(1, [2], pairing=CROSSED), turn(2, [3])]).num_joint_responses == 7
        assert batch([turn(1, [2, 1], 1)]).num_joint_responses == 3


class TestAdvantages:
    @pytest.mark.parametrize(("process", "expected"), [(0, [1.0, 3.0, 0.0]), (1, [2.0, 4.0, 5.0])])
    def test_they_replace_those_in_the_inputs_by_the_rows_of_this_process(self, process, expected):
        both = batch([turn(1, [1, 1], process), turn(2, [1, 2], process)], num_rows=3)
        both.inputs = [{"advantages": torch.zeros(3), "other": 1}, {"advantages": torch.ones(3)}]
        both.set_advantages(0, [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])])
        assert both.inputs[0]["advantages"].tolist() == expected and both.inputs[0]["other"] == 1
        assert both.inputs[1]["advantages"].tolist() == [1.0, 1.0, 1.0]

    def test_a_frozen_actor_has_none(self):
        frozen = batch([turn(1, [2])])
        frozen.inputs = [None, {"advantages": torch.zeros(4)}]
        frozen.set_advantages(0, [torch.tensor([1.0, 2.0])])
        assert frozen.inputs[0] is None


class TestLayout:
    """B15, B27: padding counts in no mean."""

    def test_without_padding_every_scale_is_one(self):
        assert batch([turn(1, [4, 4])]).layout(num_splits=1, num_steps=2) == {
            "num_splits": 1,
            "num_real": 4,
            "most_real": 4,
            "row_scale": 1.0,
            "part_scale": 1.0,
        }

    def test_rows_and_micro_batches_of_padding_are_counted(self):
        # Processes with 3 + 2 and 3 + 0 samples in 8 rows each: 8 of 16 rows are real. Of 8 micro-batches each, the
        # first process fills 5, the second 3
        uneven = batch([turn(1, [3, 3]), turn(2, [2, 0])], num_rows=8)
        assert uneven.layout(num_splits=2, num_steps=4) == {
            "num_splits": 2,
            "num_real": 5,
            "most_real": 5,
            "row_scale": 2.0,
            "part_scale": 2.0,
        }

    def test_a_process_knows_its_own_rows_and_the_most_of_any(self):
        uneven = batch([turn(1, [3, 3], process_index=1), turn(2, [2, 0], process_index=1)], num_rows=8)
        layout = uneven.layout(num_splits=1, num_steps=2)
        assert (layout["num_real"], layout["most_real"], layout["part_scale"]) == (3, 5, 1.0)


def flat(num_real, num_rows, num_splits=1, most_real=None):
    """Row r has the number r; padding is negative."""
    return {
        "agent_0/rows": torch.tensor([r if r < num_real else -1 - r for r in range(num_rows)]),
        "agent_0/num_items": torch.tensor(7),
        "batch/num_splits": torch.tensor(num_splits),
        "batch/num_real": torch.tensor(num_real),
        "batch/most_real": torch.tensor(most_real or num_real),
    }


def rows_of(parts):
    return [[part["agent_0/rows"].tolist() for part in step] for step in parts]


class TestSplit:
    def test_without_padding_rows_stay_together_in_order(self):
        parts = split_batch(flat(8, 8, num_splits=2), num_steps=2, shuffle=False)
        assert rows_of(parts) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
        assert all(part["agent_0/num_items"] == 7 for step in parts for part in step)

    def test_without_padding_the_order_is_that_of_one_permutation(self):
        torch.manual_seed(3)
        expected = torch.randperm(8).tolist()
        torch.manual_seed(3)
        (first, second) = rows_of(split_batch(flat(8, 8), num_steps=2, shuffle=True))
        assert first[0] + second[0] == expected

    def test_real_rows_are_dealt_to_the_micro_steps_first(self):
        # Two micro-steps of two micro-batches of two rows; five real rows are dealt 0, 1 to the steps' first parts,
        # 2, 3 to their second parts, 4 to the very first again
        parts = split_batch(flat(5, 8, num_splits=2), num_steps=2, shuffle=False)
        kept = [[[row for row in rows if row >= 0] for rows in step] for step in rows_of(parts)]
        assert kept == [[[0, 4], [2]], [[1], [3]]]

    def test_every_row_is_there_once_and_every_part_has_its_size(self):
        parts = rows_of(split_batch(flat(5, 12, num_splits=2), num_steps=3, shuffle=True))
        rows = [row for step in parts for part in step for row in part]
        assert sorted(rows) == sorted(flat(5, 12)["agent_0/rows"].tolist())
        assert all(len(part) == 2 for step in parts for part in step)
        # Five rows in six micro-batches: no two share one
        assert max(sum(row >= 0 for row in part) for step in parts for part in step) == 1

    def test_a_micro_batch_that_is_empty_everywhere_says_so(self):
        parts = split_batch(flat(1, 4, most_real=3), num_steps=4, shuffle=False)
        assert [step[0]["batch/has_rows"] for step in parts] == [True, True, True, False]
