# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""The metrics of a team: its own, and those that TRL's code collects in every actor."""

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from ..agents.grpo_agent import GRPOAgent
from ..functional.advantages import is_shared
from ..rollouts.batch import JointBatch


logger = logging.getLogger(__name__)

# Metrics that describe rewards: said once where the actors share them
_REWARD_METRICS = ("reward", "reward_std", "frac_reward_zero_std")
_REWARD_PREFIXES = ("rewards/", "turn_")


class TeamMetrics:
    """
    Collects metrics between two logs and names them: an actor's as `<name>/...`, and once for the team what the actors
    share.

    Args:
        agents (sequence of [`GRPOAgent`]):
            The actors.
        agent_names (sequence of `str`):
            Their names.
        reward_names (sequence of `str`):
            Names of the reward functions.
    """

    def __init__(self, agents: Sequence[GRPOAgent], agent_names: Sequence[str], reward_names: Sequence[str]):
        self.agents = agents
        self.agent_names = agent_names
        self.reward_names = reward_names
        self._values: dict[str, dict[str, list[float]]] = {"train": defaultdict(list), "eval": defaultdict(list)}
        # In training, for each actor, what TRL's code does not see
        self._by_actor: list[dict[str, list[float]]] = [defaultdict(list) for _ in agents]
        self._shared_rewards = True
        # Evaluation: all values, since a mean of the batches' means would weigh a smaller last batch too much. For
        # each actor and name, tensors over joint responses
        self._eval_values: dict[int, dict[str, list[torch.Tensor]]] = {}
        self._eval_samples_left: int | None = None

    def state(self) -> dict[str, Any]:
        """What was collected for the next training log, for a checkpoint."""
        return {
            "values": _copied(self._values["train"]),
            "by_actor": [_copied(values) for values in self._by_actor],
            "by_trl": [agent.training_metrics() for agent in self.agents],
            "shared_rewards": self._shared_rewards,
        }

    def clear(self) -> None:
        """Forget what was collected for a training log."""
        self._values["train"].clear()
        for values in self._by_actor:
            values.clear()
        for agent in self.agents:
            agent.load_training_metrics({})

    def load(self, state: dict[str, Any]) -> None:
        self._values["train"].update(_copied(state["values"]))
        for own, saved in zip(self._by_actor, state["by_actor"], strict=True):
            own.update(_copied(saved))
        for agent, saved in zip(self.agents, state["by_trl"], strict=True):
            agent.load_training_metrics(saved)
        self._shared_rewards = state["shared_rewards"]

    def add(self, mode: str, name: str, value: float) -> None:
        self._values[mode][name].append(value)

    def add_for(self, agent: int, name: str, value: float) -> None:
        """Add a training metric of one actor, which is shown once where it describes rewards that are shared."""
        self._by_actor[agent][name].append(value)

    def start_evaluation(self, num_samples: int | None) -> None:
        """Say how many joint samples an evaluation has, over all processes; what is beyond fills its last batch."""
        self._eval_samples_left = num_samples
        self.pop("eval")  # what an evaluation that broke off may have left

    def wanted_samples(self, mode: str) -> int | None:
        """How many joint samples of the coming batch are wanted; None for all."""
        return self._eval_samples_left if mode == "eval" else None

    def note_rewards(self, batch: JointBatch, num_turns: int, counted_by_trl: bool) -> None:
        """
        Take note of a batch's rewards and returns.

        Args:
            batch ([`JointBatch`]):
                The batch.
            num_turns (`int`):
                Most turns of an interaction; several are described one by one.
            counted_by_trl (`bool`):
                Whether the rows that TRL's code sees are the joint responses, so that its statistics are right.
        """
        mode, rewards, returns = batch.mode, list(batch.rewards), list(batch.returns)
        per_func = [turn.rewards for turn in batch.turns]
        if mode == "eval" and self._eval_samples_left is not None:
            size = min(rewards[0].size(1), self._eval_samples_left)
            self._eval_samples_left -= size
            rewards[0], returns[0], per_func[0] = rewards[0][:, :size], returns[0][:, :size], per_func[0][:, :size]
        every, by_func = torch.cat(rewards, dim=1), torch.cat(per_func, dim=1)  # (N, J), (N, J, F) over all turns
        self._shared_rewards = self._shared_rewards and is_shared(every)
        for index, agent in enumerate(self.agents):
            values = {"reward": every[index]}
            values |= {f"rewards/{name}": by_func[index, :, f] for f, name in enumerate(self.reward_names)}
            turns = {}
            for number, (reward, value) in enumerate(zip(rewards, returns, strict=True), start=1):
                if num_turns > 1:
                    turns[f"turn_{number}/reward_mean"] = reward[index]
                    turns[f"turn_{number}/expected_return"] = value[index]
            if mode == "eval":
                for name, numbers in (values | turns).items():
                    self._eval_values.setdefault(index, {}).setdefault(name, []).append(numbers.cpu())
                continue
            seen_by_trl = counted_by_trl and agent.trainable
            for name, numbers in (turns if seen_by_trl else values | turns).items():
                for metric, number in _describe(name, numbers).items():
                    self._by_actor[index][metric].append(number)
        missing = every.isnan()
        if missing.any():
            self.add(mode, "rewards/frac_missing", missing.float().mean().item())
        if missing.all() and every.numel():
            logger.warning("No joint response of this batch got a reward, so nothing is learned from it.")

    def pop(self, mode: str) -> dict[str, float | None]:
        """Means of all metrics since the last call. None where no value was a number, since loggers write JSON."""
        values = dict(self._values[mode])
        self._values[mode].clear()
        shared = self._shared_rewards
        own_rewards = []
        for index, (agent, name) in enumerate(zip(self.agents, self.agent_names, strict=True)):
            metrics = agent.pop_metrics(mode)
            if mode == "train":
                metrics |= self._by_actor[index]
                self._by_actor[index] = defaultdict(list)
            own_rewards += metrics.get("reward", [])
            for metric, numbers in metrics.items():
                is_reward = metric in _REWARD_METRICS or metric.startswith(_REWARD_PREFIXES)
                # The last actor counted the tokens of all
                once = metric == "num_tokens" or is_reward and shared
                values[metric if once else f"{name}/{metric}"] = numbers
        means = {name: _mean(numbers) for name, numbers in values.items()}
        if not shared and own_rewards:
            means["reward"] = _mean(own_rewards)
        if mode == "eval":
            means |= self._pop_eval_values(shared)
        self._shared_rewards = True
        return means

    def _pop_eval_values(self, shared: bool) -> dict[str, float | None]:
        values = {
            index: {name: torch.cat(parts) for name, parts in by_name.items()}
            for index, by_name in self._eval_values.items()
        }
        self._eval_values.clear()
        if not values:
            return {}
        means = {}
        for name in values[0]:
            team = values[0][name] if shared else torch.cat([by_name[name] for by_name in values.values()])
            means |= _describe(name, team)
            if not shared:
                for index, by_name in values.items():
                    own = _describe(name, by_name[name])
                    means |= {f"{self.agent_names[index]}/{metric}": number for metric, number in own.items()}
        return {name: None if math.isnan(number) else number for name, number in means.items()}


def _describe(name: str, values: torch.Tensor) -> dict[str, float]:
    """Mean, and for a whole batch's rewards the standard deviation, under TRL's names; NaN where there is none."""
    valid = values[~values.isnan()]
    mean = valid.mean().item() if valid.numel() else math.nan
    if name.startswith("turn_"):
        return {name: mean}
    std = valid.std().item() if valid.numel() > 1 else math.nan
    return {name: mean, f"{name}_std": std} if name == "reward" else {f"{name}/mean": mean, f"{name}/std": std}


def _copied(lists: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: list(values) for name, values in lists.items()}


def _mean(values: list[float]) -> float | None:
    valid = [value for value in values if not math.isnan(value)]
    return sum(valid) / len(valid) if valid else None
