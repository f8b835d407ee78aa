# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Returns over the turns of an interaction. Shapes: N actors, J joint responses of a turn."""

from collections.abc import Sequence

import torch


def mean_over_branches(values: torch.Tensor, parents: torch.Tensor, num_parents: int) -> torch.Tensor:
    """
    Mean of the values of the joint responses that continue each joint response of the turn before.

    Args:
        values (`torch.Tensor` of shape `(..., J)`):
            Values of a turn; NaN where unknown, which is left out of the mean.
        parents (`torch.Tensor` of shape `(J,)`, dtype long):
            Number of the joint response that each one continues.
        num_parents (`int`):
            Joint responses of the turn before.

    Returns:
        `torch.Tensor` of shape `(..., num_parents)`: 0 where nothing continues, NaN where nothing that continues is
        known.
    """
    if parents.shape != values.shape[-1:]:
        raise ValueError(f"`values` has {values.size(-1)} joint responses, `parents` {parents.numel()}.")
    known = ~values.isnan()
    total = values.new_zeros(*values.shape[:-1], num_parents)
    count = torch.zeros_like(total).index_add(-1, parents, known.to(total.dtype))
    continued = torch.zeros_like(total).index_add(-1, parents, torch.ones_like(values)) > 0
    total = total.index_add(-1, parents, values.masked_fill(~known, 0.0))
    return torch.where(continued, total / count, 0.0)  # 0 / 0 = NaN where all that follows is missing


def discounted_returns(
    rewards: Sequence[torch.Tensor], parents: Sequence[torch.Tensor], discount: float
) -> list[torch.Tensor]:
    """
    Return of every joint response: its own reward plus the discounted mean of the returns of the joint responses that
    continue it, `R_j = r_j + discount * mean(R_c for c with parent j)`.

    The mean over the branches estimates the value of what follows; a chain has one branch, and a joint response that
    nothing continues (the last turn, or an interaction that ended early) has its reward alone.

    Args:
        rewards (list with one `torch.Tensor` of shape `(N, J_k)` for each turn k):
            Rewards of each actor, NaN where there is none.
        parents (list with one `torch.Tensor` of shape `(J_k,)`, dtype long, for each turn k):
            Number of the joint response of turn k - 1 that each one continues. The first entry is not read.
        discount (`float`):
            Weight of what follows, 0 to 1.

    Returns:
        list of `torch.Tensor` of shape `(N, J_k)`; NaN where the reward, or all that follows, is missing.
    """
    if len(rewards) != len(parents):
        raise ValueError(f"`rewards` has {len(rewards)} turns, `parents` {len(parents)}; expected the same number.")
    returns = [turn.clone() for turn in rewards]
    if not discount:
        return returns
    for turn in range(len(rewards) - 1, 0, -1):
        follows = mean_over_branches(returns[turn], parents[turn], returns[turn - 1].size(-1))
        returns[turn - 1] = returns[turn - 1] + discount * follows
    return returns
