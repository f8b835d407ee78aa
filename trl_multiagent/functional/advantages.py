# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Credit: from rewards and values to advantages.

Shapes: N actors, B joint samples, K groups, G samples of a group, P combinations that a sample takes part in. A reward
that could not be given is NaN: it is left out of every baseline and its advantage is 0.
"""

from typing import Literal

import torch


AdvantageMode = Literal["raw", "mean", "rloo", "max"]

# Two rewards that differ by less than this (absolutely, or relative to their size) count as equal: their difference is
# rounding, and dividing it by a standard deviation near zero would turn it into a learning signal.
EQUAL_ATOL = 1e-8
EQUAL_RTOL = 1e-6

# What TRL adds to a standard deviation before it divides by it
STD_EPS = 1e-4


def _check_groups(values: torch.Tensor, name: str = "returns") -> None:
    if values.dim() not in (2, 3):
        raise ValueError(f"`{name}` must have shape (K, G) or (K, G, P), got {tuple(values.shape)}.")


def is_shared(rewards: torch.Tensor) -> bool:
    """Whether all actors got the same rewards, of shape `(N, B)`; a missing reward (NaN) equals a missing one."""
    if rewards.dim() != 2:
        raise ValueError(f"`rewards` must have shape (N, B), got {tuple(rewards.shape)}.")
    return bool(((rewards == rewards[:1]) | (rewards.isnan() & rewards[:1].isnan())).all())


def has_spread(returns: torch.Tensor) -> torch.Tensor:
    """
    Whether a group holds two values that really differ.

    Args:
        returns (`torch.Tensor` of shape `(K, G)` or `(K, G, P)`):
            Values of each group along dimension 1, NaN where there is none.

    Returns:
        `torch.Tensor` of shape `(K,)` or `(K, P)`, dtype bool. False for groups with fewer than two valid values.
    """
    _check_groups(returns)
    valid = ~torch.isnan(returns)
    highest = returns.masked_fill(~valid, -torch.inf).amax(dim=1)
    lowest = returns.masked_fill(~valid, torch.inf).amin(dim=1)
    scale = torch.maximum(highest.abs(), lowest.abs())
    # An empty group has highest = -inf, lowest = inf: the comparison is False, as it must be.
    return (highest - lowest) > EQUAL_ATOL + EQUAL_RTOL * scale.nan_to_num(posinf=0.0)


def group_advantages(returns: torch.Tensor, mode: AdvantageMode) -> torch.Tensor:
    """
    Advantages of samples that are each other's baseline, `A_g = R_g - b_g`:

    | `mode` | `b_g` | |
    | --- | --- | --- |
    | `"raw"` | 0 | REINFORCE (Williams 1992) |
    | `"mean"` | mean of the group | GRPO (Shao et al. 2024) |
    | `"rloo"` | mean of the *other* samples | RLOO (Kool et al. 2019, Ahmadian et al. 2024) |
    | `"max"` | maximum of the group | after ReMax (Li et al. 2024), whose baseline is the greedy answer |

    `"rloo"` is `G / (G - 1)` times `"mean"`; `"raw"` and `"mean"` differ in variance only; `"max"` is never positive.

    With combinations (`P` columns, in each of which a sample meets the same teammates as the others of its group) the
    baseline is taken in each column and the advantage is the mean over the columns. Over all combinations this is
    COMA's counterfactual advantage (Foerster et al. 2018): the sample's mean minus the grand mean.

    Args:
        returns (`torch.Tensor` of shape `(K, G)` or `(K, G, P)`):
            Returns, NaN where there is none.
        mode (`str`):
            `"raw"`, `"mean"`, `"rloo"` or `"max"`.

    Returns:
        `torch.Tensor` of shape `(K, G)`; 0 where there is no return or no baseline, and, except for `"raw"`, where the
        returns of a group are equal up to rounding.
    """
    _check_groups(returns)
    if mode == "raw":
        advantages = returns
    elif mode == "mean":
        advantages = returns - returns.nanmean(dim=1, keepdim=True)
    elif mode == "rloo":
        count = (~returns.isnan()).sum(dim=1, keepdim=True)
        others = (returns.nansum(dim=1, keepdim=True) - returns) / (count - 1)
        advantages = returns - others.masked_fill(count < 2, torch.nan)
    elif mode == "max":
        highest = returns.masked_fill(returns.isnan(), -torch.inf).amax(dim=1, keepdim=True)
        advantages = returns - highest
    else:
        raise ValueError(f"advantage_mode={mode!r}, expected 'raw', 'mean', 'rloo' or 'max'.")
    if mode != "raw":
        known = ~returns.isnan()
        alone = known & (known.sum(dim=1, keepdim=True) < 2)  # nothing to compare with: no advantage, rather than 0
        advantages = advantages.masked_fill(~has_spread(returns).unsqueeze(1) & known, 0.0)
        advantages = advantages.masked_fill(alone, torch.nan)
    if returns.dim() == 3:
        advantages = advantages.nanmean(dim=-1)
        if mode != "raw":  # columns may cancel each other, but for rounding
            size = returns.abs().nan_to_num(nan=0.0).amax(dim=(1, 2)).unsqueeze(1)
            largest = advantages.abs().nan_to_num(nan=0.0).amax(dim=1, keepdim=True)
            advantages = advantages.masked_fill(largest <= EQUAL_ATOL + EQUAL_RTOL * size, 0.0)
    return advantages.nan_to_num(nan=0.0)


def nan_std(values: torch.Tensor, dim: int) -> torch.Tensor:
    """
    Sample standard deviation along `dim`, which is kept, without the NaNs; NaN where fewer than two values are left.
    The operations are those of TRL, in its order, so that the last bit is too.
    """
    squares = ((values - values.nanmean(dim=dim, keepdim=True)) ** 2).nanmean(dim=dim, keepdim=True)
    count = (~values.isnan()).sum(dim=dim, keepdim=True)
    correction = torch.where(count > 1, count / (count - 1), torch.nan)
    return torch.sqrt(squares * correction)


def scale_by_std(advantages: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """
    Divide advantages by a standard deviation and nothing else: they are not centred, so the estimator stays what it
    is. Where there is no deviation (NaN) there is one value, whose advantage is 0 already.

    Args:
        advantages (`torch.Tensor` of shape `(K, G)`):
            Advantages.
        std (`torch.Tensor` that broadcasts to `(K, G)`):
            Standard deviation of the returns, for instance of each group, `(K, 1)`.
    """
    return (advantages / (std + STD_EPS)).nan_to_num(nan=0.0)


def trajectory_advantages(returns: torch.Tensor, weights: torch.Tensor, scale: bool) -> torch.Tensor:
    """
    Advantages over all that one actor said about one task, in all turns (Dr. MAS, arXiv 2602.08847):
    `A = (R - mu) / (sigma + eps)`, with the mean and the deviation of this task and this actor.

    A trajectory that takes more turns has more samples; with weights that sum to 1 over a trajectory, each trajectory
    counts once, and a talkative one does not pull the mean.

    Args:
        returns (`torch.Tensor` of shape `(K, M)`):
            Returns of the actor's M samples for each task, NaN where there is none.
        weights (`torch.Tensor` of shape `(K, M)`):
            Weight of each sample.
        scale (`bool`):
            Whether to divide by the standard deviation (with `W / (W - 1)` for its bias, W the sum of the weights,
            which is the number of trajectories).

    Returns:
        `torch.Tensor` of shape `(K, M)`; 0 for a task with one trajectory and where all returns are equal.
    """
    if returns.shape != weights.shape or returns.dim() != 2:
        raise ValueError(f"Shapes must be (K, M), got {tuple(returns.shape)} and {tuple(weights.shape)}.")
    weights = weights.masked_fill(returns.isnan(), 0.0)
    total = weights.sum(dim=1, keepdim=True)
    mean = (returns.nan_to_num(nan=0.0) * weights).sum(dim=1, keepdim=True) / total
    advantages = returns - mean
    taught = has_spread(returns).unsqueeze(1) & (total > 1.5)  # a sum of shares is a whole number but for rounding
    if scale:
        variance = (advantages.nan_to_num(nan=0.0) ** 2 * weights).sum(dim=1, keepdim=True) / (total - 1)
        advantages = advantages / (variance.clamp(min=0.0).sqrt() + STD_EPS)
    return advantages.masked_fill(~taught, 0.0).nan_to_num(nan=0.0)


def role_advantages(returns: torch.Tensor, baseline: float, decay: float) -> tuple[torch.Tensor, float]:
    """
    Advantages against a running mean of a role's own returns (role-conditioned advantage estimation of SPIRAL, arXiv
    2506.24119): in order, `A = R - b`, then `b <- decay * b + (1 - decay) * R`. A sample's own return is not yet in
    the baseline that it is compared with, so the gradient stays unbiased.

    Args:
        returns (`torch.Tensor` of shape `(B,)`):
            Returns of one role in the order in which they count, NaN where there is none.
        baseline (`float`):
            The running mean before the first of them.
        decay (`float`):
            How much of the running mean a sample keeps.

    Returns:
        `tuple`: advantages of shape `(B,)`, 0 where there is no return, and the running mean afterwards.
    """
    if returns.dim() != 1:
        raise ValueError(f"`returns` must have shape (B,), got {tuple(returns.shape)}.")
    advantages = []
    for value in returns.tolist():
        known = value == value  # not NaN
        advantages.append(value - baseline if known else 0.0)
        baseline = decay * baseline + (1 - decay) * value if known else baseline
    return torch.tensor(advantages, dtype=returns.dtype, device=returns.device), baseline


def total_effect(returns: torch.Tensor) -> torch.Tensor:
    """
    How much of the returns' variance depends on the choice of one actor, everything else held fixed: the total effect
    of the analysis of variance (Sobol 1993, in Jansen's 1999 form), `E[Var(R | what the others said)]`, a scalar.

    Args:
        returns (`torch.Tensor` of shape `(K, G, P)`):
            In each column the same teammates, along dimension 1 different choices of the actor; NaN where unknown.

    Returns:
        Scalar `torch.Tensor`: the mean over the columns of the sample variance along dimension 1; NaN without a column
        that has two values.
    """
    if returns.dim() != 3:
        raise ValueError(f"`returns` must have shape (K, G, P), got {tuple(returns.shape)}.")
    return (nan_std(returns, dim=1) ** 2).nanmean()


def leave_one_out_mean(values: torch.Tensor) -> torch.Tensor:
    """
    For each sample, the mean over the *other* samples of its group; alone in its group, over all samples of other
    groups.

    With `values = Q(h, a)` it estimates `V(h) = E_a Q(h, a)` without using the sample's own action, so subtracting it
    leaves the policy gradient unbiased (Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free"; with a
    learned Q it is the baseline of COMA, Foerster et al. 2018, over joint actions). A mean over other histories does
    so too, but explains less.

    Args:
        values (`torch.Tensor` of shape `(K, M)`):
            Groups of samples, NaN where a group has fewer than M.

    Returns:
        `torch.Tensor` of shape `(K, M)`; 0 for a sample without any other, NaN where there is no sample.
    """
    if values.dim() != 2:
        raise ValueError(f"`values` must have shape (K, M), got {tuple(values.shape)}.")
    there = ~values.isnan()
    known = values.masked_fill(~there, 0.0)
    counts = there.sum(dim=1, keepdim=True)  # (K, 1)
    totals = known.sum(dim=1, keepdim=True)
    within = (totals - known) / (counts - 1).clamp(min=1)
    elsewhere = (totals.sum() - totals) / (counts.sum() - counts).clamp(min=1)
    return torch.where(counts > 1, within, elsewhere).masked_fill(~there, torch.nan)


def normalize_advantages(advantages: torch.Tensor, valid: torch.Tensor, eps: float = 1e-8) -> torch.Tensor:
    """
    Shift and scale advantages to mean 0 and standard deviation 1 over the valid places (PPO's normalisation).

    Args:
        advantages (`torch.Tensor` of any shape):
            Advantages of the whole generation batch, over all processes.
        valid (`torch.Tensor` of the same shape, bool):
            Places that have an advantage. The others get 0.
        eps (`float`, *optional*, defaults to `1e-8`):
            Added to the standard deviation.

    Returns:
        `torch.Tensor` of the same shape. All 0 where fewer than two valid advantages differ.
    """
    if advantages.shape != valid.shape:
        raise ValueError(f"Shapes must agree, got {tuple(advantages.shape)} and {tuple(valid.shape)}.")
    kept = advantages[valid]
    if kept.numel() < 2 or kept.max() - kept.min() <= EQUAL_ATOL + EQUAL_RTOL * kept.abs().max():
        return torch.zeros_like(advantages)
    normalized = (advantages - kept.mean()) / (kept.std() + eps)
    return normalized.masked_fill(~valid, 0.0)


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
    """
    `1 - Var(returns - values) / Var(returns)`, a scalar: 1 for a perfect critic, 0 for a constant one.

    Args:
        values, returns (`torch.Tensor` of one shape):
            Predictions and targets; pairs with a NaN are left out.

    Returns:
        Scalar `torch.Tensor`; NaN where the returns do not vary by more than rounding, since nothing can be explained
        there.
    """
    kept = ~(torch.isnan(values) | torch.isnan(returns))
    values, returns = values[kept], returns[kept]
    if returns.numel() < 2:
        return torch.tensor(torch.nan, device=values.device)
    # Returns are sums of rewards and values, and are rounded as both
    scale = torch.maximum(returns.abs().max(), values.abs().max())
    if returns.max() - returns.min() <= EQUAL_ATOL + EQUAL_RTOL * scale:
        return torch.tensor(torch.nan, device=values.device)
    return 1 - (returns - values).var() / returns.var()
