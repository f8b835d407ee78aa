# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
Samples as a matrix of groups, and back.

Shapes: S samples, K groups, M samples of the largest group. A place that no sample takes is -1 in a table and NaN in
values.
"""

from collections.abc import Sequence

import torch


def group_table(groups: Sequence[int]) -> torch.Tensor:
    """
    Where the samples of each group are.

    Args:
        groups (list of `int`, length S):
            Group of each sample.

    Returns:
        `torch.Tensor` of shape `(K, M)`, dtype long: the numbers of each group's samples, in order, then -1. Groups
        are in the order of their numbers.
    """
    members: dict[int, list[int]] = {}
    for sample, group in enumerate(groups):
        members.setdefault(group, []).append(sample)
    longest = max(map(len, members.values()), default=0)
    rows = [members[group] + [-1] * (longest - len(members[group])) for group in sorted(members)]
    return torch.tensor(rows, dtype=torch.long).view(len(rows), longest)


def to_groups(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Values of samples, `(S, ...)`, as `(K, M, ...)`."""
    table = table.to(values.device)
    absent = (table < 0).view(*table.shape, *[1] * (values.dim() - 1))
    return values[table.clamp(min=0)].masked_fill(absent, torch.nan)


def from_groups(grouped: torch.Tensor, table: torch.Tensor, num_samples: int) -> torch.Tensor:
    """The inverse of `to_groups` for `(K, M)`: `(S,)`."""
    table = table.to(grouped.device)
    values = grouped.new_zeros(num_samples)
    values[table[table >= 0]] = grouped[table >= 0]
    return values
