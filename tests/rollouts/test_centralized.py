# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""One actor for N roles: what it is asked, how its sections are read, and how they are rewarded."""

import asyncio
import functools
import inspect

import numpy as np
import pytest
import torch

from trl_multiagent.rewards import JointReward
from trl_multiagent.rollouts.centralized import CentralizedFormatter, CentralizedReward, JointResponseFormat
from trl_multiagent.rollouts.formatters import ActorFormatter, resolve_formatters


FORMAT = JointResponseFormat()
GOOD = "<agent_0>a</agent_0><agent_1>b</agent_1>"


def user(text):
    return [{"role": "user", "content": text}]


def joint(*texts):
    return "".join(f"<agent_{role}>{text}</agent_{role}>" for role, text in enumerate(texts))


class TestParsing:
    @pytest.mark.parametrize(
        ("completion", "expected"),
        [
            (GOOD, ["a", "b"]),
            ("<agent_0>\n a \n</agent_0>\n\n<agent_1>\tb c </agent_1>", ["a", "b c"]),
            ("<agent_1>b</agent_1><agent_0>a</agent_0>", ["a", "b"]),
            ("Sure! <agent_0>a</agent_0> and <agent_1>b</agent_1> Done.", ["a", "b"]),
            ("<AGENT_0>a</Agent_0><aGeNt_1>b</agent_1>", ["a", "b"]),
            ("< agent_0 >a</ agent_0 >< agent _ 1>b< / agent_1\n>", ["a", "b"]),
            ("<agent_0></agent_0><agent_1>  </agent_1>", ["", ""]),
            ("<agent_0>line 1\n\nline 2</agent_0><agent_1>b</agent_1>", ["line 1\n\nline 2", "b"]),
            ("<agent_0>größer 你好 🙂</agent_0><agent_1>ñ</agent_1>", ["größer 你好 🙂", "ñ"]),
            ("<agent_0>if a < b > c: <b>x</b></agent_0><agent_1></p></agent_1>", ["if a < b > c: <b>x</b>", "</p>"]),
            ("<agent_0>a</agent_0><agent_1>b</agent_1><agent_2>c</agent_2>", ["a", "b"]),  # there is no role 2
            ("<agent_0>a <agent_7></agent_0><agent_1>b</agent_1></agent_10>", ["a <agent_7>", "b"]),
            ("<agent_0>a</agent_0><agent_1>b</agent_1><agent_00>c", ["a", "b"]),
            ("<agent_0>agent_1</agent_0><agent_1>&lt;agent_0&gt;</agent_1>", ["agent_1", "&lt;agent_0&gt;"]),
            (f"{GOOD}<agent_{'9' * 5000}>", ["a", "b"]),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_sections_are_read(self, completion, expected):
        assert FORMAT.parse(completion, 2) == expected

    @pytest.mark.parametrize(
        "completion",
        [
            "",
            "no section at all",
            "<agent_0>a</agent_0>",
            "<agent_1>b</agent_1>",
            "<agent_0>a</agent_0><agent_1>b",
            "<agent_0>a<agent_1>b</agent_1>",
            "<agent_0>a</agent_0><agent_1>b<agent_1>",
            "<agent_0>a</agent_1><agent_1>b</agent_0>",
            "</agent_0>a<agent_0></agent_1>b<agent_1>",
            "<agent_0>a<agent_1>b</agent_1></agent_0>",
            "<agent_0>a<agent_1>b</agent_0></agent_1>",
            "<agent_0>a<agent_0>b</agent_0></agent_0><agent_1>c</agent_1>",
            "<agent_0>a</agent_0><agent_0>b</agent_0><agent_1>c</agent_1>",
            "<agent_0>a</agent_0><agent_0>b</agent_0>",
            "<agent_0>a</agent_0><AGENT_0>a</AGENT_0><agent_1>c</agent_1>",
            f"First comes <agent_0>. {GOOD}",
            f"{GOOD}</agent_1>",
            "<agent_0>a</agent_0><agent_01>b</agent_01>",
            "<agent_0>a</agent_0><agent_1 b</agent_1>",
        ],
    )
    def test_a_section_that_is_missing_open_repeated_or_nested_makes_it_unparsable(self, completion):
        assert FORMAT.parse(completion, 2) is None

    def test_one_role_has_one_section(self):
        assert FORMAT.parse("x <agent_0> a </agent_0> y", 1) == ["a"]
        assert FORMAT.parse("a", 1) is None

    def test_twelve_roles_in_reverse(self):
        sections = [f"<agent_{role}>text {role}</agent_{role}>" for role in reversed(range(12))]
        assert FORMAT.parse("\n".join(sections), 12) == [f"text {role}" for role in range(12)]

    @pytest.mark.timeout(20)
    def test_long_odd_texts_take_no_time(self):
        for piece in ("<", "< ", " ", "<agent_0>", "<agent_0", "</", "<agent _ "):
            assert FORMAT.parse(piece * 50_000, 2) is None
        assert FORMAT.parse("<" + " " * 100_000 + "/" + " " * 100_000, 2) is None


class TestPrompt:
    def test_it_has_each_roles_prompt_and_the_layout(self):
        prompt = FORMAT.build_prompt({}, ["Write the head.", "Write the body."])
        places = [
            prompt.index(part)
            for part in (
                "Prompt of agent 0:\nWrite the head.",
                "Prompt of agent 1:\nWrite the body.",
                "<agent_0>...</agent_0>\n<agent_1>...</agent_1>",
            )
        ]
        assert places == sorted(places) and "2 agents" in prompt

    def test_its_layout_is_what_is_parsed(self):
        assert FORMAT.parse(FORMAT.build_prompt({}, ["p", "q", "r"]), 3) == ["..."] * 3

    def test_messages_become_one_user_message_that_holds_them_as_text(self):
        system = {"role": "system", "content": "be brief"}
        (message,) = FORMAT.build_prompt({}, [[system, *user("head")], user("body")])
        assert message["role"] == "user"
        assert "system: be brief\nuser: head" in message["content"] and "user: body" in message["content"]

    def test_texts_next_to_messages_become_messages_too(self):
        (message,) = FORMAT.build_prompt({}, ["head", user("body")])
        assert "\nhead" in message["content"] and "user: body" in message["content"]


class TestFormatter:
    def test_the_roles_formatters_see_the_row(self):
        roles = resolve_formatters([lambda row: f"head of {row['x']}", lambda row: f"body of {row['x']}"], ["a", "b"])
        prompt = CentralizedFormatter(roles, FORMAT)({"x": "it"})
        assert "Prompt of agent 0:\nhead of it" in prompt and "Prompt of agent 1:\nbody of it" in prompt

    def test_an_actor_takes_it_as_its_formatter(self):
        formatter = CentralizedFormatter(resolve_formatters(None, ["a", "b"]), FORMAT)
        actor = ActorFormatter("team", formatter)
        assert not actor.takes_earlier and actor.first_prompt({"prompt": "p"}).count("\np\n") == 2
        assert actor.first_prompt({"prompt": user("p")})[0]["content"].count("user: p") == 2

    def test_another_format_may_use_the_row(self):
        class Short(JointResponseFormat):
            def build_prompt(self, row, prompts):
                return f"{row['x']}: {prompts}"

        formatter = CentralizedFormatter(resolve_formatters(None, ["a", "b"]), Short())
        assert formatter({"prompt": "p", "x": 1}) == "1: ['p', 'p']"

    def test_a_role_cannot_change_the_row_of_the_next(self):
        def rude(row):
            row["prompt"][0]["content"] += "!"
            return row["prompt"]

        row = {"prompt": user("p")}
        (message,) = CentralizedFormatter(resolve_formatters(rude, ["a", "b"]), FORMAT)(row)
        assert message["content"].count("p!") == 2 and "!!" not in message["content"] and row == {"prompt": user("p")}

    def test_a_prompt_of_another_kind_is_an_error_that_names_the_role(self):
        formatter = CentralizedFormatter(resolve_formatters([str, lambda row: 3], ["a", "b"]), FORMAT)
        with pytest.raises(ValueError, match="^b: the prompt is a int"):
            formatter({})

    def test_a_role_that_wants_to_hear_the_others_is_refused(self):
        def listening(row, earlier_completions=()):
            return row["prompt"]

        with pytest.raises(ValueError, match="formatter of b takes `earlier_completions`"):
            CentralizedFormatter(resolve_formatters([str, listening], ["a", "b"]), FORMAT)


def lengths(first, second):
    """1 for each letter of the first role, 10 for each of the second."""
    return [len(a) + 10 * len(b) for a, b in zip(first, second, strict=True)]


def scored(func, completions, num_roles=2, **kwargs):
    rows = [{"number": number} for number in range(len(completions))]
    return CentralizedReward(func, num_roles, FORMAT, **kwargs)(completions, rows)


class TestReward:
    def test_the_function_gets_the_roles_texts_of_the_parsable_ones_in_one_call(self):
        calls = []

        def reward(first, second, batch_items):
            calls.append((first, second, batch_items))
            return [row["number"] + 0.5 for row in batch_items]

        rewards = scored(reward, [joint("a", "b"), "nonsense", joint("c", ""), "", joint("e", "f")])
        assert rewards == [0.5, None, 2.5, None, 4.5]
        assert calls == [(["a", "c", "e"], ["b", "", "f"], [{"number": 0}, {"number": 2}, {"number": 4}])]

    @pytest.mark.parametrize("unparsable_reward", [None, -1.0, 0])
    def test_an_unparsable_one_gets_the_reward_for_it(self, unparsable_reward):
        rewards = scored(lengths, ["?", joint("aa", "b"), "<agent_0>"], unparsable_reward=unparsable_reward)
        assert rewards == [unparsable_reward, 12, unparsable_reward]

    def test_where_nothing_is_parsable_the_function_is_not_called(self):
        def reward(first, second):
            raise AssertionError("called")

        assert scored(reward, ["x", "y"], unparsable_reward=-2.0) == [-2.0, -2.0]
        assert scored(reward, []) == []

    def test_one_role(self):
        assert scored(lambda texts: [float(text) for text in texts], [joint("3"), "4"], num_roles=1) == [3.0, None]

    def test_a_function_that_takes_anything_gets_the_rows_and_not_the_turn(self):
        def reward(*texts, **kwargs):
            assert sorted(kwargs) == ["batch_items"]
            return lengths(*texts)

        assert scored(reward, [GOOD]) == [11]

    def test_the_turn_is_passed_to_one_that_names_it(self):
        def reward(*texts, turn):
            return [turn for _ in texts[0]]

        assert CentralizedReward(reward, 2, FORMAT)([GOOD], [{}], turn=3) == [3]

    def test_a_role_may_be_called_turn(self):
        assert scored(lambda turn, answer: lengths(turn, answer), [GOOD]) == [11]

    @pytest.mark.parametrize(
        "values",
        [(1.0, 2.0), torch.tensor([1.0, 2.0]), list(torch.tensor([1.0, 2.0])), np.array([1.0, 2.0]), range(1, 3)],
        ids=lambda value: type(value).__name__,
    )
    def test_any_list_of_numbers_is_taken(self, values):
        rewards = scored(lambda first, second: values, [GOOD, "?", GOOD])
        assert [None if reward is None else float(reward) for reward in rewards] == [1.0, None, 2.0]

    def test_what_the_function_raises_surfaces_unchanged(self):
        def reward(first, second):
            raise KeyError("gold")

        with pytest.raises(KeyError, match="gold"):
            scored(reward, [GOOD])


class TestAsyncReward:
    async def later(self, first, second, batch_items):
        await asyncio.sleep(0)
        return lengths(first, second)

    def test_it_gives_an_awaitable_of_the_rewards(self):
        awaitable = scored(self.later, [GOOD, "?"], unparsable_reward=-1.0)
        assert inspect.isawaitable(awaitable) and asyncio.run(awaitable) == [11, -1.0]

    def test_where_nothing_is_parsable_there_is_nothing_to_await(self):
        assert scored(self.later, ["?"]) == [None]

    def test_a_list_of_lists_is_an_error_there_too(self):
        async def reward(first, second):
            return [[1.0], [2.0]]

        with pytest.raises(ValueError, match="a joint policy has one reward"):
            asyncio.run(scored(reward, [GOOD]))


class TestWithJointReward:
    """The actor's trainer calls it as it calls any reward function."""

    @pytest.mark.parametrize("is_async", [False, True])
    def test_it_is_a_reward_function_of_one_actor(self, is_async):
        async def later(first, second):
            return lengths(first, second)

        func = CentralizedReward(later if is_async else lengths, 2, FORMAT)
        rewards = JointReward(func, 1)([[GOOD, "?", joint("", "b"), "?"]], [{}] * 4, [2, 2])
        assert rewards.nan_to_num(-9.0).tolist() == [[[11.0], [-9.0], [10.0], [-9.0]]]

    @pytest.mark.parametrize(
        ("func", "name"),
        [
            (lengths, "lengths"),
            (functools.partial(lengths), "lengths"),
            (TestAsyncReward().later, "later"),
            (lambda a, b: [], "reward_func"),
        ],
    )
    def test_its_metric_name_is_that_of_the_function(self, func, name):
        wrapped = CentralizedReward(func, 2, FORMAT)
        assert wrapped.__name__ == name and JointReward(wrapped, 1).names == [name]


class TestErrors:
    @pytest.mark.parametrize(
        "values",
        [[[1.0, 2.0], [3.0, 4.0]], torch.ones(2, 2), np.ones((2, 2)), [torch.ones(2), torch.ones(2)], [[1.0], 2.0]],
        ids=lambda value: type(value).__name__,
    )
    def test_one_list_for_each_role_is_refused(self, values):
        with pytest.raises(ValueError, match=r"'<?\w+>?' returned a list of lists.*a joint policy has one reward"):
            scored(lambda first, second: values, [GOOD, GOOD])

    @pytest.mark.parametrize("values", [[], [1.0], [1.0, 2.0, 3.0]])
    def test_values_for_another_number_of_joint_responses_are_refused(self, values):
        with pytest.raises(ValueError, match=f"returned {len(values)} values, expected 2"):
            scored(lambda first, second: values, [GOOD, "?", GOOD])

    @pytest.mark.parametrize("value", [1.0, None, "12", {"a": 1}, torch.tensor(1.0), np.array(1.0), np.float64(1.0)])
    def test_what_is_no_list_is_refused(self, value):
        with pytest.raises(ValueError, match="expected a list of 1 numbers"):
            scored(lambda first, second: value, [GOOD])

    def test_a_function_for_another_number_of_roles_is_refused_before_any_call(self):
        with pytest.raises(ValueError, match="cannot be called with the texts of 3 actors"):
            CentralizedReward(lengths, 3, FORMAT)

    def test_what_cannot_be_called_is_refused(self):
        with pytest.raises(TypeError, match="must be a callable"):
            CentralizedReward("lengths", 2, FORMAT)

    @pytest.mark.parametrize("unparsable_reward", [float("nan"), float("inf")])
    def test_the_reward_of_unparsable_ones_must_be_finite(self, unparsable_reward):
        with pytest.raises(ValueError, match="unparsable_reward="):
            CentralizedReward(lengths, 2, FORMAT, unparsable_reward)

    def test_a_format_that_gives_another_number_of_texts_is_named(self):
        class Broken(JointResponseFormat):
            def parse(self, completion, num_roles):
                return [completion]

        with pytest.raises(ValueError, match="Broken.parse returned 1 texts, expected 2"):
            CentralizedReward(lengths, 2, Broken())(["x"], [{}])
