# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Critic-free trainers: what the same actor said to the same task is the baseline."""

import dataclasses
from typing import Any

import torch
from accelerate.utils import gather_object

from ..functional.advantages import (
    group_advantages,
    has_spread,
    nan_std,
    role_advantages,
    scale_by_std,
    trajectory_advantages,
)
from ..functional.groups import from_groups, group_table, to_groups
from ..rollouts.batch import JointBatch
from ..rollouts.interaction import RolloutSettings, Turn
from .multi_agent_trainer import MultiAgentTrainer
from .reinforce_config import MAGRPOConfig, MAREINFORCEConfig, MAReMaxConfig, MARLOOConfig, ReinforceConfig


class ReinforceTrainer(MultiAgentTrainer):
    """
    What the critic-free trainers share: a sample's advantage is its return minus a baseline that is a value of the
    config (`advantage_mode`, `advantage_groups`), and each actor is trained on its own advantages by TRL's loss.

    Args: see [`MultiAgentTrainer`].
    """

    config_class = ReinforceConfig

    def __init__(self, *args, **kwargs):
        # Running means of the returns, for each game, actor and turn
        self._role_baselines: dict[str, float] = {}
        self._batch_games: list[str] = []
        super().__init__(*args, **kwargs)

    def _check_row(self, row: dict[str, Any]) -> None:
        column = self.args.role_baseline_column
        if column is not None and column not in row:
            raise ValueError(f"role_baseline_column={column!r} is no column of the dataset, which has {sorted(row)}.")

    def _rollout_settings(self, mode: str) -> RolloutSettings:
        settings = super()._rollout_settings(mode)
        if mode == "eval" or self.args.joint_mode == "aligned":
            return settings
        return dataclasses.replace(settings, cross=True, cross_samples=self.args.cross_samples)

    def _credit(self, batch: JointBatch) -> None:
        self._batch_games = self._games(batch) if self.args.advantage_groups == "role" else []
        normalized_by_trl = self.args.multi_objective_aggregation == "normalize_then_sum"
        for agent, inputs in enumerate(batch.inputs):
            if inputs is None:
                continue
            if normalized_by_trl:
                inputs["advantages"] = self._without_rounding(batch, agent)
            else:
                batch.set_advantages(agent, self._advantages(batch, agent))
            if batch.mode == "train":
                name = f"{self.agent_names[agent]}/advantage_second_moment"
                self._metrics.add(batch.mode, name, self._second_moment(batch, inputs["advantages"]))

    def _advantages(self, batch: JointBatch, agent: int) -> list[torch.Tensor]:
        """An actor's advantages, `(S,)` for each turn."""
        args = self.args
        returns = [value[agent] for value in batch.returns]
        if args.advantage_groups == "role":
            return self._role_advantages(batch, agent, batch.of_samples(agent, returns))
        if args.advantage_groups == "actor":
            return self._trajectory_advantages(batch, batch.of_samples(agent, returns))
        return self._turn_advantages(batch, agent, returns)

    def _turn_advantages(self, batch: JointBatch, agent: int, returns: list[torch.Tensor]) -> list[torch.Tensor]:
        """Against the samples of the same context, or in a chain of the same task, and of the same turn."""
        samples = batch.of_samples(agent, returns)
        over_batch = nan_std(torch.cat(samples), dim=0) if self.args.scale_rewards == "batch" else None
        advantages = []
        without_spread = []
        for turn, value, sample in zip(batch.turns, returns, samples, strict=True):
            table = group_table(self._groups(turn, batch.mode))
            columns = to_groups(value[turn.pairing.columns[agent].to(value.device)], table)  # (K, G, P)
            if columns.size(-1) == 1:
                columns = columns.squeeze(-1)
            estimates = group_advantages(columns, self.args.advantage_mode)  # (K, G)
            if self.args.scale_rewards == "group":
                estimates = scale_by_std(estimates, nan_std(to_groups(sample, table), dim=1))
            elif self.args.scale_rewards == "batch":
                estimates = scale_by_std(estimates, over_batch)
            advantages.append(from_groups(estimates, table, len(turn.tasks)))
            without_spread.append(~has_spread(to_groups(sample, table)))
        if len(batch.turns) > 1 or batch.turns[0].pairing.columns[agent].size(1) > 1:
            share = torch.cat(without_spread).float().mean().item()
            if self.args.joint_mode == "cross":  # each actor has combinations of its own
                self._metrics.add(batch.mode, f"{self.agent_names[agent]}/frac_reward_zero_std", share)
            elif batch.mode == "train":
                self._metrics.add_for(agent, "frac_reward_zero_std", share)
        return advantages

    def _groups(self, turn: Turn, mode: str) -> list[int]:
        """What the samples of a turn are compared within."""
        return turn.contexts if mode == "train" and self.args.rollout_mode == "tree" else turn.tasks

    def _trajectory_advantages(self, batch: JointBatch, samples: list[torch.Tensor]) -> list[torch.Tensor]:
        """Against all that the actor said to the same task; each first answer counts once with what grew of it."""
        roots = [torch.arange(len(batch.turns[0].tasks))]
        for turn in batch.turns[1:]:
            roots.append(roots[-1][turn.parents])
        known = ~torch.cat(samples).isnan().cpu()  # a trajectory's weight is shared by the returns that are there
        sizes = torch.bincount(torch.cat(roots)[known], minlength=len(roots[0])).clamp(min=1)
        table = group_table([task for turn in batch.turns for task in turn.tasks])
        returns = to_groups(torch.cat(samples), table)
        weights = to_groups(1 / sizes[torch.cat(roots)].to(returns), table).nan_to_num(nan=0.0)
        advantages = trajectory_advantages(returns, weights, scale=self.args.scale_rewards == "group")
        flat = from_groups(advantages, table, sum(map(len, samples)))
        return list(flat.split([len(sample) for sample in samples]))

    def _role_advantages(self, batch: JointBatch, agent: int, samples: list[torch.Tensor]) -> list[torch.Tensor]:
        """Against the running mean of the actor's returns in the same game and turn."""
        advantages = []
        for turn, sample in zip(batch.turns, samples, strict=True):
            own = torch.zeros_like(sample)
            of_sample = [self._batch_games[task] for task in turn.tasks]
            for game in dict.fromkeys(of_sample):
                key = f"{game}/{self.agent_names[agent]}/{turn.number}"
                index = [s for s, other in enumerate(of_sample) if other == game]
                own[index], baseline = role_advantages(
                    sample[index], self._role_baselines.get(key, 0.0), self.args.role_baseline_decay
                )
                if batch.mode == "train":
                    self._role_baselines[key] = baseline
                    self._metrics.add(batch.mode, f"{self.agent_names[agent]}/role_baseline", baseline)
            advantages.append(own)
        return advantages

    def _games(self, batch: JointBatch) -> list[str]:
        """The game of each task of the batch, the same on every process."""
        column, turn = self.args.role_baseline_column, batch.turns[0]
        if column is None:
            return [""] * (max(turn.tasks) + 1)
        names = gather_object([str(row[column]) for row in turn.rows])
        by_task = dict(zip(turn.tasks, names, strict=True))
        return [by_task[task] for task in range(len(by_task))]

    def _without_rounding(self, batch: JointBatch, agent: int) -> torch.Tensor:
        """TRL's advantages of normalised functions, without those of functions that do not vary but for rounding."""
        rewards = batch.turns[0].rewards[agent]  # (J, F)
        groups = rewards.view(-1, batch.num_generations, rewards.size(-1))
        # Functions are normalised each by itself and then over the batch, so groups are not tied by their sum
        varies = bool(has_spread(groups).any())
        advantages = batch.inputs[agent]["advantages"]
        return advantages if varies else torch.zeros_like(advantages)

    def _second_moment(self, batch: JointBatch, advantages: torch.Tensor) -> float:
        """Mean square of the advantages of all processes, which Dr. MAS watches for actors that are out of scale."""
        total = self.accelerator.reduce((advantages**2).sum(), reduction="sum")  # padding has advantage 0
        return total.item() / batch.num_samples

    def _team_state(self) -> dict[str, Any]:
        return {**super()._team_state(), "role_baselines": dict(self._role_baselines)}

    def _load_team_state(self, state: dict[str, Any]) -> None:
        super()._load_team_state(state)
        self._role_baselines = dict(state["role_baselines"])


