# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Calling the user's reward functions, and what they may return."""

import asyncio
import functools
import logging
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from trl_multiagent.rewards import JointReward, unique_names


NAN = float("nan")
INF = float("inf")
ROWS = [{"prompt": f"p{i}", "gold": i} for i in range(2)]


def score(func, num_agents=2, num_rows=2, num_generations=4, **kwargs):
    """Rewards of `num_rows` task items with `num_generations` joint responses each; text `a{actor}s{sample}`."""
    size = num_rows * num_generations
    completions = [[f"a{i}s{j}" for j in range(size)] for i in range(num_agents)]
    rows = [{"prompt": f"p{j // num_generations}", "gold": j // num_generations} for j in range(size)]
    return JointReward(func, num_agents, **kwargs)(completions, rows, [num_generations] * num_rows)


def returning(value):
    """A reward function for two actors that returns `value`."""

    def fixed_reward(completions1, completions2):
        return value

    return fixed_reward


def one_item(value, num_agents=2, num_generations=4, **kwargs):
    """What the trainer gets for one task item where the function returns `value`, shape (N, G)."""
    return score(lambda *texts: value, num_agents, 1, num_generations, **kwargs)[:, :, 0]


class TestReturnValues:
    """B31: what a function may return, and an error that names it for anything else."""

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ([0.0, 1.0, 2.0, 3.0], [0, 1, 2, 3]),
            ((0.0, 1.0, 2.0, 3.0), [0, 1, 2, 3]),
            (torch.arange(4.0), [0, 1, 2, 3]),
            (torch.arange(4.0, requires_grad=True), [0, 1, 2, 3]),
            (torch.arange(4.0, dtype=torch.bfloat16), [0, 1, 2, 3]),
            (torch.arange(4), [0, 1, 2, 3]),
            (list(torch.arange(4.0)), [0, 1, 2, 3]),
            (np.arange(4, dtype=np.float32), [0, 1, 2, 3]),
            (list(np.arange(4, dtype=np.float32)), [0, 1, 2, 3]),
            (list(np.arange(4, dtype=np.int64)), [0, 1, 2, 3]),
            ([True, False, True, True], [1, 0, 1, 1]),
            ([0, 1, 2, 3], [0, 1, 2, 3]),
            ([Fraction(1, 2), Fraction(1, 4), 0, 1], [0.5, 0.25, 0, 1]),
            ([None, 1, NAN, 2], [NAN, 1, NAN, 2]),
            (np.array([None, 1, 2, 3], dtype=object), [NAN, 1, 2, 3]),
            (range(4), [0, 1, 2, 3]),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_any_list_of_numbers_is_taken(self, value, expected):
        rewards = one_item(value)
        assert rewards.dtype == torch.float32 and rewards.device.type == "cpu" and not rewards.requires_grad
        torch.testing.assert_close(rewards, torch.tensor([expected, expected]).float(), equal_nan=True)

    def test_a_generator_is_taken(self):
        def generator_reward(completions1, completions2):
            return (float(i) for i in range(len(completions1)))

        assert score(generator_reward, num_rows=1)[:, :, 0].tolist() == [[0, 1, 2, 3]] * 2

    @pytest.mark.parametrize(
        ("value", "got"),
        [([1.0], 1), ([1.0, 2.0, 3.0], 3), ([], 0), ([1.0] * 5, 5), (torch.ones(1), 1), (np.ones(3), 3), ((), 0)],
        ids=lambda value: str(value)[:30],
    )
    def test_a_wrong_length_is_an_error_with_the_name_and_both_numbers(self, value, got):
        with pytest.raises(ValueError, match=rf"fixed_reward.* {got} .*expected 4"):
            score(returning(value))

    @pytest.mark.parametrize(
        "value",
        [
            1.0,
            np.float32(1.0),
            torch.tensor(1.0),
            None,
            "1234",
            b"1234",
            {"a": 1, "b": 2, "c": 3, "d": 4},
            ["1", "2", "3", "4"],
            [1.0, 2.0, 3.0, "4"],
            np.array(["1", "2", "3", "4"]),
            [{"score": 1.0}] * 4,
            [object()] * 4,
            [1.0, [2.0], 3.0, 4.0],
            [1j] * 4,
        ],
        ids=[
            "float",
            "numpy_scalar",
            "0d_tensor",
            "None",
            "text",
            "bytes",
            "dict",
            "texts",
            "a_text_among_numbers",
            "array_of_texts",
            "dicts",
            "objects",
            "numbers_and_lists",
            "complex",
        ],
    )
    def test_anything_else_is_an_error_that_names_the_function(self, value):
        with pytest.raises(ValueError, match="fixed_reward"):
            score(returning(value))

    @pytest.mark.parametrize("infinite", [INF, -INF, float("1e300")])
    def test_infinite_values_count_as_missing_with_one_warning(self, infinite, caplog):
        """B24: a reward that overflows must not reach the baseline."""
        reward = JointReward(returning([infinite, 1.0, 1.0, 1.0]), 2)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                rewards = reward([["t"] * 4] * 2, [{}] * 4, [4])
        assert rewards[0, :, 0].isnan().tolist() == [True, False, False, False]
        assert rewards[0, 1:, 0].tolist() == [1.0, 1.0, 1.0]
        assert len([r for r in caplog.records if "fixed_reward" in r.getMessage()]) == 1


class TestOneListForEachActor:
    """E10: a function may return one list for each actor; a list's entries tell which it is, never its length."""

    @pytest.mark.parametrize(
        "value",
        [
            [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]],
            (torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0, 7.0])),
            np.array([[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]),
            torch.tensor([[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]),
            [np.arange(4.0), (4, 5, 6, 7)],
        ],
        ids=["lists", "tensors", "array", "matrix", "mixed"],
    )
    def test_every_actor_gets_its_own_rewards(self, value):
        assert one_item(value).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]

    def test_a_flat_list_goes_to_every_actor(self):
        assert one_item([0, 1, 2, 3], num_agents=3).tolist() == [[0, 1, 2, 3]] * 3

    def test_with_as_many_actors_as_generations_a_flat_list_has_a_value_for_each_joint_response(self):
        """B31: a flat list whose length fits both readings always means joint responses."""
        assert one_item([5.0, 6.0], num_agents=2, num_generations=2).tolist() == [[5, 6], [5, 6]]
        assert one_item([[5.0, 6.0], [7.0, 8.0]], 2, 2).tolist() == [[5, 6], [7, 8]]

    def test_one_actor_may_get_a_list_in_a_list(self):
        assert one_item([[5.0, 6.0]], num_agents=1, num_generations=2).tolist() == [[5, 6]]

    def test_missing_values_stay_apart_for_each_actor(self):
        rewards = one_item([[None, 1.0], [2.0, NAN]], num_agents=2, num_generations=2)
        assert rewards.isnan().tolist() == [[True, False], [False, True]]

    @pytest.mark.parametrize("lists", [1, 3, 4])
    def test_another_number_of_lists_is_an_error_with_both_numbers(self, lists):
        with pytest.raises(ValueError, match=rf"fixed_reward.* {lists} lists, expected 2"):
            score(returning([[1.0] * 4] * lists))

    def test_a_list_of_the_wrong_length_within_is_an_error_with_both_numbers(self):
        with pytest.raises(ValueError, match=r"fixed_reward.* 3 values, expected 4"):
            score(returning([[1.0] * 4, [1.0] * 3]))


