# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Independent actor-critic: each actor has a critic of its own, or is its own."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..agents.building import resolve_peft_configs
from ..agents.critics import add_value_head, check_reads_ids_of, load_critic
from ..agents.grpo_agent import trained_tokens
from ..agents.loading import ModelLike, resolve_models
from ..functional.gae import gae_over_tokens
from ..functional.masking import pad_on_the_right
from ..functional.returns import mean_over_branches
from ..models.critic import last_hidden_states, recorded_hidden_states, values_at
from ..models.team import MultiAgentModel
from ..rollouts.batch import JointBatch
from .actor_critic_config import IACConfig
from .actor_critic_trainer import ActorCriticTrainer, Valuation, ValueTargets
from .multi_agent_trainer import part_of


class IACTrainer(ActorCriticTrainer):
    """
    Independent Actor-Critic: each actor is trained by an actor-critic method of its own, on its reward or the team's,
    and its critic sees what the actor sees (Foerster et al. 2018; with TRL's clipped policy loss it is IPPO, de Witt
    et al. 2020).

    With `use_separate_critic=True` the critic is a model of its own, which reads the actor's token ids. Otherwise it
    is a value head on the actor's backbone, and values and log-probabilities come from one forward pass.

    `critic_type="v"` values the history, `"q"` the history with the actor's response: see [`MAACTrainer`] for their
    advantages. With `advantage_level="token"` each token is a step of its own, with a value of what stands before it
    (PPO for language models, Ouyang et al. 2022); the reward comes with the last real token, and where the interaction
    goes on, the first token of the next turn is the next step.

    Args:
        critic_model (`str` or [`~transformers.PreTrainedModel`], *optional*):
            Causal language model, a copy of which is each actor's critic. A head that lies beside it is restored.
        critics (list of `str` or [`~transformers.PreTrainedModel`], *optional*):
            One for each actor.
        critic_peft_config ([`~peft.PeftConfig`] or list, *optional*):
            Adapters for the critics, one for all or one for each.
        **kwargs:
            See [`MultiAgentTrainer`].
    """

    config_class = IACConfig

    def __init__(
        self,
        *args,
        critic_model: ModelLike | None = None,
        critics: Sequence[ModelLike] | None = None,
        critic_peft_config: Any = None,
        **kwargs,
    ):
        if "critic_tokenizer" in kwargs:
            raise TypeError(
                "IACTrainer has no `critic_tokenizer`: its critics read their actors' token ids. For a critic of "
                "another vocabulary use MAACTrainer."
            )
        self._critic_model = critic_model
        self._critics = critics
        self._critic_peft_config = critic_peft_config
        self._critic_sources: list[ModelLike] = []
        super().__init__(*args, **kwargs)

    def _resolve_critics(self, num_agents: int) -> None:
        if self.args.use_separate_critic:
            if self._critic_model is None and self._critics is None:
                raise ValueError(
                    "IACTrainer has use_separate_critic=True (its default), but no critic was given. Pass "
                    f"`critic_model=` (each actor gets a copy) or `critics=` (one for each of the {num_agents} "
                    "actors), or set use_separate_critic=False for a value head on each actor."
                )
            hint = "One for each actor; for equal critics pass `critic_model=`."
            self._critic_sources = resolve_models("critic", self._critic_model, self._critics, num_agents, hint)
            self._critic_peft_configs = resolve_peft_configs(
                self._critic_peft_config, num_agents, "critic_peft_config"
            )
            return
        options = {
            "critic_model": self._critic_model,
            "critics": self._critics,
            "critic_peft_config": self._critic_peft_config,
        }
        given = [name for name, value in options.items() if value is not None]
        if given:
            raise ValueError(
                f"use_separate_critic=False puts a value head on each actor's own backbone, but {' and '.join(given)} "
                "was given. Leave it out, or set use_separate_critic=True."
            )

    def _all_sources(self) -> list[ModelLike]:
        return [*super()._all_sources(), *self._critic_sources]

    def _build_critics(self, agents: list[nn.Module], tokenizers: list[PreTrainedTokenizerBase]):
        if not self.args.use_separate_critic:
            for name, agent, source, learns in zip(
                self.agent_names, agents, self._sources, self.trainable, strict=True
            ):
                if learns:
                    add_value_head(name, agent, source, self.args.value_head_hidden_dim, self.args)
            return [], []
        critics = []
        for index, source in enumerate(self._critic_sources):
            name, width = f"critic_{index}", self.args.critic_value_head_hidden_dim
            critic = load_critic(name, source, width, self.args, self._critic_peft_configs[index])
            check_reads_ids_of(name, critic, source, self.agent_names[index], tokenizers[index], self.args)
            self._check_length(name, critic)
            if not self.trainable[index]:
                critic.requires_grad_(False)  # nobody would learn from it
            critics.append(critic)
        return critics, list(tokenizers)

    def _check_length(self, name: str, critic: nn.Module) -> None:
        """A critic that reads the response must have room for it and a token of the prompt."""
        limit = critic.max_length(self.args.critic_max_length)
        reads = self.args.critic_type == "q" or self.args.advantage_level == "token"
        if reads and limit is not None and limit <= self.args.max_completion_length:
            raise ValueError(
                f"{name} reads at most {limit} tokens, but completions have up to "
                f"{self.args.max_completion_length}. Raise critic_max_length, lower max_completion_length, or take a "
                "critic with more positions."
            )

    def _valuations(self) -> list[Valuation]:
        return [
            Valuation(f"critic_{index}", f"{name}/critic", index, (index,))
            for index, (name, learns) in enumerate(zip(self.agent_names, self.trainable, strict=True))
            if learns
        ]

    def _critic_of(self, team: MultiAgentModel, valuation: Valuation) -> nn.Module:
        return (team.critics if self.args.use_separate_critic else team.agents)[valuation.agent]

    def _reading(self, batch: JointBatch, valuation: Valuation) -> dict[str, torch.Tensor]:
        """
        The actor's token ids, and `offsets`: how far behind the last token of the prompt each value is read, in the
        shape of `positions`. For values of tokens, offset t is before token t, and the last column behind them all.
        """
        inputs = batch.inputs[valuation.agent]
        ids, mask = inputs["prompt_ids"], inputs["prompt_mask"].bool()
        lengths = self._lengths(batch, valuation.agent)  # (R,)
        reads_response = self.args.critic_type == "q" or self.args.advantage_level == "token"
        room = None
        if self.args.use_separate_critic:
            room = self.critics[valuation.agent].max_length(self.args.critic_max_length)
        if room is not None:
            room = room - lengths if reads_response else torch.full_like(lengths, room)
            behind = mask.flip(1).cumsum(dim=1).flip(1)  # tokens from each one to the prompt's end
            mask = mask & (behind <= room[:, None])
        last = mask.sum(dim=1) - 1  # of the prompt
        offsets = torch.zeros_like(last)
        if reads_response:
            steps = torch.arange(inputs["completion_ids"].size(1) + 1, device=ids.device)
            ids = torch.cat([ids, inputs["completion_ids"]], dim=1)
            mask = torch.cat([mask, steps[:-1] < lengths[:, None]], dim=1)
            offsets = lengths if self.args.critic_type == "q" else torch.minimum(steps, lengths[:, None])  # (R, T + 1)
        ids, mask = pad_on_the_right(ids, mask)
        positions = last + offsets if offsets.dim() == 1 else last[:, None] + offsets
        return {"input_ids": ids, "attention_mask": mask, "positions": positions, "offsets": offsets}

    def _lengths(self, batch: JointBatch, agent: int) -> torch.Tensor:
        """Tokens that were sampled in each row, 0 in padding, `(R,)`."""
        lengths = self.agent_trainers[agent].sampled.lengths
        padded = lengths + [0] * (batch.num_rows - len(lengths))
        return torch.tensor(padded, device=self.accelerator.device)

    # Advantages of tokens

    def _credit_by(
        self, valuation: Valuation, batch: JointBatch, log_ratios: Sequence[torch.Tensor | None] | None
    ) -> ValueTargets:
        if self.args.advantage_level == "turn":
            return super()._credit_by(valuation, batch, log_ratios)
        inputs = batch.inputs[valuation.agent]
        reading = self._reading(batch, valuation)
        values = self._values_at_sampling(valuation, reading)  # (R, T + 1)
        penalties = None if log_ratios is None else -self.args.beta * log_ratios[valuation.agent]
        tokens = trained_tokens(inputs)  # (R, T)
        estimates = {  # with lambda 1 for the returns in the log
            gae_lambda: self._token_advantages(valuation, batch, values, tokens, penalties, gae_lambda)
            for gae_lambda in {self.args.gae_lambda, 1.0}
        }
        estimates = {gae_lambda: value.masked_fill(~tokens, torch.nan) for gae_lambda, value in estimates.items()}
        values = values[:, :-1]
        advantages, returns = estimates[self.args.gae_lambda], estimates[1.0] + values
        inputs["advantages"] = batch.local(self._normalized(self._gather_tokens(advantages)))[:, : tokens.size(1)]
        self._log_values(batch.mode, valuation, self._gather_tokens(values), self._gather_tokens(returns))
        # Nothing is learned from the value behind the last token
        reading = {**reading, **{name: reading[name][:, :-1] for name in ("positions", "offsets")}}
        return ValueTargets(valuation, reading, values, advantages + values)

    def _token_advantages(
        self,
        valuation: Valuation,
        batch: JointBatch,
        values: torch.Tensor,
        tokens: torch.Tensor,
        penalties: torch.Tensor | None,
        gae_lambda: float,
    ) -> torch.Tensor:
        """
        Advantages of the tokens of this process's rows, `(R, T)`. Turns are chained: branches lie on the process where
        they grew.
        """
        rewards = batch.local(batch.to_rows(self._rewards(batch, valuation), padding=0.0))
        advantages = torch.zeros_like(values[:, :-1])
        first_values = first_advantages = None
        values_of_cut = self._values_of_cut(valuation, values)
        end = sum(len(turn.branches) for turn in batch.turns)
        for number in reversed(range(len(batch.turns))):
            turn = batch.turns[number]
            rows = slice(end - len(turn.branches), end)
            next_values = values_of_cut[rows]
            next_advantages = torch.zeros_like(next_values)
            if first_values is not None and len(first_values):
                later = batch.turns[number + 1]
                parents = later.parents[later.start : later.start + len(later.branches)] - turn.start
                parents = parents.to(values.device)
                goes_on = torch.bincount(parents, minlength=len(next_values)) > 0
                mean_value = mean_over_branches(first_values, parents, len(next_values))
                next_values = torch.where(goes_on, mean_value, next_values)
                next_advantages = mean_over_branches(first_advantages, parents, len(next_values))
            advantages[rows], first_values, first_advantages = gae_over_tokens(
                rewards[rows],
                values[rows, :-1],
                tokens[rows],
                self.args.discount,
                gae_lambda,
                None if penalties is None else penalties[rows],
                next_values,
                next_advantages,
            )
            end = rows.start
        return advantages

    def _values_of_cut(self, valuation: Valuation, values: torch.Tensor) -> torch.Tensor:
        """Value behind the last token of completions that were cut, if it counts; 0 elsewhere, `(R,)`."""
        if not self.args.bootstrap_truncated:
            return torch.zeros_like(values[:, 0])
        ended = self.agent_trainers[valuation.agent].sampled.ended
        ended = torch.tensor(ended + [True] * (len(values) - len(ended)), device=values.device)
        return values[:, -1].masked_fill(ended, 0.0)

    def _gather_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Numbers of tokens of all processes, `(W * R, T)` with the largest T, NaN behind a row's own."""
        return self.accelerator.gather(self.accelerator.pad_across_processes(values, dim=1, pad_index=torch.nan))

    # Loss

    def _actor_losses(
        self, team: MultiAgentModel, index: int, inputs: dict[str, Any], layout: dict[str, float]
    ) -> list[torch.Tensor]:
        if self.args.use_separate_critic:
            return super()._actor_losses(team, index, inputs, layout)
        valuation = next(valuation for valuation in self._valuations() if valuation.agent == index)
        actor, own = team.agents[index], part_of(inputs, f"{valuation.name}/")
        if self._warming_up(team):  # the backbone is the actor, so only the head learns
            with torch.no_grad():
                hidden = last_hidden_states(actor, own["input_ids"], own["attention_mask"])
            losses, positions = [], own["positions"]
        else:
            with recorded_hidden_states(actor) as states:  # of the pass that gives the log-probabilities
                losses = super()._actor_losses(team, index, inputs, layout)
            hidden = torch.cat(states)  # (B, P + T, H), prompts padded on the left
            positions = inputs[f"agent_{index}/prompt_ids"].size(1) - 1 + own["offsets"]
        values = values_at(actor.value_head, hidden, positions)
        taught = bool(own["valid"].any())
        self._note_taught(team, f"agent_{index}/value_head", taught)
        self._note_taught(team, f"agent_{index}", taught and not self._warming_up(team))
        return [*losses, self._value_loss(team, valuation, own, values, layout)]
