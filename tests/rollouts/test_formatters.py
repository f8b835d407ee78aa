# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""From dataset rows, and what the environment and the teammates said, to prompts."""

import functools
from types import SimpleNamespace

import pytest

from trl_multiagent.rollouts.formatters import (
    ActorFormatter,
    check_formatters,
    check_one_kind,
    prompt_column,
    prompt_text,
    resolve_formatters,
)


def messages(text):
    return [{"role": "system", "content": "be brief"}, {"role": "user", "content": text}]


def functions(formatters):
    return [formatter.formatter for formatter in formatters]


class TestResolving:
    """E10: one for all actors or one for each, from a dataset row to a text or to messages."""

    def test_without_one_every_actor_gets_the_column_prompt(self):
        formatters = resolve_formatters(None, ["a", "b", "c"])
        assert functions(formatters) == [prompt_column] * 3
        assert [f.first_prompt({"prompt": "p", "other": 1}) for f in formatters] == ["p"] * 3

    def test_one_serves_all_actors(self):
        assert functions(resolve_formatters(str, ["a", "b"])) == [str, str]

    @pytest.mark.parametrize("container", [list, tuple])
    def test_a_list_is_in_actor_order(self, container):
        formatters = resolve_formatters(container([str, repr]), ["a", "b"])
        assert functions(formatters) == [str, repr] and [f.name for f in formatters] == ["a", "b"]

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_a_list_of_the_wrong_length_is_an_error_with_both_numbers(self, count):
        with pytest.raises(ValueError, match=rf"{count} entries, expected 2"):
            resolve_formatters([str] * count, ["a", "b"])

    def test_an_entry_that_is_not_callable_is_named(self):
        with pytest.raises(TypeError, match=r"formatters\[1\].* str"):
            resolve_formatters([str, "prompt"], ["a", "b"])


class TestPromptText:
    def test_a_text_stays_as_it_is(self):
        assert prompt_text("as it is") == "as it is"

    def test_messages_become_lines(self):
        assert prompt_text(messages("hello")) == "system: be brief\nuser: hello"


class TestFirstPrompt:
    def test_the_formatter_gets_the_row_alone(self):
        seen = []
        ActorFormatter("a", lambda *args, **kwargs: seen.append((args, kwargs)) or "p").first_prompt({"prompt": "x"})
        assert seen == [(({"prompt": "x"},), {})]

    def test_a_built_in_without_a_signature_is_taken(self):
        assert ActorFormatter("a", str).first_prompt({"prompt": "x"}, ["said"]) == "{'prompt': 'x'}"

    def test_what_a_formatter_does_to_its_row_stays_its_own(self):
        row = {"prompt": "x", "gold": "X"}
        assert ActorFormatter("a", lambda row: row.pop("prompt")).first_prompt(row) == "x"
        assert row == {"prompt": "x", "gold": "X"}

    @pytest.mark.parametrize(
        "prompt",
        [None, 3, b"bytes", {"role": "user", "content": "x"}, ["a", "b"], [], [{"text": "no role"}]],
        ids=["None", "int", "bytes", "dict", "texts", "empty", "no_role"],
    )
    def test_a_prompt_of_another_kind_is_an_error_that_names_the_actor_and_the_kind(self, prompt):
        with pytest.raises(ValueError, match=f"^coder: .*{type(prompt).__name__}"):
            ActorFormatter("coder", lambda row: prompt).first_prompt({"prompt": "x"})

    def test_an_exception_of_a_formatter_surfaces_unchanged_after_one_call(self):
        """B33: it is not called again with fewer arguments."""
        calls = []

        def formatter(row, earlier_completions=None):
            calls.append(1)
            return row["prompt"] + None

        with pytest.raises(TypeError, match="can only concatenate str"):
            ActorFormatter("a", formatter).first_prompt({"prompt": "x"}, ["said"])
        assert calls == [1]