class TestCalls:
    """E10: when and with what a function is called."""

    def test_it_is_called_once_for_each_task_item_with_that_items_joint_responses(self):
        calls = []

        def reward(completions1, completions2, batch_items):
            calls.append((completions1, completions2, batch_items))
            return [batch_items[0]["gold"]] * len(completions1)

        rewards = score(reward, num_rows=2, num_generations=3)
        assert [call[0] for call in calls] == [["a0s0", "a0s1", "a0s2"], ["a0s3", "a0s4", "a0s5"]]
        assert [call[1] for call in calls] == [["a1s0", "a1s1", "a1s2"], ["a1s3", "a1s4", "a1s5"]]
        assert rewards[0, :, 0].tolist() == [0, 0, 0, 1, 1, 1]

    def test_batch_items_has_one_entry_for_each_joint_response(self):
        seen = []

        def reward(completions1, completions2, batch_items=None):
            seen.append(batch_items)
            return [0.0 for _ in zip(completions1, completions2, batch_items, strict=True)]

        score(reward, num_rows=2, num_generations=3)
        assert seen == [[{"prompt": "p0", "gold": 0}] * 3, [{"prompt": "p1", "gold": 1}] * 3]

    def test_the_batched_option_calls_it_once_for_everything(self):
        calls = []

        def reward(completions1, completions2, batch_items):
            calls.append((len(completions1), [row["gold"] for row in batch_items]))
            return list(range(len(completions1)))

        rewards = score(reward, num_rows=2, num_generations=3, batched=True)
        assert calls == [(6, [0, 0, 0, 1, 1, 1])]
        assert rewards[0, :, 0].tolist() == [0, 1, 2, 3, 4, 5]

    def test_the_batched_option_takes_one_list_for_each_actor_too(self):
        rewards = score(lambda a, b: [[1.0] * 6, [2.0] * 6], num_rows=2, num_generations=3, batched=True)
        assert rewards[:, :, 0].tolist() == [[1.0] * 6, [2.0] * 6]

    @pytest.mark.parametrize("num_agents", [1, 2, 3])
    def test_every_actor_brings_one_list_in_actor_order(self, num_agents):
        seen = []

        def reward(*completions):
            seen.append(completions)
            return [0.0] * len(completions[0])

        score(reward, num_agents, 1, 2)
        assert seen == [tuple([f"a{i}s0", f"a{i}s1"] for i in range(num_agents))]

    def test_keyword_arguments_of_any_name_get_the_items(self):
        seen = []

        def reward(first, second, **kwargs):
            seen.append(sorted(kwargs))
            return [0.0] * len(first)

        score(reward, num_rows=1)
        assert seen == [["batch_items"]]

    @pytest.mark.parametrize(
        "func",
        [
            lambda first, second, /, batch_items=None: [len(batch_items or [])] * len(first),
            lambda *texts, batch_items=None: [len(batch_items or [])] * len(texts[0]),
        ],
        ids=["positional_only", "any_positional"],
    )
    def test_items_come_however_the_texts_are_taken(self, func):
        assert score(func, num_rows=1)[0, :, 0].tolist() == [4.0] * 4

    def test_a_function_that_does_not_ask_for_items_gets_none(self):
        assert score(lambda first, second: [1.0] * len(first)).tolist() == torch.ones(2, 8, 1).tolist()

    def test_what_a_function_does_to_its_arguments_stays_its_own(self):
        def greedy(completions1, completions2, batch_items):
            completions1.clear()
            batch_items[0]["gold"] = "changed"
            return [1.0] * len(completions2)

        completions, rows = [["x", "y"], ["z", "w"]], [{"gold": 1}, {"gold": 1}]
        seen = []

        def watcher(completions1, completions2, batch_items):
            seen.append((completions1, [dict(row) for row in batch_items]))
            return [1.0] * len(completions2)

        JointReward([greedy, watcher], 2)(completions, rows, [2])
        assert completions == [["x", "y"], ["z", "w"]] and rows == [{"gold": 1}, {"gold": 1}]
        assert seen == [(["x", "y"], [{"gold": 1}, {"gold": 1}])]

    def test_several_functions_stand_side_by_side(self):
        rewards = score([lambda a, b: [1.0] * len(a), lambda a, b: [2.0] * len(a)], num_rows=1)
        assert rewards.shape == (2, 4, 2)
        assert rewards[0, 0].tolist() == [1.0, 2.0]

    def test_a_function_sees_empty_texts_as_empty_strings(self):
        """B21."""
        seen = []

        def reward(first, second):
            seen.extend([first, second])
            return [len(a) + len(b) for a, b in zip(first, second, strict=True)]

        rewards = JointReward(reward, 2)([["", "xy"], ["", ""]], [{}, {}], [2])
        assert seen == [["", "xy"], ["", ""]] and rewards[0, :, 0].tolist() == [0.0, 2.0]


