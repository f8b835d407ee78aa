# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Value heads: running moments against numpy, precision, and heads on disk."""

import json
import random

import numpy as np
import pytest
import torch
from tiny import gpt2, lm

from trl_multiagent import ValueHead, ValueModel
from trl_multiagent.models.value_head import RunningMoments, load_value_head, save_value_head


def batch_moments(numbers):
    """Number, mean and sum of squared deviations of one batch."""
    return len(numbers), float(np.mean(numbers)), float(np.sum((numbers - np.mean(numbers)) ** 2))


def moments_of(batches):
    moments = RunningMoments()
    for batch in batches:
        moments.update(*batch_moments(batch))
    return moments


def filled(head, seed=0):
    """The head with weights of size 1, so that differences are seen."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    return head


class TestRunningMoments:
    @pytest.mark.parametrize(("center", "spread"), [(0.0, 1.0), (-3.0, 20.0), (1e4, 1.0), (1e-6, 1e-3)])
    @pytest.mark.parametrize("seed", range(5))
    def test_they_are_those_of_all_returns_however_these_are_split_and_in_any_order(self, seed, center, spread):
        rng = np.random.default_rng(seed)
        returns = rng.normal(center, spread, size=200)
        cuts = np.sort(rng.integers(1, 200, size=rng.integers(0, 30)))
        batches = [batch for batch in np.split(returns, np.unique(cuts)) if len(batch)]
        shuffled = batches[:]
        random.Random(seed).shuffle(shuffled)
        for order in (batches, shuffled, [returns[::-1]], list(returns[:, None])):
            moments = moments_of(order)
            assert moments.count == 200
            assert moments.mean == pytest.approx(np.mean(returns), rel=1e-12, abs=1e-12 * spread)
            assert moments.std == pytest.approx(np.std(returns), rel=1e-9)
            assert moments.total_deviation == pytest.approx(200 * np.var(returns), rel=1e-9)

    def test_by_hand(self):
        moments = moments_of([np.array([1.0, 3.0]), np.array([8.0])])
        assert (moments.count, moments.mean) == (3, 4.0)
        assert moments.total_deviation == 26.0  # 9 + 1 + 16
        assert moments.std == pytest.approx((26 / 3) ** 0.5)

    def test_without_returns_they_change_nothing(self):
        moments = RunningMoments()
        assert (moments.count, moments.mean, moments.std) == (0.0, 0.0, 1.0)
        moments.update(0, 0.0, 0.0)
        assert moments == RunningMoments()
        later = moments_of([np.array([1.0, 3.0])])
        before = (later.count, later.mean, later.total_deviation)
        later.update(0, 99.0, 99.0)
        assert (later.count, later.mean, later.total_deviation) == before

    @pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 1e8, 1e-9])
    def test_returns_that_do_not_vary_have_the_unit_one(self, value):
        """Rounding would otherwise be taken for a deviation, and errors divided by nearly nothing."""
        batches = [np.full(size, value) for size in (3, 7, 1, 11)]
        moments = moments_of(batches)
        assert moments.std == 1.0 and moments.mean == pytest.approx(value, rel=1e-12)
        moments.update(4, value * (1 + 1e-12), 1e-20 * value**2)
        assert moments.std == 1.0


class TestPrecision:
    @pytest.mark.parametrize("backbone", [lm, gpt2])
    @pytest.mark.parametrize("hidden_dim", [None, 6])
    def test_a_head_on_a_backbone_in_half_precision_computes_in_float32(self, backbone, hidden_dim):
        model = ValueModel(backbone(0).bfloat16(), hidden_dim).eval()
        filled(model.value_head)
        assert {p.dtype for p in model.value_head.parameters()} == {torch.float32}
        ids = torch.tensor([[5, 9, 4], [7, 3, 8]])
        with torch.no_grad():
            state = model.backbone(ids, output_hidden_states=True).hidden_states[-1][:, -1]
            values = model(ids, torch.ones_like(ids))
            assert state.dtype == torch.bfloat16 and values.dtype == torch.float32
            assert values.tolist() == pytest.approx(self.by_hand(model.value_head, state.double()), rel=1e-5, abs=1e-5)

    @pytest.mark.parametrize("hidden_dim", [None, 6])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_autocast_rounds_neither_products_nor_gradients(self, dtype, hidden_dim):
        head = filled(ValueHead(64, hidden_dim))
        states = torch.randn(5, 64).to(dtype).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            values = head(states)
            assert torch.is_autocast_enabled("cpu")
        assert values.dtype == torch.float32
        expected = self.by_hand(head, states.detach().double())
        assert values.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
        values.sum().backward()
        assert {p.grad.dtype for p in head.parameters()} == {torch.float32}
        if hidden_dim is None:
            torch.testing.assert_close(head.net[0].weight.grad[0], states.detach().float().sum(dim=0))

    @staticmethod
    def by_hand(head, states):
        weights = {name: tensor.double() for name, tensor in head.net.state_dict().items()}
        states = states @ weights["0.weight"].T + weights["0.bias"]
        if "2.weight" in weights:
            states = torch.tanh(states) @ weights["2.weight"].T + weights["2.bias"]
        return states[:, 0].tolist()

    def test_weights_may_be_in_another_precision_but_values_are_not(self):
        head = ValueHead(8, 4, dtype=torch.bfloat16)
        assert {p.dtype for p in head.parameters()} == {torch.bfloat16}
        assert head(torch.randn(3, 8)).dtype == torch.float32


class TestFirstValues:
    @pytest.mark.parametrize("hidden_dim", [None, 256])
    @pytest.mark.parametrize("width", [64, 4096])
    def test_they_are_small_for_normed_states_of_any_width(self, width, hidden_dim):
        """The last layer has the deviation 0.1 / sqrt(width): a state of size 1 gives about 0.1."""
        torch.manual_seed(0)
        head = ValueHead(width, hidden_dim)
        fan_in = width if hidden_dim is None else hidden_dim
        last = head.net[-1]
        assert last.weight.std().item() == pytest.approx(0.1 / fan_in**0.5, rel=0.3)
        assert last.bias.tolist() == [0.0]
        values = head(torch.randn(200, width))
        assert 0.01 < values.std() < 0.2 and values.abs().max() < 0.6

    def test_a_hidden_layer_has_a_tanh(self):
        head = ValueHead(1, 1)
        with torch.no_grad():
            for layer in (head.net[0], head.net[2]):
                layer.weight.fill_(2.0)
                layer.bias.fill_(1.0)
        values = head(torch.tensor([[0.5], [100.0]]))
        assert values.tolist() == pytest.approx([2 * 0.9640275801 + 1, 3.0])  # tanh(2) = 0.9640...


class TestUnits:
    def test_values_are_in_the_returns_units_after_the_moments_move(self):
        head, states = filled(ValueHead(4)), torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, -1.0, 0.0, 1.0]])
        weight, bias = head.net[0].weight[0].tolist(), head.net[0].bias.item()
        raw = [sum(w * x for w, x in zip(weight, row, strict=True)) + bias for row in states.tolist()]
        assert head(states).tolist() == pytest.approx(raw, rel=1e-5)
        head.moments.update(*batch_moments(np.array([100.0, 108.0])))  # mean 104, deviation 4
        assert head(states).tolist() == pytest.approx([104 + 4 * value for value in raw], rel=1e-5)
        head.moments.update(*batch_moments(np.array([92.0, 116.0])))  # 104 still, deviation sqrt((16 + 144) / 2)
        assert head(states).tolist() == pytest.approx([104 + 80**0.5 * value for value in raw], rel=1e-5)

    def test_moments_are_no_parameters_and_no_buffers_and_casts_do_not_round_them(self):
        head = ValueHead(4)
        head.moments.update(3, 1 / 3, 2 / 7)
        assert not list(head.buffers()) and len(list(head.parameters())) == 2
        head.bfloat16()
        assert (head.moments.mean, head.moments.total_deviation) == (1 / 3, 2 / 7)


class TestOnDisk:
    @pytest.mark.parametrize("hidden_dim", [None, 6])
    @pytest.mark.parametrize("critic_type", ["v", "q"])
    def test_a_head_comes_back_with_its_moments(self, tmp_path, hidden_dim, critic_type):
        saved = filled(ValueHead(8, hidden_dim, critic_type))
        saved.moments.update(3, 1 / 3, 2 / 7)
        save_value_head(saved, tmp_path)
        state = torch.load(tmp_path / "value_head.pt", map_location="cpu", weights_only=True)
        by_hand, by_load = [filled(ValueHead(8, hidden_dim, critic_type), seed=1) for _ in range(2)]
        by_hand.load_state_dict(state)
        load_value_head(by_load, tmp_path)
        states = torch.randn(5, 8)
        for head in (by_hand, by_load):
            assert torch.equal(head(states), saved(states))
            assert (head.moments.count, head.moments.mean, head.moments.total_deviation) == (3.0, 1 / 3, 2 / 7)
        config = json.loads((tmp_path / "value_head_config.json").read_text(encoding="utf-8"))
        assert config == {"critic_type": critic_type, "hidden_dim": hidden_dim}

    def test_the_state_is_a_copy_without_gradients(self, tmp_path):
        head = filled(ValueHead(8))
        save_value_head(head, tmp_path)
        before = head.net[0].weight.detach().clone()
        with torch.no_grad():
            head.net[0].weight.zero_()
        state = torch.load(tmp_path / "value_head.pt", weights_only=True)
        assert torch.equal(state["net.0.weight"], before)
        assert not any(tensor.requires_grad for tensor in state.values())

    def test_a_plain_head_without_moments_loads_and_keeps_the_units(self, tmp_path):
        """A state dict with the weights alone, as other code writes it."""
        plain = filled(ValueHead(8)).state_dict()
        del plain["_extra_state"]
        torch.save(plain, tmp_path / "value_head.pt")
        head = filled(ValueHead(8), seed=1)
        load_value_head(head, tmp_path)
        assert torch.equal(head.net[0].weight, plain["net.0.weight"])
        assert head.moments == RunningMoments()

    def test_a_head_without_its_config_loads(self, tmp_path):
        save_value_head(filled(ValueHead(8, critic_type="q")), tmp_path)
        (tmp_path / "value_head_config.json").unlink()
        head = ValueHead(8, critic_type="v")
        load_value_head(head, tmp_path)
        assert torch.equal(head.net[0].weight, filled(ValueHead(8)).net[0].weight)

    @pytest.mark.parametrize("saved_type", ["v", "q"])
    def test_another_critic_type_is_an_error_that_names_both(self, tmp_path, saved_type):
        save_value_head(ValueHead(8, critic_type=saved_type), tmp_path)
        other = {"v": "q", "q": "v"}[saved_type]
        with pytest.raises(
            ValueError, match=f"trained with critic_type='{saved_type}', this run has critic_type='{other}'"
        ):
            load_value_head(ValueHead(8, critic_type=other), tmp_path)

    @pytest.mark.parametrize(
        ("saved", "wanted", "shapes"),
        [
            ((8, None), (12, None), ("(1, 8)", "(1, 12)")),
            ((8, None), (8, 6), ("(1, 8)", "(6, 8)")),
            ((8, 6), (8, None), ("(6, 8)", "(1, 8)")),
            ((8, 6), (8, 4), ("(6, 8)", "(4, 8)")),
        ],
    )
    def test_another_shape_is_an_error_that_names_both_and_leaves_the_head_as_it_was(
        self, tmp_path, saved, wanted, shapes
    ):
        save_value_head(filled(ValueHead(*saved)), tmp_path)
        head = filled(ValueHead(*wanted), seed=1)
        before = [parameter.detach().clone() for parameter in head.parameters()]
        with pytest.raises(ValueError) as error:
            load_value_head(head, tmp_path)
        had, asked = str(error.value).split("but this run asks for")
        assert shapes[0] in had and shapes[1] in asked
        assert "critic_value_head_hidden_dim" in asked and "_extra_state" not in str(error.value)
        assert all(torch.equal(*pair) for pair in zip(head.parameters(), before, strict=True))

    def test_a_missing_file_is_an_error_that_names_it_and_says_what_helps(self, tmp_path):
        save_value_head(ValueHead(8), tmp_path)
        (tmp_path / "value_head.pt").unlink()
        with pytest.raises(FileNotFoundError, match="value_head.pt is missing.*value_head_config.json"):
            load_value_head(ValueHead(8), tmp_path)
