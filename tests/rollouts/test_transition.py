# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Calling the environment between two turns, and what it may say."""

import asyncio
import functools

import pytest

from trl_multiagent.rollouts.transition import History, Transition


NAMES = ["planner", "coder"]
ROW = {"prompt": "x", "gold": "X"}


def history(*turns):
    """A branch in which actor i was asked `a{i}` and answered `b{i}` in each of these turns."""
    past = History.empty(2)
    for turn in turns:
        past = past.then([f"asked {turn}{i}" for i in range(2)], [f"said {turn}{i}" for i in range(2)])
    return past


def call(function, rows=(ROW,), histories=None, turn=1):
    return Transition(function, NAMES)(rows, histories or [history("t")] * len(rows), turn)


class Recorder:
    """Gives every actor a prompt, and keeps the keywords of each call."""

    def __init__(self):
        self.calls = []

    def __call__(self, **kwargs):
        self.calls.append(kwargs)
        return ["p", "q"]


class TestHistory:
    def test_it_begins_empty_for_every_actor(self):
        assert History.empty(3) == History([[], [], []], [[], [], []])

    def test_a_turn_is_added_to_each_actors_lists(self):
        assert history("a", "b") == History(
            [["asked a0", "asked b0"], ["asked a1", "asked b1"]], [["said a0", "said b0"], ["said a1", "said b1"]]
        )

    def test_branches_of_one_history_do_not_see_each_other(self):
        root = history("a")
        left, right = root.then(["l0", "l1"], ["L0", "L1"]), root.then(["r0", "r1"], ["R0", "R1"])
        left.responses[0].append("more")
        assert root == history("a")
        assert right.responses == [["said a0", "R0"], ["said a1", "R1"]]


class TestKeywords:
    """What the function is called with: what it takes, and no more."""

    def test_every_function_gets_prompt_completions_and_the_number_of_actors(self):
        seen = []

        def function(prompt, agent_completions, num_agents):
            seen.append((prompt, agent_completions, num_agents))
            return ["p", "q"]

        assert call(function, histories=[history("a", "b")]) == [["p", "q"]]
        assert seen == [("x", ["said b0", "said b1"], 2)]

    def test_a_row_without_prompt_gives_none(self):
        recorder = Recorder()
        call(recorder, rows=[{"gold": "X"}])
        assert recorder.calls[0]["prompt"] is None

    def test_any_keywords_bring_the_histories_alone(self):
        recorder = Recorder()
        call(recorder, histories=[history("a", "b")])
        assert recorder.calls == [
            {
                "prompt": "x",
                "agent_completions": ["said b0", "said b1"],
                "num_agents": 2,
                "prompt_history_per_agent": [["asked a0", "asked b0"], ["asked a1", "asked b1"]],
                "response_history_per_agent": [["said a0", "said b0"], ["said a1", "said b1"]],
            }
        ]

    def test_one_history_may_be_named_without_the_other(self):
        seen = []

        def function(prompt, agent_completions, num_agents, response_history_per_agent):
            seen.append(response_history_per_agent)
            return ["p", "q"]

        call(function, histories=[history("a", "b")])
        assert seen == [[["said a0", "said b0"], ["said a1", "said b1"]]]

    @pytest.mark.parametrize("name", ["batch_item", "turn"])
    def test_the_row_and_the_turn_come_to_a_function_that_names_them(self, name):
        functions = {
            "batch_item": lambda prompt, agent_completions, num_agents, batch_item: [batch_item["gold"], "q"],
            "turn": lambda prompt, agent_completions, num_agents, *, turn=None, **rest: [f"after {turn}", "q"],
        }
        assert call(functions[name], turn=3) == [[{"batch_item": "X", "turn": "after 3"}[name], "q"]]

    def test_what_the_function_does_to_its_arguments_stays_its_own(self):
        row, past = dict(ROW), history("a")

        def function(
            prompt, agent_completions, num_agents, batch_item, prompt_history_per_agent, response_history_per_agent
        ):
            agent_completions.clear()
            batch_item.clear()
            prompt_history_per_agent[0].append("changed")
            response_history_per_agent[1].clear()
            return ["p", "q"]

        call(function, [row], [past])
        assert row == ROW and past == history("a")

    def test_every_branch_is_a_call_of_its_own_in_order(self):
        seen = []

        def function(prompt, agent_completions, num_agents):
            seen.append((prompt, agent_completions))
            return [f"{prompt} after {text}" for text in agent_completions]

        replies = call(function, [{"prompt": "x"}, {"prompt": "y"}], [history("a"), history("b")])
        assert seen == [("x", ["said a0", "said a1"]), ("y", ["said b0", "said b1"])]
        assert replies == [["x after said a0", "x after said a1"], ["y after said b0", "y after said b1"]]

    def test_without_branches_nothing_is_called(self):
        recorder = Recorder()
        assert Transition(recorder, NAMES)([], [], 1) == [] and recorder.calls == []