class TestSizes:
    """In later turns of a tree or with crossed joint responses, task items have different numbers of them."""

    texts = [[f"a{i}s{j}" for j in range(6)] for i in range(2)]
    rows = [{"gold": "x"}, *[{"gold": "y"}] * 3, *[{"gold": "z"}] * 2]

    def test_each_task_item_brings_its_own_number_of_joint_responses(self):
        calls = []

        def reward(first, second, batch_items):
            calls.append((first, second, [row["gold"] for row in batch_items]))
            return [float(len(first))] * len(first)

        rewards = JointReward(reward, 2)(self.texts, self.rows, [1, 3, 2])
        assert calls == [
            (["a0s0"], ["a1s0"], ["x"]),
            (["a0s1", "a0s2", "a0s3"], ["a1s1", "a1s2", "a1s3"], ["y"] * 3),
            (["a0s4", "a0s5"], ["a1s4", "a1s5"], ["z"] * 2),
        ]
        assert rewards[1, :, 0].tolist() == [1, 3, 3, 3, 2, 2]

    def test_the_batched_option_takes_them_all_at_once(self):
        sizes = []

        def reward(first, second):
            sizes.append(len(first))
            return list(range(len(first)))

        rewards = JointReward(reward, 2, batched=True)(self.texts, self.rows, [1, 3, 2])
        assert sizes == [6] and rewards[0, :, 0].tolist() == [0, 1, 2, 3, 4, 5]

    def test_a_wrong_length_is_an_error_with_the_number_of_that_task_item(self):
        with pytest.raises(ValueError, match="fixed_reward.* 1 values, expected 3"):
            JointReward(returning([1.0]), 2)(self.texts, self.rows, [1, 3, 2])


