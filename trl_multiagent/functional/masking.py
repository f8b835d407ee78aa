# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Masks and the reductions over them.

Shapes: B rows, T tokens. Masks are bool or 0/1, True = keep.
"""

import torch


def last_token_index(mask: torch.Tensor) -> torch.Tensor:
    """
    Index of the last kept position of each row, on whichever side the padding is.

    Args:
        mask (`torch.Tensor` of shape `(B, T)`):
            True at real tokens. The kept positions need not be contiguous.

    Returns:
        `torch.Tensor` of shape `(B,)`, dtype long. 0 for a row with no kept position.
    """
    if mask.dim() != 2:
        raise ValueError(f"`mask` must have shape (B, T), got {tuple(mask.shape)}.")
    positions = torch.arange(mask.size(1), device=mask.device)
    return (positions * mask.bool()).amax(dim=1)  # (B,)


def pad_on_the_right(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Rows with their kept tokens first, in order, and everything else behind them.

    Args:
        ids, mask (`torch.Tensor` of shape `(B, T)`):
            Token ids, and True at those to keep.

    Returns:
        `tuple` of two `torch.Tensor` of shape `(B, L)`, where L is the number of kept tokens in the longest row: ids
        and mask (long).
    """
    if ids.shape != mask.shape or ids.dim() != 2:
        raise ValueError(f"`ids` and `mask` must have one shape (B, T), got {tuple(ids.shape)}, {tuple(mask.shape)}.")
    mask = mask.long()
    order = (1 - mask).argsort(dim=1, stable=True)[:, : int(mask.sum(dim=1).max())]
    return ids.gather(1, order), mask.gather(1, order)


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Mean of `values` where `mask` is True, a scalar. An empty mask gives 0, attached to the graph.

    Values at masked positions are replaced before they are summed, so a NaN there has no effect, neither on the
    result nor on the gradient.
    """
    if values.shape != mask.shape:
        raise ValueError(f"`values` and `mask` must agree, got {tuple(values.shape)} and {tuple(mask.shape)}.")
    mask = mask.bool()
    return values.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)
