# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""What the actor-critic trainers share: a learned value is the baseline."""

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn

from ..agents.grpo_agent import trained_tokens
from ..functional.advantages import explained_variance, leave_one_out_mean, normalize_advantages
from ..functional.gae import gae_over_turns
from ..functional.groups import from_groups, group_table, to_groups
from ..functional.masking import masked_mean
from ..functional.value_losses import value_loss
from ..models.critic import is_own_critic, read_values
from ..models.team import MultiAgentModel
from ..models.value_head import ValueHead
from ..rollouts.batch import JointBatch
from ..rollouts.interaction import Turn
from .actor_critic_config import ActorCriticConfig
from .entity_optimizer import WarmupEnd
from .multi_agent_trainer import MultiAgentTrainer, part_of


@dataclass(frozen=True)
class Valuation:
    """
    One prediction of rewards, and who learns from it.

    Attributes:
        name (`str`): prefix of its inputs in a flat batch.
        metric_prefix (`str`): prefix of its metrics.
        agent (`int`, *optional*): the actor whose reward is predicted; `None` for the team's.
        learners (tuple of `int`): the actors that get the advantages.
    """

    name: str
    metric_prefix: str
    agent: int | None
    learners: tuple[int, ...]


@dataclass
class ValueTargets:
    """
    What a valuation learns from a batch: R rows of this process, with one or T values each.

    Attributes:
        valuation ([`Valuation`]): whose.
        reading (`dict` of `torch.Tensor`): what the critic reads, see `ActorCriticTrainer._reading`.
        old_values (`torch.Tensor` of shape `(R,)` or `(R, T)`): values at sampling time.
        targets (`torch.Tensor` of the same shape): fixed targets, NaN where there is none.
    """

    valuation: Valuation
    reading: dict[str, torch.Tensor]
    old_values: torch.Tensor
    targets: torch.Tensor