class TestTurn:
    """`turn=` is the number of the turn, for a function that names it."""

    @staticmethod
    def call(func, turn, num_agents=2):
        return JointReward(func, num_agents)([["x"]] * num_agents, [{"gold": 3}], [1], turn)[0, 0, 0].item()

    @pytest.mark.parametrize("turn", [1, 2, 5])
    def test_a_function_that_names_it_gets_it(self, turn):
        assert self.call(lambda a, b, turn: [10.0 * turn], turn) == 10 * turn
        assert self.call(lambda a, b, *, turn=None: [10.0 * turn], turn) == 10 * turn
        assert self.call(lambda *texts, turn: [10.0 * turn], turn) == 10 * turn
        assert self.call(functools.partial(lambda a, b, scale, turn: [scale * turn], scale=10.0), turn) == 10 * turn

    def test_it_stands_beside_the_rows(self):
        assert self.call(lambda a, b, batch_items, turn: [batch_items[0]["gold"] + turn], 2) == 5

    def test_without_a_number_it_is_the_first(self):
        assert JointReward(lambda a, b, turn: [turn], 2)([["x"], ["y"]], [{}], [1])[0, 0, 0] == 1

    def test_a_function_of_any_keywords_does_not_get_it(self):
        """It may hand its keywords on to one that knows no turn."""
        seen = []

        def reward(first, second, **kwargs):
            seen.append(sorted(kwargs))
            return [0.0]

        self.call(reward, 2)
        assert seen == [["batch_items"]]

    def test_a_list_of_texts_may_be_called_turn(self):
        seen = []

        def reward(turn, second):
            seen.append((turn, second))
            return [0.0]

        self.call(reward, 2)
        assert seen == [(["x"], ["x"])]

    def test_it_goes_to_each_function_that_names_it(self):
        reward = JointReward([lambda a, b: [7.0], lambda a, b, turn: [float(turn)]], 2)
        assert reward([["x"], ["y"]], [{}], [1], 3)[0, 0].tolist() == [7.0, 3.0]