class TestMessagesInPlace:
    """A function may build the next prompt in what it was given; branches that share it do not notice."""

    def test_branches_of_one_context_do_not_see_each_other(self):
        asked = [{"role": "user", "content": "x"}]
        shared = [History([[asked]], [["a"]]), History([[asked]], [["b"]])]
        row = {"prompt": asked, "meta": {"seen": []}}

        def extend(prompt, agent_completions, num_agents, prompt_history_per_agent, batch_item):
            batch_item["meta"]["seen"].append(1)
            prompt.append({"role": "user", "content": "lost"})
            messages = prompt_history_per_agent[0][-1]
            messages.append({"role": "assistant", "content": agent_completions[0]})
            return [messages]

        replies = Transition(extend, ["one"])([row, row], shared, 1)
        assert [[message["content"] for message in reply[0]] for reply in replies] == [["x", "a"], ["x", "b"]]
        assert asked == [{"role": "user", "content": "x"}] and row["meta"] == {"seen": []}

    def test_one_prompt_for_two_actors_becomes_two(self):
        def same(prompt, agent_completions, num_agents):
            return [[{"role": "user", "content": "y"}]] * num_agents

        (first, second), *_ = Transition(same, ["one", "two"])([{}], [History([["x"]] * 2, [["a"]] * 2)], 1)
        assert first == second and first is not second


class TestAsync:
    def test_all_branches_wait_together(self):
        waiting = []

        async def function(prompt, agent_completions, num_agents):
            waiting.append(None)
            while len(waiting) < 3:  # would never end if one had to finish before the next begins
                await asyncio.sleep(0)
            return [prompt, prompt]

        rows = [{"prompt": text} for text in "xyz"]
        assert call(function, rows) == [["x", "x"], ["y", "y"], ["z", "z"]]

    def test_it_works_where_an_event_loop_runs_already(self):
        async def function(prompt, agent_completions, num_agents):
            await asyncio.sleep(0)
            return ["p", "q"]

        async def notebook():
            return call(function)

        assert asyncio.run(notebook()) == [["p", "q"]]

    def test_it_may_await_for_some_branches_only(self):
        async def later(prompt):
            return [f"later {prompt}"] * 2

        def function(prompt, agent_completions, num_agents):
            return later(prompt) if prompt != "y" else ["at once"] * 2

        rows = [{"prompt": text} for text in "xyz"]
        assert call(function, rows) == [["later x"] * 2, ["at once"] * 2, ["later z"] * 2]

    def test_its_exception_surfaces_unchanged(self):
        async def function(prompt, agent_completions, num_agents):
            raise KeyError("board")

        with pytest.raises(KeyError, match="board"):
            call(function)

    def test_its_answer_is_checked_as_any_other(self):
        async def lonely(prompt, agent_completions, num_agents):
            return ["p"]

        with pytest.raises(ValueError, match="'lonely' returned 1 entries"):
            call(lonely)


