# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""A scored generation batch, between the rollout and the losses."""

from dataclasses import dataclass, field
from typing import Any

import torch

from .joint import JointRollout


@dataclass
class JointBatch:
    """
    A scored generation batch. N actors, B joint samples of this process, W processes.

    Attributes:
        rollout ([`JointRollout`]): what this process sampled.
        rewards (`torch.Tensor` of shape `(N, W * B)`): weighted sum of the reward functions for each actor, NaN where
            there is none.
        rewards_per_func (`torch.Tensor` of shape `(N, W * B, F)`): what each reward function gave.
        inputs (list of `dict`, length N): inputs of each actor's TRL loss; `advantages` may be replaced.
        num_generations (`int`): group size.
        mode (`str`): `"train"` or `"eval"`.
        process_index (`int`): number of this process.
        critic_inputs (`dict`): inputs of the critics' loss, tensors with first dimension B.
    """

    rollout: JointRollout
    rewards: torch.Tensor
    rewards_per_func: torch.Tensor
    inputs: list[dict[str, Any]]
    num_generations: int
    mode: str
    process_index: int
    critic_inputs: dict[str, torch.Tensor] = field(default_factory=dict)

    def local(self, values: torch.Tensor) -> torch.Tensor:
        """This process's part of a tensor over the joint samples of all processes."""
        size = len(self.rollout.rows)
        return values[self.process_index * size : (self.process_index + 1) * size]
