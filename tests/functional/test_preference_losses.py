# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Losses of preference pairs, against numbers worked out by hand, and their calibration, against a slow loop."""

import math
import random

import pytest
import torch

from trl_multiagent.functional.preference_losses import LOSS_TYPES, calibration_error, preference_loss


NAN = float("nan")


def losses(margins, *args, **kwargs):
    return preference_loss(torch.tensor(margins, dtype=torch.float64), *args, **kwargs).tolist()


class TestLosses:
    def test_sigmoid_by_hand(self):
        # log(1 + e^0), log(1 + e^-1), log(1 + e^1)
        assert losses([0.0, 2.0, -2.0], 0.5) == pytest.approx([0.693147, 0.313262, 1.313262], abs=1e-6)

    def test_sigmoid_with_smoothing_by_hand(self):
        # 0.9 and 0.1 of 0.313262 and 1.313262
        expected = [0.693147, 0.413262, 1.213262]
        assert losses([0.0, 2.0, -2.0], 0.5, label_smoothing=0.1) == pytest.approx(expected, abs=1e-6)

    def test_smoothing_is_least_where_the_model_is_as_sure_as_the_labels(self):
        least = math.log(0.8 / 0.2)  # sigmoid(least) = 0.8
        at, before, after = losses([least, least - 0.1, least + 0.1], 1.0, label_smoothing=0.2)
        assert at < before and at < after

    def test_hinge_by_hand(self):
        # 1 - 0, 1 - 1, 1 - 2 < 0, 1 + 1, 1 - 0.25
        assert losses([0.0, 2.0, 4.0, -2.0, 0.5], 0.5, "hinge") == [1.0, 0.0, 0.0, 2.0, 0.75]

    def test_ipo_by_hand(self):
        # 1 / (2 * 0.25) = 2
        assert losses([0.0, 2.0, 5.0, -1.0], 0.25, "ipo") == [4.0, 0.0, 9.0, 9.0]

    @pytest.mark.parametrize("label_smoothing", [0.0, 0.25])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_extreme_margins_do_not_overflow(self, dtype, label_smoothing):
        margins = torch.tensor([1000.0, -1000.0], dtype=dtype, requires_grad=True)
        loss = preference_loss(margins, 1.0, label_smoothing=label_smoothing)
        loss.sum().backward()
        # The label that is taken to hold with probability s, or 1 - s, costs 1000
        expected = [1000 * label_smoothing, 1000 * (1 - label_smoothing)]
        assert loss.tolist() == pytest.approx(expected, rel=2 * torch.finfo(dtype).eps)
        assert margins.grad.tolist() == pytest.approx([label_smoothing, label_smoothing - 1])

    @pytest.mark.parametrize("loss_type", ["hinge", "ipo"])
    def test_extreme_margins_give_finite_losses_of_the_other_types(self, loss_type):
        assert all(math.isfinite(loss) for loss in losses([1000.0, -1000.0], 0.1, loss_type))

    @pytest.mark.parametrize(
        ("loss_type", "label_smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.3), ("hinge", 0.0), ("ipo", 0.0)]
    )
    def test_gradients_are_the_finite_differences(self, loss_type, label_smoothing):
        points, step = [-3.0, -0.4, 0.0, 0.7, 1.9, 6.0], 1e-6
        margins = torch.tensor(points, dtype=torch.float64, requires_grad=True)
        preference_loss(margins, 0.7, loss_type, label_smoothing).sum().backward()
        above = losses([point + step for point in points], 0.7, loss_type, label_smoothing)
        below = losses([point - step for point in points], 0.7, loss_type, label_smoothing)
        slopes = [(high - low) / (2 * step) for high, low in zip(above, below, strict=True)]
        assert margins.grad.tolist() == pytest.approx(slopes, abs=1e-6)

    @pytest.mark.parametrize("loss_type", LOSS_TYPES)
    def test_without_pairs_there_are_no_losses(self, loss_type):
        assert preference_loss(torch.zeros(0), 0.1, loss_type).shape == (0,)

    def test_an_unknown_type_is_an_error_with_the_choices(self):
        with pytest.raises(ValueError, match=r"'dpo'.*'sigmoid', 'hinge', 'ipo'"):
            losses([0.0], 0.1, "dpo")

    @pytest.mark.parametrize("beta", [0.0, -0.1, NAN, float("inf")])
    def test_beta_must_be_above_zero(self, beta):
        with pytest.raises(ValueError, match=f"beta={beta}"):
            losses([0.0], beta)

    @pytest.mark.parametrize("label_smoothing", [-0.1, 0.5, 1.0, NAN])
    def test_smoothing_must_leave_the_labels_a_meaning(self, label_smoothing):
        with pytest.raises(ValueError, match=f"label_smoothing={label_smoothing}"):
            losses([0.0], 0.1, label_smoothing=label_smoothing)

    @pytest.mark.parametrize("loss_type", ["hinge", "ipo"])
    def test_smoothing_is_refused_where_it_has_no_meaning(self, loss_type):
        with pytest.raises(ValueError, match=f"label_smoothing=0.1.*loss_type='{loss_type}'"):
            losses([0.0], 0.1, loss_type, label_smoothing=0.1)

    @pytest.mark.parametrize("shape", [(), (2, 3)])
    def test_another_rank_is_an_error_with_the_shape(self, shape):
        with pytest.raises(ValueError, match=r"\(P,\).*" + str(shape).replace("(", r"\(").replace(")", r"\)")):
            preference_loss(torch.zeros(shape), 0.1)


def slow_calibration_error(margins, num_bins):
    """Bin by bin, a pair in the first bin whose upper edge is not below its confidence."""
    bins = [[] for _ in range(num_bins)]
    for margin in margins:
        confidence = 1 / (1 + math.exp(-abs(margin)))
        right = 1.0 if margin > 0 else 0.5 if margin == 0 else 0.0
        number = next(b for b in range(num_bins) if b == num_bins - 1 or confidence <= 0.5 + 0.5 * (b + 1) / num_bins)
        bins[number].append((confidence, right))
    error = 0.0
    for pairs in bins:
        if pairs:
            mean_confidence = sum(confidence for confidence, _ in pairs) / len(pairs)
            accuracy = sum(right for _, right in pairs) / len(pairs)
            error += len(pairs) / len(margins) * abs(accuracy - mean_confidence)
    return error


class TestCalibrationError:
    def test_a_model_that_is_right_as_often_as_it_says_has_none(self):
        sure = math.log(3)  # sigmoid(log 3) = 3 / 4, and three of four are right
        assert calibration_error(torch.tensor([sure, sure, sure, -sure])) == pytest.approx(0.0, abs=1e-6)

    def test_by_hand_in_one_bin(self):
        # Confidence 3 / 4 in both, right in one of two
        margins = torch.tensor([math.log(3), -math.log(3)])
        assert calibration_error(margins, num_bins=1) == pytest.approx(0.25)

    def test_by_hand_in_two_bins(self):
        # Up to 0.75: confidence 2 / 3, never right. Above: confidence 0.9, always right. A third and two thirds.
        margins = torch.tensor([-math.log(2), math.log(9), math.log(9)], dtype=torch.float64)
        assert calibration_error(margins, num_bins=2) == pytest.approx((2 / 3 + 2 * 0.1) / 3)

    def test_a_margin_of_zero_is_half_right(self):
        assert calibration_error(torch.zeros(3)) == 0.0

    def test_errors_of_different_bins_do_not_cancel_and_those_of_one_do(self):
        # Confidence 2 / 3 and always right, confidence 0.9 and never right
        margins = torch.tensor([math.log(2), -math.log(9)], dtype=torch.float64)
        assert calibration_error(margins, num_bins=10) == pytest.approx((1 / 3 + 0.9) / 2)
        assert calibration_error(margins, num_bins=1) == pytest.approx(abs(0.5 - (2 / 3 + 0.9) / 2))

    def test_the_upper_edge_belongs_to_the_bin(self):
        # Confidences 0.6 and 0.75, the edge of two bins, together: right once, of 0.675 on average
        margins = torch.tensor([math.log(1.5), -math.log(3)], dtype=torch.float64)
        assert calibration_error(margins, num_bins=2) == pytest.approx(0.175)

    @pytest.mark.parametrize("num_bins", [1, 2, 7, 10, 100])
    @pytest.mark.parametrize("seed", range(3))
    def test_it_is_the_slow_loop(self, seed, num_bins):
        rng = random.Random(seed)
        margins = [rng.choice([0.0, rng.gauss(0.5, 2), rng.gauss(0, 20)]) for _ in range(200)]
        actual = calibration_error(torch.tensor(margins, dtype=torch.float64), num_bins)
        assert actual == pytest.approx(slow_calibration_error(margins, num_bins), abs=1e-12)

    def test_extreme_margins_are_sure(self):
        assert calibration_error(torch.tensor([1000.0, 1000.0])) == 0.0
        assert calibration_error(torch.tensor([-1000.0, -1000.0])) == 1.0
        assert calibration_error(torch.tensor([-1000.0, 1000.0])) == 0.5

    def test_it_does_not_depend_on_the_order_and_needs_no_gradient(self):
        margins = torch.tensor([0.3, -1.2, 2.5, 0.9], requires_grad=True)
        assert calibration_error(margins) == pytest.approx(calibration_error(margins.flip(0)))

    def test_without_pairs_or_with_a_missing_margin_it_is_nan(self):
        assert math.isnan(calibration_error(torch.zeros(0)))
        assert math.isnan(calibration_error(torch.tensor([1.0, NAN])))

    def test_bad_input_is_an_error(self):
        with pytest.raises(ValueError, match=r"\(2, 2\)"):
            calibration_error(torch.zeros(2, 2))
        with pytest.raises(ValueError, match="num_bins=0"):
            calibration_error(torch.zeros(2), num_bins=0)
