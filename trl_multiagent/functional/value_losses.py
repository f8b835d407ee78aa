# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Losses of value functions. Shapes: `...` is (B,) samples, or (B, T) their tokens."""

import torch

from .masking import masked_mean


def value_loss(
    values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    old_values: torch.Tensor | None = None,
    clip_range: float | None = None,
    num_targets: torch.Tensor | float | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """
    Mean squared error of the values, clipped around the values at sampling time if asked:
    `mean(max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2))`, as in OpenAI's PPO without its factor 0.5.

    Args:
        values (`torch.Tensor` of shape `(...)`):
            Values under the current critic, with gradient.
        returns (`torch.Tensor` of shape `(...)`):
            Fixed targets; what stands at masked places has no effect.
        mask (`torch.Tensor` of shape `(...)`, bool):
            Samples that have a target.
        old_values (`torch.Tensor` of shape `(...)`, *optional*):
            Values when the batch was sampled. Needed with `clip_range`.
        clip_range (`float`, *optional*):
            Half width c of the interval around `old_values`.
        num_targets (`torch.Tensor` or `float`, *optional*):
            What the sum is divided by. Default: the samples that have a target here. Give the expected number for a
            part of a larger batch, so that the mean of the parts is the loss of the whole.
        scale (`float`, *optional*, defaults to `1.0`):
            Unit in which errors, and `clip_range`, are counted: the standard deviation of the returns with value
            normalisation.

    Returns:
        Scalar `torch.Tensor`; 0, attached to the graph, if no sample has a target.
    """
    if clip_range is not None and old_values is None:
        raise ValueError("`clip_range` needs `old_values`, the values when the batch was sampled.")
    for name, tensor in {"returns": returns, "mask": mask, "old_values": old_values}.items():
        if tensor is not None and tensor.shape != values.shape:
            raise ValueError(f"`values` and `{name}` must agree, got {tuple(values.shape)} and {tuple(tensor.shape)}.")
    # Replaced before any arithmetic: the gradient of 0 times NaN is NaN
    absent = ~mask.bool()
    values, returns = values.masked_fill(absent, 0.0) / scale, returns.detach().masked_fill(absent, 0.0) / scale
    squared_error = (values - returns) ** 2
    if clip_range is not None:
        old_values = old_values.detach().masked_fill(absent, 0.0) / scale
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
        squared_error = torch.maximum(squared_error, (clipped - returns) ** 2)
    if num_targets is None:
        return masked_mean(squared_error, mask)
    return squared_error.masked_fill(~mask.bool(), 0.0).sum() / num_targets
