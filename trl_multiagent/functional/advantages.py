# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Credit: from rewards and values to advantages.

Shapes: B joint samples, ordered by prompt; G generations for each prompt, so B is a multiple of G. A reward that could
not be given is NaN: it is left out of every baseline and its advantage is 0.
"""

import torch


# Two rewards that differ by less than this (absolutely, or relative to their size) count as equal: their difference is
# rounding, and dividing it by a standard deviation near zero would turn it into a learning signal.
EQUAL_ATOL = 1e-8
EQUAL_RTOL = 1e-6


def _grouped(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    if rewards.dim() != 1 or rewards.numel() % num_generations:
        raise ValueError(
            f"`rewards` must have shape (B,) with B a multiple of num_generations={num_generations}, got "
            f"{tuple(rewards.shape)}."
        )
    return rewards.view(-1, num_generations)  # (B/G, G)


def is_shared(rewards: torch.Tensor) -> bool:
    """Whether all actors got the same rewards, of shape `(N, B)`; a missing reward (NaN) equals a missing one."""
    if rewards.dim() != 2:
        raise ValueError(f"`rewards` must have shape (N, B), got {tuple(rewards.shape)}.")
    return bool(((rewards == rewards[:1]) | (rewards.isnan() & rewards[:1].isnan())).all())


def has_spread(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """
    Whether the group of each joint sample holds two rewards that really differ.

    Args:
        rewards (`torch.Tensor` of shape `(B,)`):
            Rewards, NaN where there is none.
        num_generations (`int`):
            Group size G.

    Returns:
        `torch.Tensor` of shape `(B,)`, dtype bool. False for groups with fewer than two valid rewards.
    """
    groups = _grouped(rewards, num_generations)
    valid = ~torch.isnan(groups)
    highest = groups.masked_fill(~valid, -torch.inf).amax(dim=1)
    lowest = groups.masked_fill(~valid, torch.inf).amin(dim=1)
    scale = torch.maximum(highest.abs(), lowest.abs())
    # An empty group has highest = -inf, lowest = inf: the comparison is False, as it must be.
    spread = (highest - lowest) > EQUAL_ATOL + EQUAL_RTOL * scale.nan_to_num(posinf=0.0)
    return spread.repeat_interleave(num_generations)  # (B,)


def td_error(rewards: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """
    Temporal-difference error of a single turn, `r - V(h)`: the episode ends, so nothing is bootstrapped.

    Args:
        rewards (`torch.Tensor` of shape `(B,)`):
            Rewards, NaN where there is none.
        values (`torch.Tensor` of shape `(B,)`):
            Values of the histories before the turn.

    Returns:
        `torch.Tensor` of shape `(B,)`, detached; 0 where the reward is missing.
    """
    if rewards.shape != values.shape:
        raise ValueError(f"`rewards` and `values` must agree, got {tuple(rewards.shape)}, {tuple(values.shape)}.")
    return (rewards - values.detach()).nan_to_num(nan=0.0)


def leave_one_out_mean(values: torch.Tensor, num_generations: int) -> torch.Tensor:
    """
    For each joint sample, the mean over the *other* samples of its group.

    With `values = Q(h, a)` it estimates `V(h) = E_a Q(h, a)` without using the sample's own action, so subtracting it
    leaves the policy gradient unbiased (Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free"; with a
    learned Q it is the baseline of COMA, Foerster et al. 2018, over joint actions).

    Args:
        values (`torch.Tensor` of shape `(B,)`):
            One value for each joint sample.
        num_generations (`int`):
            Group size G, at least 2.

    Returns:
        `torch.Tensor` of shape `(B,)`.
    """
    if num_generations < 2:
        raise ValueError(f"A leave-one-out mean needs at least 2 samples in a group, got {num_generations}.")
    groups = _grouped(values, num_generations)
    return ((groups.sum(dim=1, keepdim=True) - groups) / (num_generations - 1)).reshape(-1)  # (B,)


def normalize_advantages(advantages: torch.Tensor, valid: torch.Tensor, eps: float = 1e-8) -> torch.Tensor:
    """
    Shift and scale advantages to mean 0 and standard deviation 1 over the valid samples (PPO's normalisation).

    Args:
        advantages (`torch.Tensor` of shape `(B,)`):
            Advantages of the whole generation batch, over all processes.
        valid (`torch.Tensor` of shape `(B,)`, bool):
            Samples that have a reward. The others get 0.
        eps (`float`, *optional*, defaults to `1e-8`):
            Added to the standard deviation.

    Returns:
        `torch.Tensor` of shape `(B,)`. All 0 where fewer than two valid advantages differ.
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
        values, returns (`torch.Tensor` of shape `(B,)`):
            Predictions and targets; pairs with a NaN are left out.

    Returns:
        Scalar `torch.Tensor`; NaN where the returns do not vary, since nothing can be explained there.
    """
    kept = ~(torch.isnan(values) | torch.isnan(returns))
    values, returns = values[kept], returns[kept]
    if returns.numel() < 2 or returns.var() == 0:
        return torch.tensor(torch.nan, device=values.device)
    return 1 - (returns - values).var() / returns.var()
