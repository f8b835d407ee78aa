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


class TestTokens:
    """Values of shape (B, T): a mean over the tokens, not over rows first."""

    VALUES = [[1.0, 2.0, 9.0], [0.0, 9.0, 9.0]]
    RETURNS = [[3.0, 1.0, NAN], [4.0, NAN, NAN]]
    MASK = [[True, True, False], [True, False, False]]

    def test_each_token_counts_once(self):
        values = torch.tensor(self.VALUES, requires_grad=True)
        loss = value_loss(values, torch.tensor(self.RETURNS), torch.tensor(self.MASK))
        loss.backward()
        assert loss.item() == 7.0  # (4 + 1 + 16) / 3
        assert values.grad.flatten().tolist() == pytest.approx([-4 / 3, 2 / 3, 0, -8 / 3, 0, 0])

    def test_a_row_is_the_same_beside_longer_ones(self):
        short = value_loss(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 1.0]]), torch.tensor([[True, True]]))
        longer = value_loss(*(torch.tensor(table[:1]) for table in (self.VALUES, self.RETURNS, self.MASK)))
        assert short.item() == longer.item() == 2.5

    def test_parts_divided_by_the_expected_number_have_the_loss_of_the_whole_as_their_mean(self):
        tables = [torch.tensor(table) for table in (self.VALUES, self.RETURNS, self.MASK)]
        parts = [value_loss(*(table[row : row + 1] for table in tables), num_targets=1.5).item() for row in range(2)]
        assert parts == pytest.approx([5 / 1.5, 16 / 1.5])
        assert sum(parts) / 2 == pytest.approx(7.0)

    def test_each_token_is_clipped_around_its_own_old_value(self):
        old = torch.tensor([[0.0, 2.0, NAN], [3.0, NAN, NAN]])
        tables = [torch.tensor(table) for table in (self.VALUES, self.RETURNS, self.MASK)]
        # Clipped to 0.5, 2 and 2.5: the errors 2, 1 and 4 are plain, 2.5, 1 and 1.5 with clipping
        assert value_loss(*tables, old, 0.5).item() == pytest.approx((6.25 + 1 + 16) / 3)


class TestScale:
    """Errors, and the clipping interval, are counted in units of `scale`."""

    def test_errors_are_divided_by_it(self):
        values = torch.tensor([1.0, 2.0, 0.0], requires_grad=True)
        loss = value_loss(values, torch.tensor([3.0, 2.0, -1.0]), ALL, scale=2.0)
        loss.backward()
        assert loss.item() == pytest.approx(5 / 12)  # (1 + 0 + 1 / 4) / 3
        assert values.grad.tolist() == pytest.approx([-1 / 3, 0.0, 1 / 6])

    @pytest.mark.parametrize(
        ("value", "target", "expected"),
        [
            (12.0, 20.0, 0.64),  # within 0.5 * 10 of the old value
            (18.0, 20.0, 0.25),  # held back at 15
            (2.0, 20.0, 3.24),  # moved away: the plain error is larger
        ],
    )
    def test_the_interval_is_as_wide_as_clip_range_times_scale(self, value, target, expected):
        loss = value_loss(
            torch.tensor([value]), torch.tensor([target]), torch.tensor([True]), torch.tensor([10.0]), 0.5, scale=10.0
        )
        assert loss.item() == pytest.approx(expected)

    @pytest.mark.parametrize("clip_range", [None, 0.5])
    def test_what_stands_at_masked_places_stays_inert(self, clip_range):
        values = torch.tensor([18.0, NAN], requires_grad=True)
        absent = torch.tensor([12.0, NAN])
        loss = value_loss(
            values, absent, torch.tensor([True, False]), torch.tensor([10.0, NAN]), clip_range, 4.0, scale=10.0
        )
        loss.backward()
        assert loss.item() == pytest.approx(0.09)  # 0.6 ** 2 / 4, and clipped to 15 only 0.3
        assert values.grad.tolist() == pytest.approx([0.03, 0.0])  # 2 * 0.6 / 10 / 4
