# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Returns over the turns of an interaction. Shapes: N actors, J joint responses of a turn."""

from collections.abc import Sequence

import torch


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
        later, parent = returns[turn], parents[turn]
        if parent.shape != later.shape[1:]:
            raise ValueError(f"Turn {turn + 1} has {later.size(1)} joint responses and {parent.numel()} parents.")
        known = ~later.isnan()
        total = torch.zeros_like(returns[turn - 1]).index_add(1, parent, later.masked_fill(~known, 0.0))
        count = torch.zeros_like(total).index_add(1, parent, known.to(total.dtype))
        continued = torch.zeros_like(total).index_add(1, parent, torch.ones_like(later)) > 0
        follows = torch.where(continued, total / count, 0.0)  # 0 / 0 = NaN where all that follows is missing
        returns[turn - 1] = returns[turn - 1] + discount * follows
    return returns
