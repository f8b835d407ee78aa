# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Losses of preference pairs of joint responses, and how well the margins are calibrated. Shapes: P pairs."""

import math

import torch
import torch.nn.functional as F


LOSS_TYPES = ("sigmoid", "hinge", "ipo")


def preference_loss(
    margins: torch.Tensor, beta: float, loss_type: str = "sigmoid", label_smoothing: float = 0.0
) -> torch.Tensor:
    """
    Loss of each pair, from its joint margin m: the sum over the actors of the log-ratio of policy and reference for
    the winner, minus that for the loser. With `s = label_smoothing`:

    - `"sigmoid"`: `-(1 - s) * log sigmoid(beta * m) - s * log sigmoid(-beta * m)`
      ([DPO](https://huggingface.co/papers/2305.18290); with s above 0 conservative DPO, Mitchell 2023, which takes a
      label to be wrong with probability s and is least where `sigmoid(beta * m) = 1 - s`)
    - `"hinge"`: `max(0, 1 - beta * m)` ([SLiC](https://huggingface.co/papers/2305.10425))
    - `"ipo"`: `(m - 1 / (2 * beta)) ** 2` ([IPO](https://huggingface.co/papers/2310.12036)); here the log-ratios in m
      are means over the tokens

    Args:
        margins (`torch.Tensor` of shape `(P,)`):
            Joint margins, with gradient.
        beta (`float`):
            Above 0. The larger, the closer the policies stay to their references.
        loss_type (`str`, *optional*, defaults to `"sigmoid"`):
            One of `LOSS_TYPES`.
        label_smoothing (`float`, *optional*, defaults to `0.0`):
            From 0 to below 0.5; above 0 with `"sigmoid"` alone.

    Returns:
        `torch.Tensor` of shape `(P,)`.

    Raises:
        ValueError: `margins` is not one-dimensional, or an option is out of range.
    """
    _check_rank(margins)
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"Unknown loss_type={loss_type!r}, expected one of {LOSS_TYPES}.")
    if not 0 < beta < math.inf:
        raise ValueError(f"beta={beta} must be a finite number above 0.")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing={label_smoothing} must be from 0 to below 0.5: at 0.5 the labels say nothing."
        )
    if label_smoothing > 0 and loss_type != "sigmoid":
        raise ValueError(
            f"label_smoothing={label_smoothing} has no meaning with loss_type={loss_type!r}. Set it to 0, or "
            f"loss_type='sigmoid'."
        )
    if loss_type == "hinge":
        return F.relu(1 - beta * margins)
    if loss_type == "ipo":
        return (margins - 1 / (2 * beta)) ** 2
    logits = beta * margins
    return -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


@torch.no_grad()
def calibration_error(margins: torch.Tensor, num_bins: int = 10) -> float:
    """
    Expected calibration error ([Guo et al. 2017](https://huggingface.co/papers/1706.04599)) of a Bradley-Terry model
    on pairs whose winner is known.

    The model gives the preferred side the probability `sigmoid(|m|)`, its confidence, and is right where the known
    winner is that side, `m > 0`; `m = 0` counts as half right. Pairs are put into bins of equal width over [0.5, 1] by
    their confidence, the upper edge belonging to the bin. The error is the mean over the pairs of their bin's
    `|share right - mean confidence|`: 0 for a model that is right as often as it says, at most 1.

    Args:
        margins (`torch.Tensor` of shape `(P,)`):
            Log-odds that the model gives the known winner, such as `beta` times the joint margins.
        num_bins (`int`, *optional*, defaults to `10`):
            At least 1.

    Returns:
        `float`; NaN without pairs, and where a margin is NaN.

    Raises:
        ValueError: `margins` is not one-dimensional, or there is no bin.
    """
    _check_rank(margins)
    if num_bins < 1:
        raise ValueError(f"num_bins={num_bins} must be at least 1.")
    if len(margins) == 0 or margins.isnan().any():
        return math.nan
    margins = margins.double()
    confidence = margins.abs().sigmoid()
    right = (margins.sign() + 1) / 2
    bins = ((confidence - 0.5) * 2 * num_bins).ceil().long().sub(1).clamp(0, num_bins - 1)
    # Of a bin: its number of pairs times the difference of its two means
    gaps = torch.zeros(num_bins, dtype=torch.float64, device=margins.device).index_add(0, bins, right - confidence)
    return (gaps.abs().sum() / len(margins)).item()


def _check_rank(margins: torch.Tensor) -> None:
    if margins.dim() != 1:
        raise ValueError(f"`margins` must have shape (P,), one for each pair, got {tuple(margins.shape)}.")
