# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""The metrics of a team: its own, and those that TRL's code collects in every actor."""

import logging
import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from ..agents.grpo_agent import GRPOAgent
from ..functional.advantages import is_shared


logger = logging.getLogger(__name__)

# Metrics of TRL's that describe rewards
_REWARD_METRICS = ("reward", "reward_std", "frac_reward_zero_std")


class TeamMetrics:
    """
    Collects metrics between two logs and names them: an actor's as `agent_i/...`, and once for the team what the
    actors share.

    Args:
        agents (sequence of [`GRPOAgent`]):
            The actors.
        reward_names (sequence of `str`):
            Names of the reward functions.
    """

    def __init__(self, agents: Sequence[GRPOAgent], reward_names: Sequence[str]):
        self.agents = agents
        self.reward_names = reward_names
        self._values: dict[str, dict[str, list[float]]] = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._shared_rewards = True
        # Evaluation: all rewards, since a mean of the batches' means would weigh a smaller last batch too much
        self._eval_rewards: list[torch.Tensor] = []
        self._eval_samples_left: int | None = None

    def add(self, mode: str, name: str, value: float) -> None:
        self._values[mode][name].append(value)

    def start_evaluation(self, num_samples: int | None) -> None:
        """Say how many joint samples an evaluation has, over all processes; what is beyond fills its last batch."""
        self._eval_samples_left = num_samples
        self.pop("eval")  # what an evaluation that broke off may have left

    def wanted_samples(self, mode: str) -> int | None:
        """How many joint samples of the coming batch are wanted; None for all."""
        return self._eval_samples_left if mode == "eval" else None

    def note_rewards(self, mode: str, rewards: torch.Tensor, rewards_per_func: torch.Tensor) -> None:
        """
        Take note of a batch's rewards.

        Args:
            mode (`str`):
                `"train"` or `"eval"`.
            rewards (`torch.Tensor` of shape `(N, B over all processes)`):
                Rewards of each actor, NaN where there is none.
            rewards_per_func (`torch.Tensor` of shape `(N, B over all processes, F)`):
                The same, of each reward function.
        """
        self._shared_rewards = self._shared_rewards and is_shared(rewards)
        if mode == "eval":
            size = rewards.size(1)
            if self._eval_samples_left is not None:
                size = min(size, self._eval_samples_left)
                self._eval_samples_left -= size
            rewards = rewards[:, :size]
            columns = torch.cat([rewards.unsqueeze(-1), rewards_per_func[:, :size]], dim=-1)
            self._eval_rewards.append(columns.cpu())
        missing = rewards.isnan()
        if missing.any():
            self.add(mode, "rewards/frac_missing", missing.float().mean().item())
        if missing.all() and rewards.numel():
            logger.warning("No joint response of this batch got a reward, so nothing is learned from it.")

    def pop(self, mode: str) -> dict[str, float | None]:
        """Means of all metrics since the last call. None where no value was a number, since loggers write JSON."""
        values = dict(self._values[mode])
        self._values[mode].clear()
        by_actor = [agent.pop_metrics(mode) for agent in self.agents]
        shared = self._shared_rewards
        for index, metrics in enumerate(by_actor):
            for name, numbers in metrics.items():
                is_reward = name in _REWARD_METRICS or name.startswith("rewards/")
                if not is_reward and name != "num_tokens" or is_reward and not shared:
                    values[f"agent_{index}/{name}"] = numbers
                if name == "num_tokens" or is_reward and shared:  # the last actor counted the tokens of all
                    values[name] = numbers
        means = {name: _mean(numbers) for name, numbers in values.items()}
        if not shared:
            own = [means[f"agent_{index}/reward"] for index in range(len(self.agents)) if by_actor[index]]
            if own:
                means["reward"] = _mean([math.nan if reward is None else reward for reward in own])
        if mode == "eval":
            means |= self._pop_eval_rewards(shared)
        self._shared_rewards = True
        return means

    def _pop_eval_rewards(self, shared: bool) -> dict[str, float | None]:
        if not self._eval_rewards:
            return {}
        columns = torch.cat(self._eval_rewards, dim=1)  # (N, samples, 1 + F): the weighted sum, then each function
        self._eval_rewards.clear()
        means = _describe(columns[:1] if shared else columns, "", self.reward_names)
        if not shared:
            for index in range(len(columns)):
                means |= _describe(columns[index : index + 1], f"agent_{index}/", self.reward_names)
        return means


def _describe(columns: torch.Tensor, prefix: str, reward_names: Sequence[str]) -> dict[str, float | None]:
    """Means and standard deviations of rewards of shape `(N, samples, 1 + F)`, under TRL's names."""
    names = [("reward", "reward_std"), *((f"rewards/{name}/mean", f"rewards/{name}/std") for name in reward_names)]
    described = {}
    for (mean, std), column in zip(names, columns.unbind(-1), strict=True):
        valid = column[~column.isnan()]
        described[prefix + mean] = valid.mean().item() if valid.numel() else None
        described[prefix + std] = valid.std().item() if valid.numel() > 1 else None
    return described


def _mean(values: list[float]) -> float | None:
    valid = [value for value in values if not math.isnan(value)]
    return sum(valid) / len(valid) if valid else None
