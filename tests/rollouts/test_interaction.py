# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Joint rollouts over turns, and their scores, with actors that number their answers or repeat their prompts."""

import threading
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from trl_multiagent.rewards import JointReward
from trl_multiagent.rollouts import interaction
from trl_multiagent.rollouts.formatters import resolve_formatters
from trl_multiagent.rollouts.interaction import Interaction, RolloutSettings
from trl_multiagent.rollouts.transition import Transition


class Actor:
    """Keeps what it is asked, and notes its name in `log`, once for each call."""

    def __init__(self, name, log=None):
        self.name, self.log = name, [] if log is None else log
        self.asked, self.kept, self.greedy = [], [], []

    def sample(self, prompts, num_kept=None, greedy=False):
        self.log.append(self.name)
        self.asked.append(prompts)
        self.kept.append(num_kept)
        self.greedy.append(greedy)
        return [self.answer(prompt) for prompt in prompts[:num_kept]]

    @property
    def sizes(self):
        return [len(prompts) for prompts in self.asked]


class Echo(Actor):
    """Answers with its name and the prompt."""

    def answer(self, prompt):
        return f"{self.name}: {prompt if isinstance(prompt, str) else prompt[-1]['content']}"


class Counter(Actor):
    """Answers A0, A1, A2, ... over all calls."""

    count = -1

    def answer(self, prompt):
        self.count += 1
        return f"{self.name}{self.count}"


def rows_of(*values, generations=2):
    return [{"prompt": value, "gold": value.upper()} for value in values for _ in range(generations)]


def messages(text):
    return [{"role": "system", "content": "be brief"}, {"role": "user", "content": text}]


def zero(*completions):
    return [0.0] * len(completions[0])


def after(prompt, agent_completions, num_agents):
    """An environment that tells each actor what it just said."""
    return [f"after {text}" for text in agent_completions]


def weighted(rewards):
    return rewards.nansum(dim=-1).masked_fill(rewards.isnan().all(dim=-1), torch.nan)


def roll_out(
    actors,
    rows,
    formatters=None,
    reward=zero,
    transition=after,
    num_wanted=None,
    generations=2,
    batched=False,
    accelerator=None,
    **settings,
):
    names = [actor.name for actor in actors]
    team = Interaction(
        actors,
        resolve_formatters(formatters, names),
        JointReward(reward, len(actors), batched=batched),
        weighted,
        accelerator or Accelerator(cpu=True),
        Transition(transition, names),
    )
    return team.run(rows, RolloutSettings(num_generations=generations, **settings), num_wanted)


def structure(turn):
    """Tasks, contexts and parents of a turn."""
    return turn.tasks, turn.contexts, turn.parents.tolist()


def by_text(values, default=0.0):
    """A reward of the first actor's texts, from a table."""

    def table_reward(first, *others):
        return [values.get(text, default) for text in first]

    return table_reward


class TestOneTurn:
    def test_sample_j_of_every_actor_forms_joint_response_j(self):
        (turn,) = roll_out([Echo("A"), Echo("B")], rows_of("x", "y"))
        assert turn.prompts == [["x", "x", "y", "y"]] * 2
        assert turn.completions == [["A: x", "A: x", "A: y", "A: y"], ["B: x", "B: x", "B: y", "B: y"]]
        assert turn.rows == rows_of("x", "y")
        assert turn.pairing.members.tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
        assert turn.number == 1 and turn.counts == [4] and turn.process_index == 0 and turn.start == 0
        assert structure(turn) == ([0, 0, 1, 1], [0, 0, 1, 1], [-1] * 4)

    def test_each_actor_gets_its_own_formatters_prompt(self):
        formatters = [lambda row: f"ask {row['prompt']}", lambda row: messages(f"check {row['gold']}")]
        (turn,) = roll_out([Echo("A"), Echo("B")], rows_of("x"), formatters)
        assert turn.prompts == [["ask x"] * 2, [messages("check X")] * 2]
        assert turn.completions == [["A: ask x"] * 2, ["B: check X"] * 2]

    def test_actors_are_asked_once_each_in_their_order(self):
        log = []
        actors = [Echo(name, log) for name in "CAB"]
        roll_out(actors, rows_of("x", "y"))
        assert log == ["C", "A", "B"]
        assert [actor.sizes for actor in actors] == [[4]] * 3

    def test_a_formatter_is_called_once_for_a_group_so_that_the_group_shares_its_prompt(self):
        calls = []

        def counting(row):
            calls.append(row["prompt"])
            return f"{row['prompt']} number {len(calls)}"

        (turn,) = roll_out([Echo("A")], rows_of("x", "y", generations=3), counting, generations=3)
        assert calls == ["x", "y"]
        assert turn.prompts == [["x number 1"] * 3 + ["y number 2"] * 3]

    def test_neighbouring_groups_with_equal_rows_are_two_groups(self):
        calls = []
        roll_out([Echo("A")], rows_of("x", "x"), lambda row: calls.append(1) or "text")
        assert len(calls) == 2

    def test_one_formatter_for_two_actors_is_called_for_each_of_them(self):
        calls = []
        roll_out([Echo("A"), Echo("B")], rows_of("x"), lambda row: calls.append(1) or "text")
        assert len(calls) == 2

    def test_what_a_formatter_does_to_its_row_stays_its_own(self):
        rows = rows_of("x")
        roll_out([Echo("A"), Echo("B")], rows, lambda row: row.pop("prompt"))
        assert rows == rows_of("x")

    def test_an_actor_gets_a_list_of_its_own(self):
        class Greedy(Echo):
            def sample(self, prompts, **kwargs):
                answers = super().sample(list(prompts), **kwargs)
                prompts.clear()
                return answers

        (turn,) = roll_out([Greedy("A"), Echo("B")], rows_of("x"))
        assert turn.prompts == [["x", "x"]] * 2

    @pytest.mark.parametrize("prompt", [None, 3, ["a", "b"], []], ids=["None", "int", "texts", "empty"])
    def test_a_prompt_of_another_kind_is_an_error_that_names_the_actor(self, prompt):
        with pytest.raises(ValueError, match="^B: "):
            roll_out([Echo("A"), Echo("B")], rows_of("x"), [lambda row: row["prompt"], lambda row: prompt])

    def test_texts_and_messages_in_one_batch_are_an_error_that_names_the_actor(self):
        def mixed(row):
            return row["prompt"] if row["prompt"] == "x" else messages(row["prompt"])

        with pytest.raises(ValueError, match="A got both"):
            roll_out([Echo("A")], rows_of("x", "y"), mixed)

    def test_an_exception_of_a_formatter_surfaces_unchanged(self):
        with pytest.raises(KeyError, match="question"):
            roll_out([Echo("A")], rows_of("x"), lambda row: row["question"])

    @pytest.mark.parametrize("greedy", [False, True])
    def test_the_greedy_flag_reaches_every_call(self, greedy):
        actors = [Echo("A"), Echo("B")]
        roll_out(actors, rows_of("x"), greedy=greedy, num_turns=3, tree=False)
        assert [actor.greedy for actor in actors] == [[greedy] * 3] * 2