class TestEarlierCompletions:
    """In sequential turns: what the actors before this one said."""

    @pytest.mark.parametrize(
        "formatter",
        [
            lambda row, earlier_completions: f"{row['prompt']} {earlier_completions}",
            lambda row, earlier_completions=(): f"{row['prompt']} {earlier_completions}",
            lambda row, *, earlier_completions: f"{row['prompt']} {earlier_completions}",
            functools.partial(
                lambda row, end, earlier_completions: f"{row['prompt']} {earlier_completions}{end}", end=""
            ),
        ],
        ids=["named", "default", "keyword_only", "partial"],
    )
    def test_a_formatter_that_takes_them_gets_them(self, formatter):
        actor = ActorFormatter("a", formatter)
        assert actor.takes_earlier
        assert actor.first_prompt({"prompt": "x"}, ("one", "two")) == "x ['one', 'two']"
        assert actor.next_prompt({"prompt": "x"}, "reply", ("three",)) == "reply ['three']"

    def test_one_that_takes_anything_does_not_ask_to_hear_the_others(self):
        actor = ActorFormatter("a", lambda row, **kwargs: f"{row['prompt']} {sorted(kwargs)}")
        assert not actor.takes_earlier
        assert actor.first_prompt({"prompt": "x"}, ["one"]) == "x []"

    def test_one_that_does_not_is_called_without_them(self):
        actor = ActorFormatter("a", lambda row: row["prompt"])
        assert not actor.takes_earlier
        assert actor.first_prompt({"prompt": "x"}, ["one"]) == "x"
        assert actor.next_prompt({"prompt": "x"}, "reply", ["one"]) == "reply"

    def test_the_first_actor_gets_an_empty_list(self):
        actor = ActorFormatter("a", lambda row, earlier_completions=None: str(earlier_completions))
        assert actor.first_prompt({}, []) == "[]"

    def test_in_simultaneous_turns_its_own_default_holds(self):
        actor = ActorFormatter("a", lambda row, earlier_completions="nothing": earlier_completions)
        assert actor.first_prompt({}) == actor.next_prompt({}, "reply") == "nothing"

    def test_the_list_is_its_own(self):
        said = ["one", "two"]
        ActorFormatter("a", lambda row, earlier_completions: earlier_completions.pop()).first_prompt({}, said)
        assert said == ["one", "two"]


class TestNextPrompt:
    """After the first turn the row's `prompt` is what the environment said; the dataset's own is kept beside it."""

    def test_the_rows_prompt_is_replaced_and_its_own_is_kept(self):
        rows = []
        row = {"prompt": "x", "gold": "X"}
        actor = ActorFormatter("a", lambda row: rows.append(row) or f"{row['_original_prompt']} / {row['prompt']}")
        assert actor.next_prompt(row, "reply") == "x / reply"
        assert rows == [{"prompt": "reply", "_original_prompt": "x", "gold": "X"}]
        assert row == {"prompt": "x", "gold": "X"}

    def test_a_row_without_prompt_has_none_to_keep(self):
        actor = ActorFormatter("a", lambda row: f"{row['_original_prompt']} {row['prompt']}")
        assert actor.next_prompt({"gold": "X"}, "reply") == "None reply"

    def test_without_a_formatter_the_environments_prompt_is_asked(self):
        assert ActorFormatter("a").next_prompt({"prompt": "x"}, messages("reply")) == messages("reply")

    @pytest.mark.parametrize(
        "formatter",
        [
            lambda row, external_prompts: f"[{external_prompts}]",
            lambda row, external_prompts=None: f"[{external_prompts}]",
            lambda row, *, external_prompts: f"[{external_prompts}]",
            lambda row, **kwargs: f"[{kwargs['external_prompts']}]",
        ],
        ids=["named", "default", "keyword_only", "any"],
    )
    def test_a_formatter_that_takes_external_prompts_gets_this_actors_own(self, formatter):
        actor = ActorFormatter("a", formatter)
        assert actor.takes_external and actor.next_prompt({"prompt": "x"}, "reply") == "[reply]"

    def test_in_the_first_turn_there_are_none(self):
        actor = ActorFormatter("a", lambda row, external_prompts="none yet": external_prompts)
        assert actor.first_prompt({"prompt": "x"}) == "none yet"

    def test_a_prompt_of_another_kind_is_an_error_that_names_the_actor(self):
        with pytest.raises(ValueError, match="^coder: .*NoneType"):
            ActorFormatter("coder", lambda row: None).next_prompt({"prompt": "x"}, "reply")


