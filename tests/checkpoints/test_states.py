# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""States that are saved: of optimizers by name, of random number generators, of the user's objects."""

import random
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from trl_multiagent import CheckpointError
from trl_multiagent.callbacks.wandb_resume import WandbResumeCallback
from trl_multiagent.checkpoints.optimizer_state import load_optimizer_state, optimizer_state
from trl_multiagent.checkpoints.random_states import own_random_state, random_states, set_random_states
from trl_multiagent.checkpoints.stateful import RunTracker, Stateful, check_plain


def draws():
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]


class TestRandomStates:
    def test_draws_go_on_from_where_they_were(self, tmp_path):
        random.gauss(0, 1), np.random.randn()  # each keeps a second number for later
        torch.save(random_states(), tmp_path / "states.pt")
        expected = [draws() for _ in range(3)]
        set_random_states(torch.load(tmp_path / "states.pt", weights_only=True))
        assert [draws() for _ in range(3)] == expected

    def test_draws_apart_are_those_of_their_seed_and_leave_the_others_alone(self):
        states = random_states()
        expected = draws()
        set_random_states(states)
        apart = []
        for _ in range(2):
            with own_random_state(3, device_specific=False):
                apart.append(draws())
        assert apart[0] == apart[1] != expected
        assert draws() == expected

    def test_an_error_inside_leaves_the_others_alone_too(self):
        states = random_states()
        expected = draws()
        set_random_states(states)
        with pytest.raises(KeyError), own_random_state(3, device_specific=False):
            random.random()
            raise KeyError
        assert draws() == expected


def two_layers(*names, seed=0):
    torch.manual_seed(seed)
    return nn.ModuleDict({name: nn.Linear(2, 3 if name == "a" else 4) for name in names})


def stepped(model, order, **options):
    """An Adam with a group for each of the modules, in some order, after a step."""
    groups = [{"params": list(model[name].parameters()), "entity": name, **options} for name in order]
    optimizer = torch.optim.Adam(groups, lr=0.1)
    sum(parameter.square().sum() for parameter in model.parameters()).backward()
    optimizer.step()
    return optimizer


class TestOptimizerStates:
    def test_it_is_listed_by_name(self):
        model = two_layers("a", "b")
        saved = optimizer_state(stepped(model, ["b", "a"]), model)
        assert [group["params"] for group in saved["groups"]] == [["b.weight", "b.bias"], ["a.weight", "a.bias"]]
        assert saved["state"].keys() == {"a.weight", "a.bias", "b.weight", "b.bias"}
        gradient = 2 * two_layers("a", "b")["a"].weight
        torch.testing.assert_close(saved["state"]["a.weight"]["exp_avg"], 0.1 * gradient.detach())

    def test_groups_in_another_order_get_their_own(self):
        """B03: by name, not by place."""
        model = two_layers("a", "b")
        optimizer = stepped(model, ["a", "b"])
        optimizer.param_groups[1]["lr"] = 0.7
        saved = optimizer_state(optimizer, model)
        other = two_layers("b", "a", seed=5)
        resumed = torch.optim.Adam([{"params": list(other[name].parameters()), "entity": name} for name in ("b", "a")])
        load_optimizer_state(resumed, other, saved)
        assert [(group["entity"], group["lr"]) for group in resumed.param_groups] == [("b", 0.7), ("a", 0.1)]
        for name in ("a", "b"):
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(resumed.state[other[name].weight][key], optimizer.state[model[name].weight][key])

    def test_other_parameters_are_named_and_nothing_is_loaded(self):
        model, other = two_layers("a", "b"), two_layers("a", "c")
        saved = optimizer_state(stepped(model, ["a", "b"]), model)
        optimizer = torch.optim.Adam([{"params": list(other[name].parameters())} for name in ("a", "c")])
        with pytest.raises(CheckpointError, match=r"other parameters .*: b.bias, b.weight, c.bias, c.weight\. Train"):
            load_optimizer_state(optimizer, other, saved)
        assert not optimizer.state

    def test_other_groups_are_an_error(self):
        model = two_layers("a", "b")
        saved = optimizer_state(stepped(model, ["a", "b"]), model)
        with pytest.raises(CheckpointError, match="they are grouped otherwise"):
            load_optimizer_state(torch.optim.Adam(model.parameters()), model, saved)

    def test_another_shape_is_an_error(self):
        model, other = two_layers("a"), nn.ModuleDict({"a": nn.Linear(5, 3)})
        saved = optimizer_state(stepped(model, ["a"]), model)
        optimizer = torch.optim.Adam([{"params": list(other.parameters())}])
        with pytest.raises(CheckpointError, match=r"a.weight has the shape \(3, 5\), in the checkpoint \(3, 2\)"):
            load_optimizer_state(optimizer, other, saved)

    def test_parameters_that_are_not_the_models_are_an_error(self):
        with pytest.raises(CheckpointError, match="2 parameters that are not the model's"):
            optimizer_state(stepped(two_layers("a"), ["a"]), two_layers("a"))


class TestPlainStates:
    @pytest.mark.parametrize(
        "value",
        [
            None,
            True,
            1,
            2.5,
            1j,
            "a",
            b"a",
            torch.ones(2),
            [1, (2, {"a": [None]})],
            OrderedDict(a=1),
            {1: {(1, "a"): 2}},
        ],
        ids=str,
    )
    def test_tensors_numbers_texts_and_what_holds_them_are_saved_and_read(self, value, tmp_path):
        check_plain("x", value)
        torch.save(value, tmp_path / "x.pt")
        torch.load(tmp_path / "x.pt", weights_only=True)

    @pytest.mark.parametrize(
        ("value", "path"),
        [
            (np.float64(1), r"state_dict\(\) is a numpy.float64"),
            ({"a": [1, {2}]}, r"state_dict\(\)\['a'\]\[1\] is a builtins.set"),
            ({(1, frozenset()): 1}, r"a key of state_dict\(\)\[1\] is a builtins.frozenset"),
            ([namedtuple("Pair", "x y")(1, 2)], r"state_dict\(\)\[0\] is a .*Pair"),
            ({"model": nn.Linear(1, 1)}, r"state_dict\(\)\['model'\] is a torch.nn.modules.linear.Linear"),
        ],
        ids=str,
    )
    def test_what_else_there_is_is_named_with_its_place(self, value, path):
        with pytest.raises(TypeError, match=f"The state of x cannot be saved: {path}, expected tensors"):
            check_plain("x", value)

    def test_who_has_a_state_and_who_tracks_a_run(self):
        assert isinstance(nn.Linear(1, 1), Stateful) and not isinstance(TrainerCallback(), Stateful)
        assert isinstance(WandbResumeCallback(), RunTracker) and not isinstance(TrainerCallback(), RunTracker)