class MAGRPOTrainer(ReinforceTrainer):
    """
    Multi-Agent Group Relative Policy Optimization: each actor is trained by GRPO on the joint reward (MAGRPO,
    [LLM Collaboration With Multi-Agent Reinforcement Learning](https://huggingface.co/papers/2508.04652)).

    Each prompt gets `num_generations` joint samples; sample g of every actor forms joint sample g. The baseline is the
    mean of the group, and advantages are divided by its standard deviation. With one actor and one turn the training
    is TRL's `GRPOTrainer`'s to the bit. One thing differs on purpose: where the rewards of a group are equal up to
    rounding, its advantages are 0.

    Args: see [`MultiAgentTrainer`].
    """

    config_class = MAGRPOConfig


class MAREINFORCETrainer(ReinforceTrainer):
    """
    Multi-Agent REINFORCE: the advantage is the return itself, without a baseline (Williams 1992).

    Args: see [`MultiAgentTrainer`].
    """

    config_class = MAREINFORCEConfig


class MARLOOTrainer(ReinforceTrainer):
    """
    Multi-Agent REINFORCE Leave-One-Out: the baseline is the mean of the other samples of the group (Ahmadian et al.
    2024, [Back to Basics](https://huggingface.co/papers/2402.14740)). With one actor and one turn the advantages are
    those of TRL's `RLOOTrainer`; the loss is GRPO's.

    Args: see [`MultiAgentTrainer`].
    """

    config_class = MARLOOConfig


