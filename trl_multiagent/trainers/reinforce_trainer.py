# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Critic-free trainers: the joint samples of a prompt are each other's baseline."""

import torch

from ..functional.advantages import has_spread
from ..rollouts.batch import JointBatch
from .multi_agent_trainer import MultiAgentTrainer
from .reinforce_config import MAGRPOConfig


class MAGRPOTrainer(MultiAgentTrainer):
    """
    Multi-Agent Group Relative Policy Optimization: each actor is trained by GRPO on the joint reward (MAGRPO,
    [LLM Collaboration With Multi-Agent Reinforcement Learning](https://huggingface.co/papers/2508.04652)).

    Each prompt gets `num_generations` joint samples; sample g of every actor forms joint sample g. Advantages are
    those of TRL's `GRPOTrainer`, over each actor's rewards, and with one actor the training is `GRPOTrainer`'s to the
    bit. One thing differs on purpose: where the rewards of a group are equal up to rounding, its advantages are 0.

    Args: see [`MultiAgentTrainer`].
    """

    config_class = MAGRPOConfig

    def _credit(self, batch: JointBatch) -> None:
        for inputs, rewards, per_func in zip(batch.inputs, batch.rewards, batch.rewards_per_func, strict=True):
            varies = has_spread(rewards, batch.num_generations)
            if self.args.multi_objective_aggregation == "normalize_then_sum":
                # Functions are normalised each by itself and then over the batch, so groups are not tied by their sum
                by_func = torch.stack([has_spread(r, batch.num_generations) for r in per_func.unbind(-1)])
                varies = by_func.any().expand_as(varies)
            inputs["advantages"] = inputs["advantages"].masked_fill(~batch.local(varies), 0.0)
