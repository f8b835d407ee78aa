# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Joint rollouts and their scores, with actors that only repeat what they were asked."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from trl_multiagent.rewards import JointReward
from trl_multiagent.rollouts.joint import (
    JointRollout,
    check_formatters,
    prompt_column,
    prompt_text,
    resolve_formatters,
    sample_joint,
    score_joint,
)


class EchoActor:
    """Answers with its name and the prompt, and notes what it was asked."""

    def __init__(self, name, log=None):
        self.name, self.asked, self.log = name, [], [] if log is None else log

    def sample(self, prompts):
        self.log.append(self.name)
        self.asked.append(prompts)
        return [f"{self.name}: {prompt if isinstance(prompt, str) else prompt[-1]['content']}" for prompt in prompts]


def rows_of(*values, generations=2):
    return [{"prompt": value, "gold": value.upper()} for value in values for _ in range(generations)]


def messages(text):
    return [{"role": "system", "content": "be brief"}, {"role": "user", "content": text}]


class TestFormatters:
    """E10: one for all actors or one for each, from a dataset row to a text or to messages."""

    def test_without_one_every_actor_gets_the_column_prompt(self):
        assert resolve_formatters(None, 3) == [prompt_column] * 3
        assert prompt_column({"prompt": "p", "other": 1}) == "p"

    def test_one_serves_all_actors(self):
        assert resolve_formatters(str, 2) == [str, str]

    @pytest.mark.parametrize("container", [list, tuple])
    def test_a_list_is_in_actor_order(self, container):
        assert resolve_formatters(container([str, repr]), 2) == [str, repr]

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_a_list_of_the_wrong_length_is_an_error_with_both_numbers(self, count):
        with pytest.raises(ValueError, match=rf"{count} entries, expected 2"):
            resolve_formatters([str] * count, 2)

    def test_an_entry_that_is_not_callable_is_named(self):
        with pytest.raises(TypeError, match=r"formatters\[1\]"):
            resolve_formatters([str, "prompt"], 2)


class TestPromptText:
    def test_a_text_stays_as_it_is(self):
        assert prompt_text("as it is") == "as it is"

    def test_messages_become_lines(self):
        assert prompt_text(messages("hello")) == "system: be brief\nuser: hello"


class TestSampling:
    def test_sample_j_of_every_actor_forms_joint_sample_j(self):
        actors = [EchoActor("A"), EchoActor("B")]
        rollout = sample_joint(actors, rows_of("x", "y"), resolve_formatters(None, 2), 2)
        assert rollout.prompts == [["x", "x", "y", "y"]] * 2
        assert rollout.completions == [["A: x", "A: x", "A: y", "A: y"], ["B: x", "B: x", "B: y", "B: y"]]
        assert rollout.rows == rows_of("x", "y")

    def test_each_actor_gets_its_own_formatters_prompt(self):
        actors = [EchoActor("A"), EchoActor("B")]
        formatters = [lambda row: f"ask {row['prompt']}", lambda row: messages(f"check {row['gold']}")]
        rollout = sample_joint(actors, rows_of("x"), formatters, 2)
        assert rollout.prompts == [["ask x"] * 2, [messages("check X")] * 2]
        assert rollout.completions == [["A: ask x"] * 2, ["B: check X"] * 2]

    def test_actors_are_asked_once_each_in_their_order(self):
        log = []
        actors = [EchoActor(name, log) for name in "CAB"]
        sample_joint(actors, rows_of("x", "y"), resolve_formatters(None, 3), 2)
        assert log == ["C", "A", "B"]
        assert [len(actor.asked) for actor in actors] == [1, 1, 1]

    def test_a_formatter_is_called_once_for_a_group_so_that_the_group_shares_its_prompt(self):
        calls = []

        def counting(row):
            calls.append(row["prompt"])
            return f"{row['prompt']} number {len(calls)}"

        rollout = sample_joint([EchoActor("A")], rows_of("x", "y", generations=3), [counting], 3)
        assert calls == ["x", "y"]
        assert rollout.prompts == [["x number 1"] * 3 + ["y number 2"] * 3]

    def test_neighbouring_groups_with_equal_rows_are_two_groups(self):
        calls = []
        sample_joint([EchoActor("A")], rows_of("x", "x"), [lambda row: calls.append(1) or "text"], 2)
        assert len(calls) == 2

    def test_one_formatter_for_two_actors_is_called_for_each_of_them(self):
        calls = []

        def formatter(row):
            calls.append(1)
            return "text"

        sample_joint([EchoActor("A"), EchoActor("B")], rows_of("x"), [formatter, formatter], 2)
        assert len(calls) == 2

    def test_a_process_that_starts_within_a_group_sees_where_the_next_begins(self):
        calls = []

        def counting(row):
            calls.append(row["prompt"])
            return row["prompt"]

        # joint samples 2, 3, 4, 5 of groups of three: one more of the first, then a whole second
        rows = [{"prompt": "x"}] + [{"prompt": "y"}] * 3
        sample_joint([EchoActor("A")], rows, [counting], 3, first_sample=2)
        assert calls == ["x", "y"]

    def test_what_a_formatter_does_to_its_row_stays_its_own(self):
        rows = rows_of("x")
        sample_joint([EchoActor("A"), EchoActor("B")], rows, [lambda row: row.pop("prompt")] * 2, 2)
        assert rows == rows_of("x")

    def test_an_actor_gets_a_list_of_its_own(self):
        class Greedy(EchoActor):
            def sample(self, prompts):
                answers = super().sample(list(prompts))
                prompts.clear()
                return answers

        rollout = sample_joint([Greedy("A")], rows_of("x"), [prompt_column], 2)
        assert rollout.prompts == [["x", "x"]]

    @pytest.mark.parametrize(
        "prompt",
        [None, 3, b"bytes", {"role": "user", "content": "x"}, ["a", "b"], [], [{"text": "no role"}]],
        ids=["None", "int", "bytes", "dict", "texts", "empty", "no_role"],
    )
    def test_a_prompt_of_another_kind_is_an_error_that_names_the_agent(self, prompt):
        with pytest.raises(ValueError, match="agent_1"):
            sample_joint([EchoActor("A"), EchoActor("B")], rows_of("x"), [prompt_column, lambda row: prompt], 2)

    def test_texts_and_messages_in_one_batch_are_an_error_that_names_the_agent(self):
        def mixed(row):
            return row["prompt"] if row["prompt"] == "x" else messages(row["prompt"])

        with pytest.raises(ValueError, match="agent_0 got both"):
            sample_joint([EchoActor("A")], rows_of("x", "y"), [mixed], 2)

    def test_an_exception_of_a_formatter_surfaces_unchanged(self):
        with pytest.raises(KeyError, match="question"):
            sample_joint([EchoActor("A")], rows_of("x"), [lambda row: row["question"]], 2)