class TestReturnValues:
    @pytest.mark.parametrize("container", [list, tuple])
    def test_a_list_or_tuple_with_a_prompt_for_each_actor_is_taken(self, container):
        assert call(lambda prompt, agent_completions, num_agents: container("pq")) == [["p", "q"]]

    def test_a_prompt_may_be_messages(self):
        chat = [{"role": "user", "content": "go on"}]
        assert call(lambda prompt, agent_completions, num_agents: [chat, "q"]) == [[chat, "q"]]

    @pytest.mark.parametrize(
        ("value", "got"),
        [
            ([], "0 entries"),
            (["p"], "1 entries"),
            (["p", "q", "r"], "3 entries"),
            ("pq", "str"),
            (None, "NoneType"),
            ({"planner": "p", "coder": "q"}, "dict"),
            (iter(["p", "q"]), "list_iterator"),
        ],
        ids=["empty", "one", "three", "text", "None", "dict", "iterator"],
    )
    def test_anything_else_is_an_error_with_the_name_and_both_numbers(self, value, got):
        def next_prompts(prompt, agent_completions, num_agents):
            return value

        with pytest.raises(ValueError, match=rf"'next_prompts' returned {got} .*expected a list of 2 prompts"):
            call(next_prompts)

    @pytest.mark.parametrize("value", [None, 3, ["p"], [], {"role": "user", "content": "x"}])
    def test_a_prompt_of_another_kind_is_an_error_that_names_function_and_actor(self, value):
        def next_prompts(prompt, agent_completions, num_agents):
            return ["p", value]

        with pytest.raises(ValueError, match=rf"'next_prompts', for coder: .*{type(value).__name__}"):
            call(next_prompts)


class TestExceptions:
    """B33: what the function raises is not taken for a wrong signature."""

    @pytest.mark.parametrize("error", [TypeError("takes 1 argument"), KeyError("prompt"), ValueError("mine")])
    def test_one_surfaces_unchanged_after_one_call(self, error):
        calls = []

        def function(prompt, agent_completions, num_agents, **history):
            calls.append(1)
            raise error

        with pytest.raises(type(error)) as caught:
            call(function)
        assert caught.value is error and calls == [1]


class TestConstruction:
    @pytest.mark.parametrize("function", [None, "echo", ["p", "q"]])
    def test_what_is_no_callable_is_refused(self, function):
        with pytest.raises(TypeError, match=f"external_transition.*{type(function).__name__}"):
            Transition(function, NAMES)

    @pytest.mark.parametrize(
        "function",
        [
            lambda: None,
            lambda prompt: None,
            lambda prompt, agent_completions: None,
            lambda prompt, completions, num_agents: None,
            lambda prompt, agent_completions, num_agents, board: None,
            lambda prompt, agent_completions, num_agents, *, board: None,
            lambda prompt, agent_completions, num_agents, /: None,
            lambda *everything: None,
        ],
        ids=["none", "one", "two", "other_name", "more", "more_keywords", "positional_only", "any_positional"],
    )
    def test_a_function_that_cannot_take_its_keywords_is_refused_and_not_called(self, function):
        with pytest.raises(ValueError, match="prompt=.*agent_completions=.*num_agents="):
            Transition(function, NAMES)

    def test_the_error_names_the_function_and_its_signature(self):
        def step(observation):
            raise AssertionError("it is only looked at")

        with pytest.raises(ValueError, match=r"'step\(observation\)'"):
            Transition(step, NAMES)

    def test_a_built_in_without_a_signature_is_called_with_what_every_function_gets(self):
        with pytest.raises(ValueError, match="returned dict .*prompt.*agent_completions.*num_agents"):
            call(dict)

    @pytest.mark.parametrize(
        "function",
        [
            lambda prompt, agent_completions, num_agents: ["p", "q"],
            lambda prompt, agent_completions, num_agents, board=None: ["p", "q"],
            lambda *, num_agents, agent_completions, prompt: ["p", "q"],
            lambda prompt, *rest, agent_completions, num_agents: ["p", "q"],
            lambda **everything: ["p", "q"],
            functools.partial(lambda board, prompt, agent_completions, num_agents: ["p", "q"], "board"),
            functools.partial(lambda prompt, agent_completions, num_agents, board: ["p", "q"], board=1),
            Recorder(),
            Recorder().__call__,
        ],
    )
    def test_every_signature_that_fits_is_taken(self, function):
        assert call(function) == [["p", "q"]]
