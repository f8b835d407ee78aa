# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
Generalized advantage estimation (GAE, [Schulman et al. 2016](https://huggingface.co/papers/1506.02438)): over the
turns of an interaction, and over the tokens of a completion.

Shapes: J joint responses of a turn, B completions, T tokens. Nothing here has a gradient.
"""

from collections.abc import Sequence

import torch

from .returns import mean_over_branches


@torch.no_grad()
def gae_over_turns(
    rewards: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    parents: Sequence[torch.Tensor],
    discount: float,
    gae_lambda: float,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """
    Advantages and value targets of every joint response, one step a turn:

    `delta_j = r_j + discount * mean(V_c) - V_j`, `A_j = delta_j + discount * gae_lambda * mean(A_c)`, the means over
    the joint responses c that continue j. The target is `A_j + V_j`, the lambda-return.

    `gae_lambda=0` is the temporal-difference error, `gae_lambda=1` the discounted return minus the value. Where
    nothing continues, the interaction is over and nothing is bootstrapped. With values `Q(h, a)` the mean over the
    branches estimates the next history's value, as in expected SARSA.

    Args:
        rewards (list with one `torch.Tensor` of shape `(J_k,)` for each turn k):
            Rewards, NaN where there is none.
        values (list with one `torch.Tensor` of shape `(J_k,)` for each turn k):
            Values at sampling time.
        parents (list with one `torch.Tensor` of shape `(J_k,)`, dtype long, for each turn k):
            Number of the joint response of turn k - 1 that each one continues. The first entry is not read.
        discount, gae_lambda (`float`):
            0 to 1.

    Returns:
        `tuple` of two lists with `torch.Tensor` of shape `(J_k,)`: advantages and targets; NaN where the reward, or
        all that follows with a weight above 0, is missing.
    """
    for name, other in (("values", values), ("parents", parents)):
        if len(other) != len(rewards):
            raise ValueError(f"`rewards` has {len(rewards)} turns, `{name}` {len(other)}; expected the same number.")
    for turn, (reward, value) in enumerate(zip(rewards, values, strict=True), start=1):
        if reward.dim() != 1 or value.shape != reward.shape:
            raise ValueError(
                f"Turn {turn}: `rewards` and `values` must have one shape (J,), got {tuple(reward.shape)} and "
                f"{tuple(value.shape)}."
            )
    advantages = [reward - value for reward, value in zip(rewards, values, strict=True)]
    for turn in range(len(rewards) - 1, 0, -1):
        size = len(rewards[turn - 1])
        following = [mean_over_branches(later[turn], parents[turn], size) for later in (values, advantages)]
        advantages[turn - 1] = (
            advantages[turn - 1] + _weighted(discount, following[0]) + _weighted(discount * gae_lambda, following[1])
        )
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


@torch.no_grad()
def gae_over_tokens(
    final_rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    discount: float,
    gae_lambda: float,
    token_rewards: torch.Tensor | None = None,
    next_values: torch.Tensor | None = None,
    next_advantages: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Advantages of every token of completions, one step a token: `delta_t = r_t + discount * V_{t+1} - V_t`,
    `A_t = delta_t + discount * gae_lambda * A_{t+1}`. The completion's reward is that of its last real token.

    Args:
        final_rewards (`torch.Tensor` of shape `(B,)`):
            Reward of each completion, NaN where there is none.
        values (`torch.Tensor` of shape `(B, T)`):
            Value of what stands before each token, at sampling time.
        mask (`torch.Tensor` of shape `(B, T)`, bool):
            Tokens that were sampled. What stands elsewhere has no effect, and steps go from one sampled token to the
            next.
        discount, gae_lambda (`float`):
            0 to 1.
        token_rewards (`torch.Tensor` of shape `(B, T)`, *optional*):
            Rewards of the single tokens, such as a KL penalty.
        next_values, next_advantages (`torch.Tensor` of shape `(B,)`, *optional*):
            Value and advantage of the step after the last token, where the interaction goes on. Default: 0, it is
            over.

    Returns:
        `tuple`: advantages of shape `(B, T)`, 0 at masked tokens and NaN in rows without a reward; value and advantage
        of shape `(B,)` of each row's first step, for what comes before it. A row without a token is a step that has
        the reward and no value of its own.
    """
    if values.dim() != 2 or mask.shape != values.shape or final_rewards.shape != values.shape[:1]:
        raise ValueError(
            f"Expected `final_rewards` (B,), `values` and `mask` (B, T), got {tuple(final_rewards.shape)}, "
            f"{tuple(values.shape)} and {tuple(mask.shape)}."
        )
    mask = mask.bool()
    values = values.masked_fill(~mask, 0.0)
    zeros = torch.zeros_like(final_rewards)
    next_values = zeros if next_values is None else next_values
    next_advantages = zeros if next_advantages is None else next_advantages
    token_rewards = torch.zeros_like(values) if token_rewards is None else token_rewards.masked_fill(~mask, 0.0)
    # Backwards, what the step at hand is followed by: its reward so far, the next value and the next advantage
    reward, value, advantage = final_rewards, next_values, next_advantages
    columns = []
    for t in reversed(range(values.size(1))):
        following = _weighted(discount, value) + _weighted(discount * gae_lambda, advantage)
        estimate = reward + token_rewards[:, t] + following - values[:, t]
        here = mask[:, t]
        columns.append(torch.where(here, estimate, 0.0))
        reward = torch.where(here, zeros, reward)
        value = torch.where(here, values[:, t], value)
        advantage = torch.where(here, estimate, advantage)
    advantages = torch.stack(columns[::-1], dim=1) if columns else torch.zeros_like(values)
    empty = ~mask.any(dim=1)
    first_values = torch.where(empty, final_rewards + _weighted(discount, next_values), value)
    first_advantages = torch.where(empty, _weighted(discount * gae_lambda, next_advantages), advantage)
    return advantages.masked_fill(mask & final_rewards.isnan()[:, None], torch.nan), first_values, first_advantages


def _weighted(weight: float, values: torch.Tensor) -> torch.Tensor:
    """`weight * values`, where with weight 0 a missing value is 0 too."""
    return weight * values if weight else torch.zeros_like(values)