class TestCheckBeforeTraining:
    """B20: what would fail in the first step fails at construction, and names the agent."""

    plain, chatty = SimpleNamespace(chat_template=None), SimpleNamespace(chat_template="{{ messages }}")

    def test_a_row_without_prompt_is_an_error_with_its_columns(self):
        with pytest.raises(ValueError, match=r"agent_0.*'question'"):
            check_formatters({"question": "x"}, [prompt_column], [self.plain])

    def test_messages_without_a_chat_template_are_an_error_that_names_the_agent(self):
        with pytest.raises(ValueError, match="agent_1.*chat template"):
            check_formatters(
                {"prompt": "x"}, [prompt_column, lambda row: messages(row["prompt"])], [self.plain, self.plain]
            )

    def test_messages_with_one_and_texts_without_one_are_fine(self):
        check_formatters(
            {"prompt": "x"}, [prompt_column, lambda row: messages(row["prompt"])], [self.plain, self.chatty]
        )

    def test_a_prompt_of_another_kind_is_an_error_that_names_the_agent(self):
        with pytest.raises(ValueError, match="agent_0.*NoneType"):
            check_formatters({"prompt": None}, [prompt_column], [self.plain])


class TestScoring:
    """Rewards of one process's joint samples; several processes are tested where they are started."""

    @staticmethod
    def rollout(samples):
        rows = [{"gold": j // 2} for j in range(samples)]
        return JointRollout(rows, [["p"] * samples] * 2, [[f"a{i}s{j}" for j in range(samples)] for i in range(2)])

    def test_the_shape_is_actors_by_joint_samples_by_functions(self):
        reward = JointReward([lambda a, b: [1.0] * len(a), lambda a, b: [[2.0] * len(a), [3.0] * len(a)]], 2)
        rewards = score_joint(self.rollout(4), reward, 2, Accelerator(cpu=True))
        assert rewards.shape == (2, 4, 2)
        assert rewards[0, 0].tolist() == [1.0, 2.0] and rewards[1, 3].tolist() == [1.0, 3.0]

    def test_samples_that_only_fill_the_last_batch_of_an_evaluation_are_not_scored(self):
        seen = []

        def reward(first, second, batch_items):
            seen.append((first, [row["gold"] for row in batch_items]))
            return [1.0] * len(first)

        rewards = score_joint(self.rollout(6), JointReward(reward, 2), 2, Accelerator(cpu=True), num_samples=4)
        assert seen == [(["a0s0", "a0s1"], [0, 0]), (["a0s2", "a0s3"], [1, 1])]
        assert rewards[0, :, 0].isnan().tolist() == [False] * 4 + [True] * 2

    def test_nothing_is_called_where_nothing_is_wanted(self):
        calls = []
        reward = JointReward(lambda a, b: calls.append(1), 2)
        rewards = score_joint(self.rollout(2), reward, 2, Accelerator(cpu=True), num_samples=0)
        assert calls == [] and torch.isnan(rewards).all()