class TestAsync:
    """E10: a function may be async."""

    @pytest.mark.parametrize("num_funcs", [1, 2])
    def test_all_calls_wait_together(self, num_funcs):
        waiting, everyone = [], num_funcs * 3

        async def reward(first, second, batch_items):
            waiting.append(None)
            while len(waiting) < everyone:  # would never end if one call had to finish before the next begins
                await asyncio.sleep(0)
            return [float(batch_items[0]["gold"])] * len(first)

        rewards = score(
            [reward] * num_funcs if num_funcs > 1 else reward, num_rows=3, num_generations=2, reward_processor=None
        )
        assert rewards[1, :, 0].tolist() == [0, 0, 1, 1, 2, 2]

    def test_it_may_stand_beside_a_plain_function(self):
        async def later(first, second):
            return [1.0] * len(first)

        rewards = score([later, lambda a, b: [2.0] * len(a)], num_rows=1)
        assert rewards[0, 0].tolist() == [1.0, 2.0]

    def test_it_works_where_an_event_loop_runs_already(self):
        """As in a notebook."""

        async def reward(first, second):
            await asyncio.sleep(0)
            return [3.0] * len(first)

        async def notebook():
            return score(reward)

        assert asyncio.run(notebook())[0, :, 0].tolist() == [3.0] * 8

    def test_every_form_of_an_async_callable_is_awaited(self):
        """B32."""

        async def scaled(first, second, scale=1.0):
            return [scale] * len(first)

        class Scorer:
            async def __call__(self, first, second):
                return [2.0] * len(first)

            async def method(self, first, second):
                return [3.0] * len(first)

        funcs = [functools.partial(scaled, scale=1.0), Scorer(), Scorer().method, functools.partial(Scorer())]
        assert score(funcs, num_rows=1)[0, 0].tolist() == [1.0, 2.0, 3.0, 2.0]

    def test_a_lambda_that_returns_a_coroutine_is_awaited(self):
        """B32: nothing tells from outside that it is async."""

        async def scaled(first, second, scale=1.0):
            return [scale] * len(first)

        assert score(lambda a, b: scaled(a, b, 4.0), num_rows=1)[0, :, 0].tolist() == [4.0] * 4

    def test_its_exception_surfaces_unchanged(self):
        """B33."""

        async def reward(first, second):
            raise KeyError("gold")

        with pytest.raises(KeyError, match="gold"):
            score(reward)

    def test_its_answer_is_checked_as_any_other(self):
        async def short_reward(first, second):
            return [1.0]

        with pytest.raises(ValueError, match="short_reward.* 1 .*expected 4"):
            score(short_reward)


def plain(first, second, scale=1.0):
    return [scale] * len(first)


class Scorer:
    def __call__(self, first, second):
        return [2.0] * len(first)

    def method(self, first, second):
        return [3.0] * len(first)


class TestNames:
    """B32: every callable has a stable metric name, and no two share one."""

    @pytest.mark.parametrize(
        ("func", "name", "value"),
        [
            (plain, "plain", 1.0),
            (functools.partial(plain, scale=5.0), "plain", 5.0),
            (functools.partial(functools.partial(plain, scale=5.0), scale=6.0), "plain", 6.0),
            (Scorer(), "Scorer", 2.0),
            (Scorer().method, "method", 3.0),
            (lambda first, second: [4.0] * len(first), "reward_func", 4.0),
            (functools.partial(Scorer()), "Scorer", 2.0),
        ],
        ids=["function", "partial", "nested_partial", "instance", "bound_method", "lambda", "partial_of_instance"],
    )
    def test_each_form_is_called_and_has_a_name(self, func, name, value):
        reward = JointReward(func, 2)
        assert reward.names == [name]
        assert reward([["x"], ["y"]], [{}], [1]).tolist() == [[[value]], [[value]]]

    def test_two_of_the_same_name_get_different_names(self):
        reward = JointReward([functools.partial(plain, scale=1.0), functools.partial(plain, scale=2.0), plain], 2)
        assert len(set(reward.names)) == 3 and reward.names[0] == "plain"

    def test_names_do_not_depend_on_the_run(self):
        funcs = [Scorer(), Scorer(), lambda a, b: [0.0] * len(a), lambda a, b: [0.0] * len(a)]
        assert JointReward(funcs, 2).names == JointReward(list(funcs), 2).names
        assert not any("0x" in name or "<" in name for name in JointReward(funcs, 2).names)

    def test_a_made_up_name_does_not_meet_a_real_one(self):
        names = unique_names(["f", "f_2", "f", "f"])
        assert len(set(names)) == 4 and names[:2] == ["f", "f_2"]