class MAReMaxTrainer(ReinforceTrainer):
    """
    Multi-Agent ReMax: the baseline is the maximum of the group, or, with `remax_baseline="greedy"`, the return of a
    joint response in which every actor takes its most probable tokens (Li et al. 2024,
    [ReMax](https://huggingface.co/papers/2310.10505)).

    Args: see [`MultiAgentTrainer`].
    """

    config_class = MAReMaxConfig

    def _credit(self, batch: JointBatch) -> None:
        self._greedy_returns: list[torch.Tensor] | None = None
        if self.args.remax_baseline == "greedy" and batch.mode == "train":
            self._greedy_returns = self._roll_out_greedily(batch)
        super()._credit(batch)

    def _roll_out_greedily(self, batch: JointBatch) -> list[torch.Tensor]:
        """Returns of one greedy interaction for each task, `(N, tasks)` for each turn; 0 where it had ended."""
        rows = batch.turns[0].rows[:: batch.num_generations]
        # As in evaluation: chains of aligned joint responses
        settings = dataclasses.replace(self._rollout_settings("eval"), num_generations=1, greedy=True)
        turns = self.interaction.run(rows, settings)
        _, returns = self._returns(turns)
        self.env_step += sum(len(turn.tasks) for turn in turns)
        by_task = []
        for turn, value in zip(turns, returns, strict=True):
            tasks = value.new_zeros(len(value), len(turns[0].tasks))
            tasks[:, turn.tasks] = value
            by_task.append(tasks)
        ended = [torch.zeros_like(by_task[0])] * (len(batch.turns) - len(turns))
        return by_task + ended

    def _turn_advantages(self, batch: JointBatch, agent: int, returns: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.args.remax_baseline != "greedy":
            return super()._turn_advantages(batch, agent, returns)
        samples = batch.of_samples(agent, returns)
        if self._greedy_returns is None:  # in evaluation nothing is learned
            return [torch.zeros_like(sample) for sample in samples]
        return [
            (sample - greedy[agent, turn.tasks]).nan_to_num(nan=0.0)
            for turn, sample, greedy in zip(batch.turns, samples, self._greedy_returns, strict=False)
        ]