class TestCheckBeforeTraining:
    """B20: what would fail in the first step fails at construction, and names the actor."""

    plain, chatty = SimpleNamespace(chat_template=None), SimpleNamespace(chat_template="{{ messages }}")

    @staticmethod
    def check(row, formatters, tokenizers, **kwargs):
        names = ["planner", "coder"][: len(tokenizers)]
        check_formatters(row, resolve_formatters(formatters, names), tokenizers, **kwargs)

    def test_a_row_without_prompt_is_an_error_with_its_columns(self):
        with pytest.raises(ValueError, match=r"planner.*'question'"):
            self.check({"question": "x"}, None, [self.plain])

    def test_messages_without_a_chat_template_are_an_error_that_names_the_actor(self):
        with pytest.raises(ValueError, match="coder.*chat template"):
            self.check({"prompt": "x"}, [prompt_column, lambda row: messages(row["prompt"])], [self.plain, self.plain])

    def test_messages_with_one_and_texts_without_one_are_fine(self):
        self.check({"prompt": "x"}, [prompt_column, lambda row: messages(row["prompt"])], [self.plain, self.chatty])

    def test_a_prompt_of_another_kind_is_an_error_that_names_the_actor(self):
        with pytest.raises(ValueError, match="planner.*NoneType"):
            self.check({"prompt": None}, None, [self.plain])

    def test_in_sequential_turns_the_actors_before_have_said_nothing(self):
        seen = []

        def formatter(row, earlier_completions):
            seen.append(earlier_completions)
            return "p"

        self.check({"prompt": "x"}, formatter, [self.plain, self.plain], sequential=True)
        assert seen == [[], [""]]

    @pytest.mark.parametrize(
        "formatter", [lambda row, earlier_completions: "p", lambda row, earlier_completions=(): "p"]
    )
    def test_in_simultaneous_turns_a_formatter_that_wants_to_hear_is_refused(self, formatter):
        with pytest.raises(ValueError, match="takes `earlier_completions`, but turn_order='simultaneous'"):
            self.check({"prompt": "x"}, formatter, [self.plain])

    def test_a_formatter_that_fails_on_nothing_said_is_named_with_what_it_was_tried_with(self):
        def second_word(row, earlier_completions):
            return row["prompt"] if not earlier_completions else earlier_completions[0].split()[1]

        formatters = resolve_formatters(second_word, ["planner", "writer"])
        with pytest.raises(
            ValueError, match=r"formatter of writer failed .* with earlier_completions=\[''\].*IndexError"
        ) as raised:
            check_formatters({"prompt": "x"}, formatters, [self.plain] * 2, sequential=True)
        assert isinstance(raised.value.__cause__, IndexError)

    def test_a_formatter_that_fails_is_named(self):
        with pytest.raises(ValueError, match=r"failed on the dataset's first row \(KeyError: 'question'\)"):
            self.check({"prompt": "x"}, lambda row: row["question"], [self.plain])


class TestOwnCopies:
    """What a formatter does to its row is nobody else's."""

    def test_messages_that_are_extended_in_place_stay_as_they_were(self):
        def extend(row):
            row["prompt"].append({"role": "user", "content": "more"})
            return row["prompt"]

        actor, row = ActorFormatter("a", extend), {"prompt": messages("x")}
        for _ in range(2):
            assert len(actor.first_prompt(row)) == len(messages("x")) + 1
            assert len(actor.next_prompt(row, messages("reply"))) == len(messages("reply")) + 1
        assert row == {"prompt": messages("x")}

    def test_what_the_environment_said_stays_as_it_was(self):
        def extend(row, external_prompts=None):
            external_prompts.append({"role": "user", "content": "more"})
            return external_prompts

        actor, reply = ActorFormatter("a", extend), messages("reply")
        for _ in range(2):
            assert len(actor.next_prompt({"prompt": "x"}, reply)) == len(messages("reply")) + 1

    def test_a_message_without_content_is_an_error(self):
        actor = ActorFormatter("a", lambda row: [{"role": "user"}])
        with pytest.raises(ValueError, match="a: the prompt is a list"):
            actor.first_prompt({"prompt": "x"})


class TestOneKind:
    """B20: one actor gets texts or messages, not both in a batch."""

    @pytest.mark.parametrize("prompts", [["x", messages("y")], [messages("x"), messages("y"), "z"]])
    def test_both_in_one_batch_are_an_error_that_names_the_actor(self, prompts):
        with pytest.raises(ValueError, match="coder got both"):
            check_one_kind("coder", prompts)

    @pytest.mark.parametrize("prompts", [[], ["x", "y"], [messages("x"), messages("y")]])
    def test_one_kind_is_fine(self, prompts):
        check_one_kind("coder", prompts)