class TestScoring:
    def test_the_shape_is_actors_by_joint_responses_by_functions(self):
        rewards = [lambda a, b: [1.0] * len(a), lambda a, b: [[2.0] * len(a), [3.0] * len(a)]]
        (turn,) = roll_out([Echo("A"), Echo("B")], rows_of("x", "y"), reward=rewards)
        assert turn.rewards.shape == (2, 4, 2)
        assert turn.rewards[0, 0].tolist() == [1.0, 2.0] and turn.rewards[1, 3].tolist() == [1.0, 3.0]

    def test_a_function_is_called_once_for_each_task_with_its_joint_responses_and_rows(self):
        calls = []

        def reward(first, second, batch_items):
            calls.append((first, second, [row["gold"] for row in batch_items]))
            return [1.0] * len(first)

        roll_out([Counter("A"), Counter("B")], rows_of("x", "y"), reward=reward)
        assert calls == [(["A0", "A1"], ["B0", "B1"], ["X", "X"]), (["A2", "A3"], ["B2", "B3"], ["Y", "Y"])]

    def test_samples_that_only_fill_the_last_batch_of_an_evaluation_are_not_scored(self):
        seen = []

        def reward(first, second, batch_items):
            seen.append((first, [row["gold"] for row in batch_items]))
            return [1.0] * len(first)

        (turn,) = roll_out([Counter("A"), Counter("B")], rows_of("x", "y", "z"), reward=reward, num_wanted=4)
        assert seen == [(["A0", "A1"], ["X", "X"]), (["A2", "A3"], ["Y", "Y"])]
        assert turn.rewards[0, :, 0].isnan().tolist() == [False] * 4 + [True] * 2

    def test_nothing_is_called_where_nothing_is_wanted(self):
        calls = []
        turns = roll_out(
            [Echo("A")],
            rows_of("x"),
            reward=lambda a: calls.append(1),
            transition=lambda prompt, agent_completions, num_agents: calls.append(1),
            num_wanted=0,
            num_turns=3,
        )
        assert calls == [] and len(turns) == 1 and turns[0].rewards.isnan().all()

    def test_a_missing_reward_is_nan(self):
        """B24."""
        (turn,) = roll_out([Echo("A")], rows_of("x"), reward=lambda a: [None, 2.0])
        assert turn.rewards[0, :, 0].isnan().tolist() == [True, False] and turn.rewards[0, 1, 0] == 2.0

    def test_crossed_samples_are_scored_in_all_combinations_of_their_context(self):
        calls = []

        def reward(first, second, batch_items):
            calls.append((list(zip(first, second, strict=True)), {row["gold"] for row in batch_items}))
            return [10.0 * int(a[1:]) + int(b[1:]) for a, b in zip(first, second, strict=True)]

        (turn,) = roll_out([Counter("A"), Counter("B")], rows_of("x", "y"), reward=reward, cross=True)
        assert [gold for _, gold in calls] == [{"X"}, {"Y"}]
        assert sorted(calls[0][0]) == [("A0", "B0"), ("A0", "B1"), ("A1", "B0"), ("A1", "B1")]
        assert sorted(calls[1][0]) == [("A2", "B2"), ("A2", "B3"), ("A3", "B2"), ("A3", "B3")]
        for (first, second), reward in zip(turn.pairing.members.tolist(), turn.rewards[1, :, 0].tolist(), strict=True):
            assert reward == 10 * first + second

    def test_sampled_crossing_asks_for_no_more_than_actors_times_samples_times_tuples(self):
        scored = []

        def reward(*texts):
            scored.append(len(texts[0]))
            return [0.0] * len(texts[0])

        actors = [Counter(name) for name in "ABC"]
        roll_out(actors, rows_of("x", "y", generations=4), reward=reward, generations=4, cross=True, cross_samples=2)
        assert len(scored) == 2 and all(8 <= count <= 3 * 4 * 2 for count in scored)

    def test_the_draw_of_teammates_follows_the_seed_and_differs_between_turns(self):
        def members(seed):
            turns = roll_out(
                [Counter("A"), Counter("B")],
                rows_of("x", generations=6),
                reward=by_text({}),
                generations=6,
                cross=True,
                cross_samples=1,
                num_turns=2,
                seed=seed,
            )
            return turns[0].pairing.members, turns[1].pairing.members

        assert all(torch.equal(a, b) for a, b in zip(members("1"), members("1"), strict=True))
        assert not torch.equal(members("1")[0], members("2")[0])
        first, second = members("1")
        contexts = second.view(-1, len(first), 2) - 6 * torch.arange(len(second) // len(first)).view(-1, 1, 1)
        assert not all(torch.equal(first, context) for context in contexts)


class TestTree:
    """Each joint response branches into as many samples as the group has."""

    def test_three_turns_of_two(self):
        actors = [Counter("A"), Counter("B")]
        first, second, third = roll_out(actors, rows_of("x"), num_turns=3)
        assert structure(first) == ([0, 0], [0, 0], [-1, -1])
        assert structure(second) == ([0] * 4, [0, 0, 1, 1], [0, 0, 1, 1])
        assert structure(third) == ([0] * 8, [0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 1, 1, 2, 2, 3, 3])
        assert [turn.number for turn in (first, second, third)] == [1, 2, 3]
        assert [turn.counts for turn in (first, second, third)] == [[2], [4], [8]]
        assert first.completions[0] == ["A0", "A1"] and second.completions[0] == ["A2", "A3", "A4", "A5"]
        assert second.prompts[0] == ["after A0"] * 2 + ["after A1"] * 2
        assert second.prompts[1] == ["after B0"] * 2 + ["after B1"] * 2
        assert third.prompts[0] == [f"after A{i}" for i in (2, 2, 3, 3, 4, 4, 5, 5)]

    def test_tasks_stay_apart_and_in_order(self):
        first, second = roll_out([Counter("A")], rows_of("x", "y"), num_turns=2)
        assert structure(second) == ([0] * 4 + [1] * 4, [0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 1, 1, 2, 2, 3, 3])
        assert [row["prompt"] for row in second.rows] == ["x"] * 4 + ["y"] * 4

    def test_crossed_every_combination_branches(self):
        first, second = roll_out([Counter("A"), Counter("B")], rows_of("x"), num_turns=2, cross=True)
        assert len(first.pairing.members) == 4 and len(second.tasks) == 8 and len(second.pairing.members) == 16
        assert second.contexts == [0, 0, 1, 1, 2, 2, 3, 3]
        for context, (a, b) in enumerate(first.pairing.members.tolist()):
            assert [asked[2 * context] for asked in second.prompts] == [f"after A{a}", f"after B{b}"]
        # the joint responses of a context continue the one that made it
        sample = second.pairing.members[:, 0]
        assert second.parents.tolist() == [second.contexts[s] for s in sample.tolist()]

    def test_a_formatter_is_called_once_for_a_context(self):
        calls = []
        roll_out([Counter("A")], rows_of("x"), lambda row: calls.append(row["prompt"]) or row["prompt"], num_turns=3)
        assert calls == ["x", "after A0", "after A1", "after A2", "after A3", "after A4", "after A5"]

    def test_the_environment_is_asked_once_for_each_joint_response_and_not_after_the_last_turn(self):
        calls = []

        def environment(prompt, agent_completions, num_agents, turn):
            calls.append((turn, prompt, agent_completions))
            return ["p", "q"]

        roll_out([Counter("A"), Counter("B")], rows_of("x"), transition=environment, num_turns=2)
        assert calls == [(1, "x", ["A0", "B0"]), (1, "x", ["A1", "B1"])]

    def test_a_group_of_one_is_a_path(self):
        turns = roll_out([Counter("A")], rows_of("x", "y", generations=1), generations=1, num_turns=3)
        assert [structure(turn) for turn in turns[1:]] == [([0, 1], [0, 1], [0, 1])] * 2


class TestChain:
    """Each joint response goes on alone."""

    def test_three_turns_of_two(self):
        first, second, third = roll_out([Counter("A"), Counter("B")], rows_of("x", "y"), num_turns=3, tree=False)
        assert structure(first) == ([0, 0, 1, 1], [0, 0, 1, 1], [-1] * 4)
        assert structure(second) == structure(third) == ([0, 0, 1, 1], [0, 1, 2, 3], [0, 1, 2, 3])
        assert second.prompts[0] == ["after A0", "after A1", "after A2", "after A3"]
        assert third.prompts[1] == ["after B4", "after B5", "after B6", "after B7"]
        assert second.counts == [4]


class TestEarlyTermination:
    """A context (tree) or a joint response (chain) that is above the threshold is not continued."""

    def test_in_a_tree_the_mean_of_a_context_decides(self):
        # x: mean 2, not above it, though one of its answers is; y: mean 2.5
        reward = by_text({"A0": 1.0, "A1": 3.0, "A2": 0.0, "A3": 5.0, "A6": 9.0, "A4": 2.0, "A5": 1.0})
        _, second, third = roll_out(
            [Counter("A"), Counter("B")],
            rows_of("x", "y"),
            reward=reward,
            num_turns=3,
            early_termination_threshold=2.0,
        )
        assert structure(second) == ([0] * 4, [0, 0, 1, 1], [0, 0, 1, 1])
        # of x, the context after A0 has the mean 1.5, that after A1 has 4.5
        assert structure(third) == ([0] * 4, [0, 0, 1, 1], [0, 0, 1, 1])
        assert third.prompts[0] == ["after A4"] * 2 + ["after A5"] * 2

    def test_a_context_in_the_middle_is_pruned_and_the_numbers_close_up(self):
        reward = by_text({"A2": 9.0, "A3": 9.0})
        _, second, third = roll_out(
            [Counter("A")], rows_of("x", "y", "z"), reward=reward, num_turns=3, early_termination_threshold=0.5
        )
        assert structure(second) == ([0] * 4 + [2] * 4, [0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 1, 1, 4, 4, 5, 5])
        assert [row["prompt"] for row in second.rows] == ["x"] * 4 + ["z"] * 4
        assert third.tasks == [0] * 8 + [2] * 8

    def test_in_a_chain_a_joint_responses_own_reward_decides(self):
        reward = by_text({"A0": 1.0, "A1": 3.0, "A2": 0.0, "A3": 5.0, "A4": 2.5})
        _, second, third = roll_out(
            [Counter("A"), Counter("B")],
            rows_of("x", "y"),
            reward=reward,
            num_turns=3,
            tree=False,
            early_termination_threshold=2.0,
        )
        assert structure(second) == ([0, 1], [0, 1], [0, 2])
        assert second.prompts[0] == ["after A0", "after A2"]
        assert structure(third) == ([1], [0], [1])

    def test_with_rewards_for_each_actor_their_mean_decides(self):
        def reward(first, second):
            return [[9.0, 0.0], [0.0, 4.0]] if len(first) > 1 else [0.0]  # means 4.5 and 2

        _, second = roll_out(
            [Counter("A"), Counter("B")],
            rows_of("x"),
            reward=reward,
            num_turns=2,
            tree=False,
            early_termination_threshold=2.0,
        )[:2]
        assert second.parents.tolist() == [1]

    @pytest.mark.parametrize("missing", [None, float("nan")])
    def test_a_missing_reward_ends_no_chain(self, missing):
        turns = roll_out(
            [Counter("A")],
            rows_of("x"),
            reward=by_text({"A0": missing, "A1": 5.0}),
            num_turns=2,
            tree=False,
            early_termination_threshold=2.0,
        )
        assert structure(turns[1]) == ([0], [0], [0])

    @pytest.mark.parametrize(("other", "turns"), [(5.0, 1), (1.0, 2), (None, 2)])
    def test_a_missing_reward_is_left_out_of_a_contexts_mean(self, other, turns):
        reward = by_text({"A0": None, "A1": other})
        rolled_out = roll_out(
            [Counter("A")], rows_of("x"), reward=reward, num_turns=2, early_termination_threshold=2.0
        )
        assert len(rolled_out) == turns

    @pytest.mark.parametrize("tree", [True, False])
    def test_where_all_end_there_are_no_more_turns_and_the_environment_is_not_asked(self, tree):
        calls = []
        turns = roll_out(
            [Counter("A")],
            rows_of("x", "y"),
            reward=lambda a: [3.0] * len(a),
            transition=lambda prompt, agent_completions, num_agents: calls.append(1),
            num_turns=4,
            tree=tree,
            early_termination_threshold=2.0,
        )
        assert len(turns) == 1 and calls == []

    def test_the_weighted_sum_of_the_functions_decides(self):
        turns = roll_out(
            [Counter("A")],
            rows_of("x"),
            reward=[by_text({"A0": 1.5}), by_text({"A0": 1.0})],
            num_turns=2,
            tree=False,
            early_termination_threshold=2.0,
        )
        assert turns[1].parents.tolist() == [1]


class TestWanted:
    """`num_wanted`: what only fills the last batch of an evaluation is neither scored nor continued."""

    @pytest.mark.parametrize("threshold", [None, 100.0])
    def test_only_what_is_wanted_goes_on(self, threshold):
        asked = []

        def environment(prompt, agent_completions, num_agents):
            asked.append(prompt)
            return ["p"]

        _, second, third = roll_out(
            [Counter("A")],
            rows_of("x", "y", "z"),
            transition=environment,
            num_wanted=4,
            num_turns=3,
            tree=False,
            early_termination_threshold=threshold,
        )
        assert structure(second) == structure(third) == ([0, 0, 1, 1], [0, 1, 2, 3], [0, 1, 2, 3])
        assert asked == ["x", "x", "y", "y"] * 2
        assert not second.rewards.isnan().any() and not third.rewards.isnan().any()


class TestCalls:
    """Turns are batched over all contexts, and no call is larger than the first turn's."""

    def test_a_chain_takes_one_call_of_each_actor_for_a_turn(self):
        log = []
        actors = [Counter("A", log), Counter("B", log)]
        roll_out(actors, rows_of("x", "y", "z"), num_turns=3, tree=False)
        assert log == ["A", "B"] * 3
        assert [actor.sizes for actor in actors] == [[6, 6, 6]] * 2

    def test_contexts_of_different_tasks_are_asked_together(self):
        actor = Counter("A")
        roll_out([actor], rows_of("x", "y"), num_turns=2, tree=False)
        assert actor.asked[1] == ["after A0", "after A1", "after A2", "after A3"]

    def test_a_tree_is_cut_into_parts_of_the_first_turns_size(self):
        actor = Counter("A")
        roll_out([actor], rows_of("x"), num_turns=3)
        assert actor.sizes == [2, 2, 2, 2, 2, 2, 2]
        assert actor.kept == actor.sizes

    def test_the_last_part_may_be_smaller(self):
        actor = Counter("A")
        reward = by_text({f"A{i}": 9.0 for i in (2, 3, 4, 5)})  # y and z end
        roll_out([actor], rows_of("x", "y", "z"), reward=reward, num_turns=3, early_termination_threshold=1.0)
        assert actor.sizes == [6, 4, 6, 2]

    def test_what_has_ended_is_not_sampled(self):
        actor = Counter("A")
        roll_out(
            [actor],
            rows_of("x", "y"),
            reward=by_text({"A1": 9.0}),
            num_turns=2,
            tree=False,
            early_termination_threshold=1.0,
        )
        assert actor.asked[1] == ["after A0", "after A2", "after A3"]


class TestRewardCalls:
    """One call for each task and turn, with all joint responses that the task has there."""

    @staticmethod
    def calls(**settings):
        calls = []

        def reward(first, second, batch_items, turn):
            calls.append((turn, batch_items[0]["gold"], list(zip(first, second, strict=True))))
            assert len({row["gold"] for row in batch_items}) == 1
            return [0.0] * len(first)

        roll_out([Counter("A"), Counter("B")], rows_of("x", "y"), reward=reward, num_turns=2, **settings)
        return calls

    @staticmethod
    def pairs(*numbers):
        return [(f"A{i}", f"B{i}") for i in numbers]

    def test_in_a_tree(self):
        assert self.calls() == [
            (1, "X", self.pairs(0, 1)),
            (1, "Y", self.pairs(2, 3)),
            (2, "X", self.pairs(4, 5, 6, 7)),
            (2, "Y", self.pairs(8, 9, 10, 11)),
        ]

    def test_in_a_chain(self):
        assert self.calls(tree=False) == [
            (1, "X", self.pairs(0, 1)),
            (1, "Y", self.pairs(2, 3)),
            (2, "X", self.pairs(4, 5)),
            (2, "Y", self.pairs(6, 7)),
        ]

    def test_crossed(self):
        calls = self.calls(cross=True)
        assert [(turn, gold, len(joint)) for turn, gold, joint in calls] == [
            (1, "X", 4),
            (1, "Y", 4),
            (2, "X", 16),
            (2, "Y", 16),
        ]

    def test_the_batched_option_takes_one_for_a_turn(self):
        seen = []

        def reward(first, batch_items, turn):
            seen.append((turn, [row["gold"] for row in batch_items]))
            return [0.0] * len(first)

        roll_out([Counter("A")], rows_of("x", "y"), reward=reward, batched=True, num_turns=2, tree=False)
        assert seen == [(1, ["X", "X", "Y", "Y"]), (2, ["X", "X", "Y", "Y"])]

    def test_a_task_that_has_ended_is_not_scored_again(self):
        seen = []

        def reward(first, batch_items, turn):
            seen.append((turn, batch_items[0]["gold"], len(first)))
            return [9.0 if batch_items[0]["gold"] == "X" else 0.0] * len(first)

        roll_out([Counter("A")], rows_of("x", "y"), reward=reward, num_turns=2, early_termination_threshold=1.0)
        assert seen == [(1, "X", 2), (1, "Y", 2), (2, "Y", 4)]


class TestExternalPrompts:
    """What the environment says reaches an actor through its formatter, or as it is."""

    @staticmethod
    def prompts(formatters, **settings):
        turns = roll_out([Counter("A"), Counter("B")], rows_of("x"), formatters, num_turns=2, tree=False, **settings)
        return turns[1].prompts

    def test_by_default_it_is_the_prompt_of_the_formatters_row(self):
        rows = []

        def formatter(row):
            rows.append(row)
            return f"[{row['prompt']}]"

        assert self.prompts(formatter) == [["[after A0]", "[after A1]"], ["[after B0]", "[after B1]"]]
        assert rows[0] == {"prompt": "x", "gold": "X"}
        assert rows[2] == {"prompt": "after A0", "_original_prompt": "x", "gold": "X"}

    def test_a_formatter_may_take_it_by_name(self):
        def formatter(row, external_prompts=None):
            return f"{row['gold']} {external_prompts}"

        assert self.prompts([formatter, lambda row: row["prompt"]])[0] == ["X after A0", "X after A1"]

    def test_without_formatters_it_is_the_prompt(self):
        assert self.prompts(None) == [["after A0", "after A1"], ["after B0", "after B1"]]

    @pytest.mark.parametrize("settings", [{}, {"tree": False}, {"sequential": True}])
    def test_messages_that_functions_change_in_place_are_the_same_for_every_branch(self, settings):
        """A formatter that adds a message to the row's, an environment that adds one to what was asked before."""

        def formatter(row, earlier_completions=()):
            row["prompt"].append({"role": "user", "content": "answer"})
            return row["prompt"]

        def environment(prompt, agent_completions, num_agents, prompt_history_per_agent):
            asked = [past[-1] for past in prompt_history_per_agent]
            for messages_, said in zip(asked, agent_completions, strict=True):
                messages_.append({"role": "assistant", "content": said})
            return asked

        rows = [{"prompt": messages("x")} for _ in range(2)]
        turns = roll_out(
            [Counter("A"), Counter("B")], rows, formatter, transition=environment, num_turns=2, **settings
        )
        user = {"role": "user", "content": "answer"}
        for agent, name in enumerate("AB"):
            assert turns[0].prompts[agent] == [[*messages("x"), user]] * 2
            contexts = [0, 1] if settings.get("tree") is False else [0, 0, 1, 1]
            expected = [
                [*messages("x"), user, {"role": "assistant", "content": f"{name}{number}"}, user]
                for number in contexts
            ]
            assert turns[1].prompts[agent] == expected
        assert rows == [{"prompt": messages("x")}] * 2

    def test_passed_through_no_formatter_sees_it(self):
        calls = []

        def formatter(row):
            calls.append(row["prompt"])
            return f"[{row['prompt']}]"

        assert self.prompts(formatter, external_prompt_passthrough=True) == [
            ["after A0", "after A1"],
            ["after B0", "after B1"],
        ]
        assert calls == ["x", "x"]

    def test_the_rows_keep_the_datasets_prompt_for_rewards_and_environment(self):
        seen = []

        def environment(prompt, agent_completions, num_agents, batch_item):
            seen.append((prompt, batch_item))
            return ["p"]

        turns = roll_out([Counter("A")], rows_of("x"), transition=environment, num_turns=3, tree=False)
        assert seen == [("x", {"prompt": "x", "gold": "X"})] * 4
        assert turns[2].rows == rows_of("x")

    @pytest.mark.parametrize("passthrough", [False, True])
    def test_texts_and_messages_in_one_batch_are_an_error_that_names_the_actor(self, passthrough):
        """B20: an environment may answer some branches with messages."""

        def environment(prompt, agent_completions, num_agents):
            return ["p" if agent_completions[0] == "A0" else messages("p")]

        with pytest.raises(ValueError, match="A got both"):
            roll_out(
                [Counter("A")],
                rows_of("x"),
                transition=environment,
                num_turns=2,
                external_prompt_passthrough=passthrough,
            )


class TestSequentialTurns:
    """A later actor of a turn hears, in each sample, what those before it said there."""

    @staticmethod
    def hearing(row, earlier_completions=None):
        return " ".join([row["prompt"], *(earlier_completions or [])])

    def test_each_sample_has_its_own_earlier_texts(self):
        actors = [Counter("A"), Counter("B"), Counter("C")]
        (turn,) = roll_out(actors, rows_of("x", "y"), self.hearing, sequential=True)
        assert turn.prompts == [
            ["x", "x", "y", "y"],
            ["x A0", "x A1", "y A2", "y A3"],
            ["x A0 B0", "x A1 B1", "y A2 B2", "y A3 B3"],
        ]

    def test_in_a_later_turn_they_are_those_of_that_turn(self):
        _, second = roll_out([Counter("A"), Counter("B")], rows_of("x"), self.hearing, sequential=True, num_turns=2)
        assert second.prompts == [
            ["after A0", "after A0", "after A1", "after A1"],
            ["after B0 A2", "after B0 A3", "after B1 A4", "after B1 A5"],
        ]

    def test_an_actor_that_does_not_listen_shares_its_prompt_with_its_context(self):
        calls = []

        def deaf(row):
            calls.append(1)
            return row["prompt"]

        actors = [Counter("A"), Counter("B"), Counter("C")]
        (turn,) = roll_out(actors, rows_of("x"), [deaf, deaf, self.hearing], sequential=True)
        assert len(calls) == 2
        assert turn.prompts == [["x", "x"], ["x", "x"], ["x A0 B0", "x A1 B1"]]

    def test_the_first_actor_is_asked_once_for_a_context_with_an_empty_list(self):
        calls = []

        def formatter(row, earlier_completions=None):
            calls.append(earlier_completions)
            return row["prompt"]

        roll_out([Counter("A"), Counter("B")], rows_of("x"), formatter, sequential=True)
        assert calls == [[], ["A0"], ["A1"]]

    def test_in_simultaneous_turns_nobody_hears(self):
        (turn,) = roll_out([Counter("A"), Counter("B")], rows_of("x"), self.hearing)
        assert turn.prompts == [["x", "x"]] * 2

    def test_the_history_has_the_prompts_as_they_were_asked(self):
        seen = []

        def environment(prompt, agent_completions, num_agents, prompt_history_per_agent):
            seen.append(prompt_history_per_agent)
            return ["p", "q"]

        roll_out(
            [Counter("A"), Counter("B")],
            rows_of("x"),
            self.hearing,
            transition=environment,
            sequential=True,
            num_turns=2,
            tree=False,
        )
        assert seen == [[["x"], ["x A0"]], [["x"], ["x A1"]]]


class TestHistory:
    """The environment gets what was said along its own branch."""

    @staticmethod
    def histories(**settings):
        seen = []

        def environment(prompt, agent_completions, num_agents, **history):
            seen.append((history["prompt_history_per_agent"], history["response_history_per_agent"]))
            return after(prompt, agent_completions, num_agents)

        roll_out([Counter("A"), Counter("B")], rows_of("x"), transition=environment, num_turns=3, **settings)
        return seen

    def test_in_a_tree(self):
        seen = self.histories()
        assert seen[:2] == [([["x"], ["x"]], [["A0"], ["B0"]]), ([["x"], ["x"]], [["A1"], ["B1"]])]
        assert [responses for _, responses in seen[2:]] == [
            [["A0", "A2"], ["B0", "B2"]],
            [["A0", "A3"], ["B0", "B3"]],
            [["A1", "A4"], ["B1", "B4"]],
            [["A1", "A5"], ["B1", "B5"]],
        ]
        assert [prompts for prompts, _ in seen[2:]] == [
            [["x", "after A0"], ["x", "after B0"]],
            [["x", "after A0"], ["x", "after B0"]],
            [["x", "after A1"], ["x", "after B1"]],
            [["x", "after A1"], ["x", "after B1"]],
        ]

    def test_in_a_chain(self):
        assert [responses for _, responses in self.histories(tree=False)[2:]] == [
            [["A0", "A2"], ["B0", "B2"]],
            [["A1", "A3"], ["B1", "B3"]],
        ]

    def test_of_a_combination_each_actors_own_part(self):
        first = self.histories(cross=True)[:4]
        assert sorted(responses for _, responses in first) == [
            [["A0"], ["B0"]],
            [["A0"], ["B1"]],
            [["A1"], ["B0"]],
            [["A1"], ["B1"]],
        ]


class Processes:
    """Processes as threads: what one accelerator reduces or gathers is summed or joined over all of them."""

    def __init__(self, world):
        self.world, self.barrier = world, threading.Barrier(world, timeout=60)
        self.slots = [None] * world
        self.own = threading.local()

    def exchange(self, value):
        self.slots[self.own.rank] = value
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values

    def gather_object(self, values):
        return [value for part in self.exchange(values) for value in part]

    def run(self, function):
        """`function(accelerator)` in each process; the results in their order."""
        results, errors = [None] * self.world, []

        def work(rank):
            self.own.rank = rank
            accelerator = SimpleNamespace(
                num_processes=self.world,
                process_index=rank,
                device=torch.device("cpu"),
                reduce=lambda tensor, reduction: torch.stack(self.exchange(tensor)).sum(dim=0),
            )
            try:
                results[rank] = function(accelerator)
            except Exception as error:  # seen below; the others must not wait for this one
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


class Numbered(Actor):
    """Numbers its answers to each prompt, so that they do not depend on the process that asks."""

    def __init__(self, name):
        super().__init__(name)
        self.numbers = defaultdict(int)

    def answer(self, prompt):
        self.numbers[prompt] += 1
        return f"{prompt}{self.name}{self.numbers[prompt]}"


def continued(prompt, agent_completions, num_agents):
    return [f"{text}>" for text in agent_completions]


class TestProcesses:
    """The order of a turn, with every baseline that follows from it, is the same for any number of processes."""

    @staticmethod
    def reward(first, second):
        # x ends in its first turn; other contexts now and then
        return [9.0 if a.startswith("x") else float(len(a) * a.count("1") % 5) for a in first]

    def both(self, monkeypatch, tasks, **settings):
        rows = rows_of(*tasks)

        def run(accelerator, own):
            actors = [Numbered("A"), Numbered("B")]
            turns = roll_out(
                actors, own, reward=self.reward, transition=continued, accelerator=accelerator, num_turns=3, **settings
            )
            return turns, actors

        one, _ = run(None, rows)
        processes = Processes(2)
        monkeypatch.setattr(interaction, "gather_object", processes.gather_object)
        half = len(rows) // 2
        return one, processes.run(lambda a: run(a, rows[:half] if a.process_index == 0 else rows[half:]))

    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"tree": False},
            {"early_termination_threshold": 4.0},
            {"early_termination_threshold": 3.0, "tree": False},
            {"cross": True},
            {"cross": True, "cross_samples": 1, "early_termination_threshold": 4.0},
        ],
        ids=lambda settings: "-".join(settings) or "tree",
    )
    def test_two_with_uneven_branches_are_one(self, monkeypatch, settings):
        one, two = self.both(monkeypatch, "xyzw", **settings)
        for turns, _ in two:
            assert len(turns) == len(one)
            for turn, expected in zip(turns, one, strict=True):
                assert structure(turn) == structure(expected)
                assert torch.equal(turn.pairing.members, expected.pairing.members)
                assert torch.equal(turn.rewards, expected.rewards)
        for number, expected in enumerate(one):
            parts = [turns[number] for turns, _ in two]
            assert parts[0].counts == parts[1].counts == [len(part.branches) for part in parts]
            assert [part.start for part in parts] == [0, parts[0].counts[0]]
            for agent in range(2):
                assert parts[0].completions[agent] + parts[1].completions[agent] == expected.completions[agent]

    def test_both_make_the_same_calls_where_one_has_fewer_branches(self, monkeypatch):
        """Else collective operations of sharded weights would wait for ever."""
        _, two = self.both(monkeypatch, "xyzw", early_termination_threshold=4.0)
        (first_turns, first), (second_turns, second) = two
        assert first_turns[1].counts[0] < first_turns[1].counts[1]
        for left, right in zip(first, second, strict=True):
            assert left.sizes == right.sizes
            assert sum(left.kept) == sum(len(turn.branches) for turn in first_turns)
            assert sum(right.kept) == sum(len(turn.branches) for turn in second_turns)

    def test_a_process_without_any_branch_makes_the_same_calls(self, monkeypatch):
        _, two = self.both(monkeypatch, "xz", early_termination_threshold=4.0, tree=False)
        (turns, first), (_, second) = two
        assert len(turns) > 1 and turns[1].counts == [0, 2]
        assert [actor.sizes for actor in first] == [actor.sizes for actor in second]
        assert [actor.kept[1] for actor in first] == [0, 0]
        assert [actor.asked[1] for actor in first] == [["x", "x"]] * 2  # it has no other prompt

    def test_where_a_process_has_fewer_prompts_one_of_the_same_turn_fills_up(self, monkeypatch):
        _, ((turns, first), (_, second)) = self.both(monkeypatch, "xyzw", early_termination_threshold=4.0)
        assert turns[1].counts[0] < turns[1].counts[1]
        for agent, actor in enumerate(first):
            asked = [prompt for prompts in actor.asked[1:3] for prompt in prompts]
            own = turns[1].prompts[agent]
            assert asked[: len(own)] == own and asked[len(own) :] == [own[0]] * (turns[1].counts[1] - len(own))
        assert second[0].asked[1][0] == turns[1].prompts[0][0].replace("y", "z")

    def spanning(self, monkeypatch, rows, generations):
        """Two processes with half of the rows each: what the reward function and the formatters saw, and the turns."""
        rewarded, formatted = [], {0: [], 1: []}
        processes = Processes(2)
        monkeypatch.setattr(interaction, "gather_object", processes.gather_object)

        def reward(first, second, batch_items):
            rewarded.append((first, second, [row["gold"] for row in batch_items]))
            return [float(ord(row["gold"])) for row in batch_items]

        def run(accelerator):
            rank = accelerator.process_index
            half = len(rows) // 2
            actors = [Counter(f"A{rank}-"), Counter(f"B{rank}-")]
            return roll_out(
                actors,
                rows[rank * half :][:half],
                [lambda row: formatted[rank].append(row["prompt"]) or row["prompt"], lambda row: row["prompt"]],
                reward=reward,
                accelerator=accelerator,
                generations=generations,
            )

        turns = [turns[0] for turns in processes.run(run)]
        return sorted(rewarded, key=lambda call: call[2]), formatted, turns

    def test_a_group_that_spans_them_is_scored_whole_in_one(self, monkeypatch):
        rewarded, _, turns = self.spanning(monkeypatch, rows_of("x", generations=4), 4)
        assert rewarded == [(["A0-0", "A0-1", "A1-0", "A1-1"], ["B0-0", "B0-1", "B1-0", "B1-1"], ["X"] * 4)]
        assert all(turn.rewards[:, :, 0].tolist() == [[88.0] * 4] * 2 for turn in turns)

    def test_one_that_starts_within_a_group_sees_where_the_next_begins(self, monkeypatch):
        rewarded, formatted, turns = self.spanning(monkeypatch, rows_of("x", "y", "z"), 2)
        assert formatted == {0: ["x", "y"], 1: ["y", "z"]}
        assert rewarded == [
            (["A0-0", "A0-1"], ["B0-0", "B0-1"], ["X", "X"]),
            (["A0-2", "A1-0"], ["B0-2", "B1-0"], ["Y", "Y"]),
            (["A1-1", "A1-2"], ["B1-1", "B1-2"], ["Z", "Z"]),
        ]
        for turn in turns:
            assert turn.tasks == [0, 0, 1, 1, 2, 2] and turn.counts == [3, 3]
            assert turn.rewards[0, :, 0].tolist() == [88.0, 88.0, 89.0, 89.0, 90.0, 90.0]

    @pytest.mark.parametrize("tree", [True, False])
    def test_turns_that_follow_such_a_group_are_those_of_one_process(self, monkeypatch, tree):
        rows = rows_of("x", "y", "z")

        def reward(first, batch_items, turn):
            return [9.0 if (row["gold"], turn) in (("X", 1), ("Z", 2)) else float(turn) for row in batch_items]

        def run(accelerator, own):
            return roll_out(
                [Echo("A")],
                own,
                reward=reward,
                accelerator=accelerator,
                num_turns=3,
                tree=tree,
                early_termination_threshold=5.0,
            )

        one = run(None, rows)
        processes = Processes(2)
        monkeypatch.setattr(interaction, "gather_object", processes.gather_object)
        for turns in processes.run(lambda a: run(a, rows[3 * a.process_index :][:3])):
            assert [structure(turn) for turn in turns] == [structure(turn) for turn in one]
            assert all(torch.equal(turn.rewards, expected.rewards) for turn, expected in zip(turns, one, strict=True))
        width = 2 if tree else 1
        assert [len(turn.tasks) for turn in one] == [6, 4 * width, 2 * width * width]