class TestExceptionsOfTheFunction:
    """B33: what a function raises is not taken for a wrong signature."""

    @pytest.mark.parametrize("batched", [False, True])
    def test_a_type_error_inside_surfaces_unchanged_after_one_call(self, batched):
        calls = []

        def reward(c1, c2, batch_items=None):
            calls.append(1)
            return [len(x) + None for x in c1]

        with pytest.raises(TypeError, match="unsupported operand"):
            score(reward, batched=batched)
        assert len(calls) == 1

    def test_a_key_error_inside_surfaces_unchanged_after_one_call(self):
        calls = []

        def reward(c1, c2, batch_items=None):
            calls.append(1)
            return [batch_items[0]["no such column"]]

        with pytest.raises(KeyError) as caught:
            score(reward)
        assert caught.value.args == ("no such column",) and len(calls) == 1

    def test_a_value_error_inside_keeps_its_words(self):
        def reward(c1, c2):
            raise ValueError("mine")

        with pytest.raises(ValueError, match="^mine$"):
            score(reward)


class TestProcessor:
    """E10: `reward_processor` maps each value that a function returned."""

    def test_it_maps_every_value(self):
        assert one_item([1, 2, 3, 4], reward_processor=lambda r: 10 * r)[0].tolist() == [10, 20, 30, 40]

    def test_it_maps_the_values_of_each_function_and_actor(self):
        rewards = score(
            [lambda a, b: [[1.0, 2.0], [3.0, 4.0]], lambda a, b: [5.0, 6.0]],
            num_rows=1,
            num_generations=2,
            reward_processor=lambda r: -r,
        )
        assert rewards[..., 0].tolist() == [[-1, -2], [-3, -4]] and rewards[..., 1].tolist() == [[-5, -6]] * 2

    def test_it_gets_plain_numbers(self):
        seen = []

        def processor(value):
            seen.append(type(value))
            return value

        one_item(torch.arange(4.0), reward_processor=processor)
        assert set(seen) == {float}

    def test_it_never_sees_a_missing_value(self):
        rewards = one_item([None, NAN, 1.0, 2.0], reward_processor=lambda r: r + 1)
        assert rewards[0].isnan().tolist() == [True, True, False, False] and rewards[0, 2:].tolist() == [2.0, 3.0]

    def test_it_can_bring_an_infinite_value_back(self):
        assert one_item([INF, -INF, 1.0, 2.0], reward_processor=lambda r: max(-5.0, min(5.0, r)))[0].tolist() == [
            5.0,
            -5.0,
            1.0,
            2.0,
        ]

    def test_an_infinite_value_that_it_makes_counts_as_missing(self):
        assert one_item([0.0, 1.0, 2.0, 3.0], reward_processor=lambda r: r or INF)[0].isnan().tolist() == [
            True,
            False,
            False,
            False,
        ]

    def test_it_must_be_callable(self):
        with pytest.raises(TypeError, match="reward_processor"):
            JointReward(plain, 2, reward_processor=2.0)


class TestProcessorOfNothing:
    def test_none_is_no_reward(self):
        """B24."""
        rewards = one_item([1.0, 2.0, 3.0, 4.0], reward_processor=lambda r: r if r > 2 else None)
        assert rewards[0].isnan().tolist() == [True, True, False, False]