class ActorCriticTrainer(MultiAgentTrainer, ABC):
    """
    Values give the advantages (TD error or generalized advantage estimation over the turns), each actor is trained on
    its own by TRL's clipped loss (with `num_iterations` above 1 that is PPO), and the values on fixed targets.

    Subclasses say what is valued (`_valuations`), what a critic reads (`_reading`) and who reads it (`_critic_of`).

    Args: see [`MultiAgentTrainer`].
    """

    config_class = ActorCriticConfig

    @property
    def kl_in_reward(self) -> bool:
        return self.args.kl_in_reward

    @abstractmethod
    def _valuations(self) -> list[Valuation]:
        """What is valued, in the order of the actors."""

    @abstractmethod
    def _reading(self, batch: JointBatch, valuation: Valuation) -> dict[str, torch.Tensor]:
        """
        What a critic reads in the rows of this process: `input_ids` and `attention_mask` of shape `(R, L)`, padded on
        the right, and `positions` of shape `(R,)` or `(R, K)`, where values are read.
        """

    @abstractmethod
    def _critic_of(self, team: MultiAgentModel, valuation: Valuation) -> nn.Module:
        """The critic, a [`ValueModel`], or an actor that is its own."""

    # Credit

    def _credit(self, batch: JointBatch) -> None:
        log_ratios = self._log_ratios(batch) if self.kl_in_reward else None
        targets = [self._credit_by(valuation, batch, log_ratios) for valuation in self._valuations()]
        if self.args.value_normalization and batch.mode == "train":
            self._update_moments(targets)
        num_rows = batch.num_rows * self.accelerator.num_processes
        for part in targets:
            valid = ~part.targets.isnan()
            num_targets = self.accelerator.reduce(valid.sum().float(), reduction="sum")
            inputs = {
                **part.reading,
                "old_values": part.old_values,
                "returns": part.targets.nan_to_num(nan=0.0),
                "valid": valid,
                "targets_per_row": num_targets / num_rows,  # of the whole generation batch, a scalar
            }
            batch.critic_inputs |= {f"{part.valuation.name}/{name}": value for name, value in inputs.items()}

    def _log_ratios(self, batch: JointBatch) -> list[torch.Tensor | None]:
        """For each actor `log pi - log pi_ref` of the sampled tokens, `(R, T)`; None for a frozen one, which is 0."""
        ratios: list[torch.Tensor | None] = []
        for agent, inputs in zip(self.agent_trainers, batch.inputs, strict=True):
            ratios.append(None if inputs is None else agent.log_ratios(inputs))
            if inputs is not None:
                sums = torch.stack([ratios[-1].sum(), trained_tokens(inputs).sum()])
                total, count = self.accelerator.reduce(sums, reduction="sum").tolist()
                self._metrics.add(batch.mode, f"{agent.name}/kl", total / max(count, 1.0))
        return ratios

    def _credit_by(
        self, valuation: Valuation, batch: JointBatch, log_ratios: Sequence[torch.Tensor | None] | None
    ) -> ValueTargets:
        """Set the advantages that a valuation gives, one for each turn."""
        reading = self._reading(batch, valuation)
        own_values = self._values_at_sampling(valuation, reading)  # (R,)
        values = batch.from_rows(self.accelerator.gather(own_values))  # (S,) for each turn
        rewards = self._apply_kl_penalty(self._rewards(batch, valuation), batch, valuation, log_ratios)
        parents = [turn.parents.to(value.device) for turn, value in zip(batch.turns, values, strict=True)]
        discount, gae_lambda = self.args.discount, self.args.gae_lambda
        advantages, targets = gae_over_turns(rewards, values, parents, discount, gae_lambda)
        _, returns = gae_over_turns(rewards, values, parents, discount, 1.0)  # for the log
        if self.args.critic_type == "q":
            baselines = [_mean_of_others(turn, value) for turn, value in zip(batch.turns, values, strict=True)]
            advantages = [target - baseline for target, baseline in zip(targets, baselines, strict=True)]
        flat = self._normalized(torch.cat(advantages))
        for agent in valuation.learners:
            batch.set_advantages(agent, flat.split([len(value) for value in values]))
        self._log_values(batch.mode, valuation, torch.cat(values), torch.cat(returns))
        return ValueTargets(valuation, reading, own_values, batch.local(batch.to_rows(targets, padding=torch.nan)))

    def _rewards(self, batch: JointBatch, valuation: Valuation) -> list[torch.Tensor]:
        """The rewards that a valuation predicts, `(S,)` for each turn."""
        return [rewards[valuation.agent or 0] for rewards in batch.rewards]

    def _apply_kl_penalty(
        self,
        rewards: list[torch.Tensor],
        batch: JointBatch,
        valuation: Valuation,
        log_ratios: Sequence[torch.Tensor | None] | None,
    ) -> list[torch.Tensor]:
        """Rewards less beta times the log ratio of the actor's response; for the team, of the joint response."""
        if log_ratios is None:
            return rewards
        own = log_ratios if valuation.agent is None else [log_ratios[valuation.agent]]
        own = [ratios.sum(dim=1) for ratios in own if ratios is not None]  # (R,)
        if not own:
            return rewards
        by_turn = batch.from_rows(self.accelerator.gather(torch.stack(own).sum(dim=0)))
        return [reward - self.args.beta * ratio for reward, ratio in zip(rewards, by_turn, strict=True)]

    def _normalized(self, advantages: torch.Tensor) -> torch.Tensor:
        """Advantages of the whole generation batch, normalised if asked; 0 in place of NaN."""
        if self.args.advantage_normalization:
            advantages = normalize_advantages(advantages, ~advantages.isnan())
        return advantages.nan_to_num(nan=0.0)

    def _log_values(self, mode: str, valuation: Valuation, values: torch.Tensor, returns: torch.Tensor) -> None:
        """Measure values against the discounted returns, NaN where there is none; both of all processes."""
        known = ~returns.isnan()
        for name, value in {
            "value_mean": values[known].mean(),
            "return_mean": returns[known].mean(),
            "value_error": (returns - values)[known].abs().mean(),
            "explained_variance": explained_variance(values, returns),
        }.items():
            self._metrics.add(mode, f"{valuation.metric_prefix}/{name}", value.item())

    # Values

    def _values_at_sampling(self, valuation: Valuation, reading: dict[str, torch.Tensor]) -> torch.Tensor:
        """
        Values of all rows without gradient, in micro-batches of the training's size; in the shape of `positions`.
        """
        parts = zip(*(part.split(self.args.per_device_train_batch_size) for part in reading.values()), strict=True)
        with torch.no_grad(), self.accelerator.autocast():
            return torch.cat(
                [self._values(self.model, valuation, dict(zip(reading, part, strict=True))) for part in parts]
            )

    def _values(self, team: MultiAgentModel, valuation: Valuation, reading: dict[str, torch.Tensor]) -> torch.Tensor:
        """Values of a micro-batch, in the shape of `positions`."""
        critic = self._critic_of(team, valuation)
        read = functools.partial(read_values, critic, critic.value_head) if is_own_critic(critic) else critic
        mask, positions = reading["attention_mask"], reading["positions"]
        length = int(mask.sum(dim=1).max())  # padding that no row of this micro-batch needs
        ids, mask = reading["input_ids"][:, :length], mask[:, :length]
        if self.args.critic_type == "q" or positions.dim() > 1:
            return read(ids, mask, positions)
        # All samples of a context have one history, which is read once
        rows, number = torch.unique(ids.masked_fill(mask == 0, -1), dim=0, return_inverse=True)
        return read(rows.clamp(min=0), (rows >= 0).long())[number]

    def _update_moments(self, targets: list[ValueTargets]) -> None:
        """Let the heads' running moments take in a batch, and put the old values into the new units."""
        heads = [self._critic_of(self.model, part.valuation).value_head for part in targets]
        before = {id(head): dataclasses.replace(head.moments) for head in heads}
        for head, part in zip(heads, targets, strict=True):
            head.moments.update(*self._moments_of(part.targets))
        for head, part in zip(heads, targets, strict=True):
            old, new = before[id(head)], head.moments
            part.old_values = (part.old_values - old.mean) / old.std * new.std + new.mean

    @staticmethod
    def _moments_of(targets: torch.Tensor) -> tuple[int, float, float]:
        """Number, mean and sum of squared deviations of the targets of all processes."""
        own = targets[~targets.isnan()].cpu().double()
        counts, sums = zip(*gather_object([(len(own), own.sum().item())]), strict=True)
        mean = math.fsum(sums) / max(sum(counts), 1)
        return sum(counts), mean, math.fsum(gather_object([((own - mean) ** 2).sum().item()]))

    def _team_state(self) -> dict[str, Any]:
        # Not as in the heads' files: those of a checkpoint amid an accumulation have taken in a batch more
        return {**super()._team_state(), "moments": [head.get_extra_state() for head in self._heads()]}

    def _load_team_state(self, state: dict[str, Any]) -> None:
        super()._load_team_state(state)
        for head, moments in zip(self._heads(), state["moments"], strict=True):
            head.set_extra_state(moments)

    def _heads(self) -> list[ValueHead]:
        """Each value head once."""
        heads = [self._critic_of(self.model, valuation).value_head for valuation in self._valuations()]
        return list(dict.fromkeys(heads))

    # Loss

    def _warming_up(self, team: MultiAgentModel) -> bool:
        """Whether only critics and value heads learn in this step."""
        return team.training and self.state.global_step < self.args.critic_warmup_steps

    def create_optimizer(self, model=None):
        given = self.optimizer is not None
        optimizer = super().create_optimizer(model)
        if self.args.critic_warmup_steps and not given:
            self.add_callback(WarmupEnd(self.accelerator, self.args.critic_warmup_steps))
        return optimizer

    def _actor_losses(
        self, team: MultiAgentModel, index: int, inputs: dict[str, Any], layout: dict[str, float]
    ) -> list[torch.Tensor]:
        return [] if self._warming_up(team) else super()._actor_losses(team, index, inputs, layout)

    def _loss_parts(
        self, team: MultiAgentModel, inputs: dict[str, Any], layout: dict[str, float]
    ) -> list[Callable[[], list[torch.Tensor]]]:
        parts = super()._loss_parts(team, inputs, layout)
        if not len(team.critics):
            return parts  # an actor's own values come with its loss, of one forward pass
        return parts + [
            functools.partial(self._critic_losses, team, valuation, inputs, layout) for valuation in self._valuations()
        ]

    def _critic_losses(
        self, team: MultiAgentModel, valuation: Valuation, inputs: dict[str, Any], layout: dict[str, float]
    ) -> list[torch.Tensor]:
        """The loss of one kind of values on a micro-batch, scaled for gradient accumulation."""
        own = part_of(inputs, f"{valuation.name}/")
        critic = "critic" if self.central_critic else valuation.name
        self._note_taught(team, critic, bool(own["valid"].any()))
        return [self._value_loss(team, valuation, own, self._values(team, valuation, own), layout)]

    def _value_loss(
        self,
        team: MultiAgentModel,
        valuation: Valuation,
        inputs: dict[str, torch.Tensor],
        values: torch.Tensor,
        layout: dict[str, float],
    ) -> torch.Tensor:
        """Weighted value error of a micro-batch, scaled for gradient accumulation."""
        head = self._critic_of(team, valuation).value_head
        scale = head.moments.std if self.args.value_normalization else 1.0
        # Parts of a batch may miss different numbers of rewards; dividing by the expected number makes the mean over
        # micro-batches and processes the loss of the whole batch
        loss = value_loss(
            values,
            inputs["returns"],
            inputs["valid"],
            inputs["old_values"],
            self.args.value_clip_range,
            num_targets=(inputs["targets_per_row"] * len(values)).clamp(min=1e-6),
            scale=scale,
        )
        measured = {"loss": loss.detach()}
        if self.args.value_clip_range is not None:
            moved = (values.detach() - inputs["old_values"]).abs() > self.args.value_clip_range * scale
            measured["clip_ratio"] = masked_mean(moved.float(), inputs["valid"])
        mode = "train" if team.training else "eval"
        for name, value in measured.items():
            self._metrics.add(mode, f"{valuation.metric_prefix}/{name}", self.accelerator.gather(value).mean().item())
        accumulation = self.current_gradient_accumulation_steps if team.training else 1
        return self.args.value_loss_coef * loss / (accumulation * layout["num_splits"])


def _mean_of_others(turn: Turn, values: torch.Tensor) -> torch.Tensor:
    """For each sample `(S,)`, the mean value of the others of its context, which estimates the context's value."""
    table = group_table(turn.contexts)
    return from_groups(leave_one_out_mean(to_groups(values, table)), table, len(values))
