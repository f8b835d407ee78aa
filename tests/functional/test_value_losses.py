# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Losses of value functions, against numbers computed by hand."""

import pytest
import torch

from trl_multiagent.functional.value_losses import value_loss


NAN = float("nan")
ALL = torch.tensor([True, True, True])


def test_it_is_the_mean_squared_error():
    values, returns = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([3.0, 2.0, -1.0])
    assert value_loss(values, returns, ALL).item() == pytest.approx(5 / 3)  # (4 + 0 + 1) / 3


def test_its_gradient_is_twice_the_error_over_the_number_of_samples():
    values = torch.tensor([1.0, 2.0, 0.0], requires_grad=True)
    value_loss(values, torch.tensor([3.0, 2.0, -1.0]), ALL).backward()
    assert values.grad.tolist() == pytest.approx([-4 / 3, 0.0, 2 / 3])


def test_returns_are_fixed_targets():
    returns = torch.tensor([3.0, 2.0, -1.0], requires_grad=True)
    values = torch.tensor([1.0, 2.0, 0.0], requires_grad=True)
    value_loss(values, returns, ALL).backward()
    assert returns.grad is None


def test_samples_without_a_target_are_left_out_of_loss_and_gradient():
    values = torch.tensor([1.0, 5.0, 0.0], requires_grad=True)
    loss = value_loss(values, torch.tensor([3.0, NAN, -1.0]), torch.tensor([True, False, True]))
    loss.backward()
    assert loss.item() == 2.5  # (4 + 1) / 2
    assert values.grad.tolist() == [-2.0, 0.0, 1.0]


def test_without_any_target_it_is_zero_attached_to_the_graph():
    values = torch.tensor([1.0, 5.0], requires_grad=True)
    loss = value_loss(values, torch.tensor([NAN, NAN]), torch.tensor([False, False]))
    assert loss.item() == 0.0
    loss.backward()
    assert values.grad.tolist() == [0.0, 0.0]


class TestClipping:
    """`max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)`, with c = 0.5 and V_old = 0."""

    @pytest.mark.parametrize(
        ("value", "target", "expected", "gradient"),
        [
            (0.2, 1.0, 0.64, -1.6),  # inside the interval: the plain error
            (0.8, 1.0, 0.25, 0.0),  # moved towards the target past the interval: held back, no gradient
            (-0.8, 1.0, 3.24, -3.6),  # moved away from the target: the plain error is larger, and pulls it back
            (0.8, 0.0, 0.64, 1.6),
            (-0.8, -1.0, 0.25, 0.0),
        ],
    )
    def test_the_larger_of_the_two_errors_counts(self, value, target, expected, gradient):
        values = torch.tensor([value], requires_grad=True)
        loss = value_loss(values, torch.tensor([target]), torch.tensor([True]), torch.tensor([0.0]), 0.5)
        loss.backward()
        assert loss.item() == pytest.approx(expected)
        assert values.grad.item() == pytest.approx(gradient)

    def test_the_interval_lies_around_the_old_value(self):
        loss = value_loss(torch.tensor([4.0]), torch.tensor([5.0]), torch.tensor([True]), torch.tensor([3.0]), 0.5)
        assert loss.item() == pytest.approx(2.25)  # clipped to 3.5

    def test_no_gradient_reaches_the_old_values(self):
        old = torch.tensor([0.0], requires_grad=True)
        values = torch.tensor([0.8], requires_grad=True)
        value_loss(values, torch.tensor([1.0]), torch.tensor([True]), old, 0.5).backward()
        assert old.grad is None

    def test_a_wide_interval_changes_nothing(self):
        values, returns, old = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([3.0, 2.0, -1.0]), torch.zeros(3)
        assert value_loss(values, returns, ALL, old, 100.0).item() == pytest.approx(5 / 3)

    def test_masked_samples_stay_inert(self):
        values = torch.tensor([0.8, NAN], requires_grad=True)
        loss = value_loss(values, torch.tensor([0.0, NAN]), torch.tensor([True, False]), torch.tensor([0.0, NAN]), 0.5)
        loss.backward()
        assert loss.item() == pytest.approx(0.64)
        assert values.grad.tolist() == pytest.approx([1.6, 0.0])

    def test_it_needs_the_old_values(self):
        with pytest.raises(ValueError, match="old_values"):
            value_loss(torch.zeros(2), torch.zeros(2), torch.ones(2, dtype=torch.bool), clip_range=0.5)


@pytest.mark.parametrize(
    ("values", "returns", "mask"), [((3,), (3,), (2,)), ((3,), (1,), (3,)), ((3, 1), (3,), (3,)), ((1,), (3,), (3,))]
)
def test_shapes_that_differ_are_an_error_and_never_broadcast(values, returns, mask):
    with pytest.raises(ValueError, match="agree"):
        value_loss(torch.zeros(values), torch.zeros(returns), torch.ones(mask, dtype=torch.bool))


def test_old_values_of_another_shape_are_an_error():
    with pytest.raises(ValueError, match="agree"):
        value_loss(torch.zeros(3), torch.zeros(3), ALL, torch.zeros(1), 0.5)