class TestItemsAreCopies:
    def test_what_a_function_does_to_a_row_stays_its_own(self):
        row = {"prompt": [{"role": "user", "content": "x"}], "meta": {"seen": 0}}
        lengths = []

        def extend(first, second, batch_items):
            for item in batch_items:
                item["prompt"].append({"role": "user", "content": "more"})
                item["meta"]["seen"] += 1
                lengths.append((len(item["prompt"]), item["meta"]["seen"]))
            return [0.0] * len(first)

        reward = JointReward(extend, 2)
        for _ in range(2):
            reward([["a", "b"], ["c", "d"]], [row, row], [2])
        assert lengths == [(2, 1)] * 4 and row == {"prompt": [{"role": "user", "content": "x"}], "meta": {"seen": 0}}


class TestTheSignatureOfTRL:
    def test_prompts_in_the_place_of_texts_are_refused(self):
        with pytest.raises(ValueError, match="has the parameter `prompts` where it gets the texts of an actor"):
            JointReward(lambda prompts, completions, **kwargs: [0.0], 2)

    def test_prompts_elsewhere_are_the_functions_own_affair(self):
        JointReward(lambda a, b, prompts=None: [0.0], 2)


class TestConstruction:
    """Everything that can be seen before the first call is an error at construction."""

    @pytest.mark.parametrize(
        "func",
        [
            lambda completions: [0.0],
            lambda a, b, c: [0.0],
            lambda a, *, b: [0.0],
            lambda a, b, *, threshold: [0.0],
            lambda a, batch_items: [0.0],
            lambda: [0.0],
            Scorer.method,  # not bound: takes three
        ],
        ids=["one", "three", "keyword_only", "unknown_keyword", "items_in_place", "none", "unbound"],
    )
    def test_a_function_that_cannot_take_the_actors_texts_is_refused(self, func):
        with pytest.raises(ValueError, match="2 actors"):
            JointReward(func, 2)

    def test_the_error_names_the_function(self):
        def lonely_reward(completions):
            return [0.0]

        with pytest.raises(ValueError, match="lonely_reward"):
            JointReward(lonely_reward, 2)

    def test_the_second_of_two_functions_is_checked_too(self):
        def lonely_reward(completions):
            return [0.0]

        with pytest.raises(ValueError, match="lonely_reward"):
            JointReward([plain, lonely_reward], 2)

    @pytest.mark.parametrize(
        "func",
        [
            lambda *completions: [0.0],
            lambda *completions, batch_items: [0.0],
            lambda *completions, **kwargs: [0.0],
            lambda a, b, /: [0.0],
            lambda a, b=None: [0.0],
            lambda a, b, c=None: [0.0],
            lambda a, b, *, batch_items: [0.0],
            lambda a, b, *, threshold=0.5: [0.0],
            lambda a, b, turn: [0.0],
            lambda a, b, /, turn, batch_items: [0.0],
            lambda a, b, /, **kwargs: [0.0],
        ],
    )
    def test_every_signature_that_fits_is_taken(self, func):
        assert JointReward(func, 2)([["x"], ["y"]], [{}], [1]).tolist() == [[[0.0]], [[0.0]]]

    @pytest.mark.parametrize("func", [None, 3, "a/reward-model", torch.ones(1)])
    def test_what_is_no_callable_is_refused(self, func):
        with pytest.raises(TypeError, match=type(func).__name__):
            JointReward(func, 2)

    def test_an_empty_list_is_refused(self):
        with pytest.raises(ValueError, match="reward_func"):
            JointReward([], 2)

    def test_nothing_is_called(self):
        calls = []
        JointReward(lambda a, b: calls.append(1), 2)
        assert calls == []


def test_missing_rewards_are_nan_and_not_zero():
    """B24."""
    rewards = one_item([None, 1, 2, 3])
    assert math.isnan(rewards[0, 0].item()) and rewards[0, 1:].tolist() == [1.0, 2.0, 3.0]
