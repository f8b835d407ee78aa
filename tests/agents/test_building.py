# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Names, frozen members and adapters of a team, before any actor is built."""

import pytest
from tiny import lm

from trl_multiagent.agents.building import resolve_names, resolve_peft_configs, resolve_trainable
from trl_multiagent.agents.loading import resolve_tokenizers


def frozen(seed):
    return lm(seed).requires_grad_(False)


class TestNames:
    def test_without_names_they_are_numbered(self):
        assert resolve_names(None, 3) == ["agent_0", "agent_1", "agent_2"]

    @pytest.mark.parametrize("container", [list, tuple])
    def test_given_ones_are_in_actor_order(self, container):
        assert resolve_names(container(["planner", "coder"]), 2) == ["planner", "coder"]

    @pytest.mark.parametrize("names", [[], ["planner"], ["planner", "coder", "tester"]])
    def test_another_number_is_an_error_with_both_numbers_and_the_names(self, names):
        with pytest.raises(
            ValueError, match=rf"agent_names.* {len(names)} entries \(\[.*expected 2, one for each actor"
        ) as caught:
            resolve_names(names, 2)
        assert str(names) in str(caught.value)

    def test_they_stand_in_the_errors_of_tokenizers(self):
        with pytest.raises(ValueError, match="coder.*tokenizer"):
            resolve_tokenizers(None, [lm(0)], ["coder"], None)


class TestTrainable:
    names = ["planner", "coder"]

    def resolve(self, trainable, sources, configs=(None, None)):
        return resolve_trainable(trainable, sources, configs, self.names)

    def test_by_default_those_learn_that_have_something_to_learn(self):
        assert self.resolve(None, ["a/model", frozen(0)]) == [True, False]
        assert self.resolve(None, [lm(0), frozen(1)], (None, "adapter")) == [True, True]

    def test_one_trainable_parameter_is_enough(self):
        model = frozen(0)
        next(model.parameters()).requires_grad_(True)
        assert self.resolve(None, [model, frozen(1)]) == [True, False]

    def test_a_list_says_otherwise(self):
        assert self.resolve([False, True], [lm(0), lm(1)]) == [False, True]

    @pytest.mark.parametrize("trainable", [[True], [True] * 3, []])
    def test_a_list_of_another_length_is_an_error_with_both_numbers(self, trainable):
        with pytest.raises(
            ValueError, match=f"trainable_agents.* {len(trainable)} entries, expected 2.*planner.*coder"
        ):
            self.resolve(trainable, [lm(0), lm(1)])

    def test_one_that_shall_learn_but_cannot_is_an_error_that_names_it(self):
        with pytest.raises(ValueError, match="coder learns.*requires a gradient"):
            self.resolve([True, True], [lm(0), frozen(1)])

    def test_one_that_shall_not_learn_but_gets_an_adapter_is_an_error_that_names_it(self):
        with pytest.raises(ValueError, match="coder is frozen.*peft_config"):
            self.resolve([True, False], [lm(0), lm(1)], (None, "adapter"))

    @pytest.mark.parametrize("trainable", [None, [False, False]])
    def test_a_team_that_learns_nothing_is_an_error(self, trainable):
        with pytest.raises(ValueError, match="trainable"):
            self.resolve(trainable, [frozen(0), frozen(1)])


class TestAdapters:
    def test_one_for_all_is_copied_for_each(self):
        """PEFT writes the base model's name into it."""
        config = {"r": 2}
        first, second = resolve_peft_configs(config, 2)
        assert first == second == config and first is not second and first is not config

    def test_a_list_is_in_actor_order_and_may_hold_none(self):
        assert resolve_peft_configs([None, {"r": 2}], 2) == [None, {"r": 2}]
        assert resolve_peft_configs(None, 2) == [None, None]

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_a_list_of_another_length_is_an_error_with_both_numbers(self, count):
        with pytest.raises(ValueError, match=f"peft_config.* {count} entries, expected 2"):
            resolve_peft_configs([None] * count, 2)
