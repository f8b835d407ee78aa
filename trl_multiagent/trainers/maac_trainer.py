# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Multi-agent actor-critic: one central critic for the team."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..agents.critics import central_tokenizer, load_critic
from ..agents.loading import ModelLike, either, resolve_models
from ..functional.advantages import is_shared
from ..models.team import MultiAgentModel
from ..rollouts.batch import JointBatch
from ..rollouts.formatters import prompt_text
from ..rollouts.interaction import Turn
from .actor_critic_config import MAACConfig
from .actor_critic_trainer import ActorCriticTrainer, Valuation


logger = logging.getLogger(__name__)


class MAACTrainer(ActorCriticTrainer):
    """
    Multi-Agent Actor-Critic: the actors share one central critic, which sees what all of them see (centralised
    training with decentralised execution, Lowe et al. 2017; with TRL's clipped policy loss it is MAPPO, Yu et al.
    2022).

    The critic reads the joint input of a turn as text, with its own tokenizer. `critic_type="v"` values the history
    `V(h)`, and the advantages are GAE over the turns, in a single turn `r - V(h)`. `critic_type="q"` values the
    history with the joint response, `Q(h, a)`; the advantage is the lambda-return, in a single turn `r`, minus the
    mean Q of the *other* samples of the context, an estimate of `V(h)`. (`r - Q(h, a)` itself vanishes as Q gets
    right, and with it the learning signal.) A sample without others takes the mean over the turn's other contexts.

    Args:
        critic_model (`str` or [`~transformers.PreTrainedModel`], *optional*):
            The critic: a causal language model, to which a value head is added. A head that lies beside the backbone
            is restored.
        critics (list with one entry, *optional*):
            The same as a list.
        critic_tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            The critic's tokenizer. By default the one that lies beside the critic, else the first actor's.
        critic_peft_config ([`~peft.PeftConfig`], *optional*):
            An adapter for the critic; the head is trained in full.
        model_config (`dict`, *optional*):
            `critic_value_head_hidden_dim`: as in [`MAACConfig`].
        **kwargs:
            See [`MultiAgentTrainer`].
    """

    config_class = MAACConfig
    central_critic = True

    def __init__(
        self,
        *args,
        critic_model: ModelLike | None = None,
        critics: Sequence[ModelLike] | None = None,
        critic_tokenizer: PreTrainedTokenizerBase | str | None = None,
        critic_peft_config: Any = None,
        model_config: dict[str, Any] | None = None,
        **kwargs,
    ):
        if critic_model is None and critics is None:
            raise ValueError("MAACTrainer needs one central critic. Pass `critic_model=`.")
        hint = "MAACTrainer has one critic for the team; for one each use IACTrainer."
        self._critic_source = resolve_models("critic", critic_model, critics, 1, hint)[0]
        self._critic_tokenizer = critic_tokenizer
        self._critic_peft_config = critic_peft_config
        self._model_config = dict(model_config or {})
        self._warned_of_length = False
        unknown = set(self._model_config) - {"critic_value_head_hidden_dim"}
        if unknown:
            raise ValueError(
                f"`model_config` has unknown entries {sorted(unknown)}; known: critic_value_head_hidden_dim."
            )
        super().__init__(*args, **kwargs)

    def _all_sources(self) -> list[ModelLike]:
        return [*super()._all_sources(), self._critic_source]

    def _build_critics(self, agents: list[nn.Module], tokenizers: list[PreTrainedTokenizerBase]):
        hidden_dim = either(
            model_config=self._model_config.get("critic_value_head_hidden_dim"),
            critic_value_head_hidden_dim=self.args.critic_value_head_hidden_dim,
        )
        critic = load_critic("critic", self._critic_source, hidden_dim, self.args, self._critic_peft_config)
        tokenizer = central_tokenizer(
            self._critic_source, self._critic_tokenizer, critic, agents[0], tokenizers[0], self.args
        )
        return [critic], [tokenizer]

    def render_critic_input(self, turn: Turn, sample: int, agent: int | None = None) -> str:
        """
        The joint input of the critic, as text: what each actor was asked in the turn and, for `critic_type="q"`, what
        each answered. Override it for another layout, for example with what was said before:
        `turn.branches[sample].history`.

        Where actors speak one after the other, a value of the history must not know what is said after it: prompts
        of actors that hear others are left out, or, for the reward of one actor, those of the actors behind it.

        Args:
            turn ([`~trl_multiagent.rollouts.interaction.Turn`]):
                What was sampled.
            sample (`int`):
                Number of the joint response on this process.
            agent (`int`, *optional*):
                With `individual_rewards`, the actor whose reward is valued.
        """
        parts = [] if self.args.num_turns == 1 else [f"[turn {turn.number} of {self.args.num_turns}]"]
        parts += [
            f"[agent {i} is asked]\n{prompt_text(asked[sample])}"
            for i, asked in enumerate(turn.prompts)
            if self._is_known(i, agent)
        ]
        if self.args.critic_type == "q":
            parts += [f"[agent {i} answers]\n{said[sample]}" for i, said in enumerate(turn.completions)]
        if agent is not None:
            parts.append(f"[reward of agent {agent}]")
        return "\n".join(parts)

    def _is_known(self, asked: int, agent: int | None) -> bool:
        """Whether a value may depend on what an actor was asked."""
        if self.args.turn_order == "simultaneous" or self.args.critic_type == "q":
            return True
        return not self.formatters[asked].takes_earlier or asked == 0 or (agent is not None and asked <= agent)

    def _valuations(self) -> list[Valuation]:
        learners = tuple(index for index, learns in enumerate(self.trainable) if learns)
        if not self.args.individual_rewards:
            return [Valuation("critic", "critic", None, learners)]
        return [
            Valuation(f"critic_{index}", f"{self.agent_names[index]}/critic", index, (index,)) for index in learners
        ]

    def _critic_of(self, team: MultiAgentModel, valuation: Valuation) -> nn.Module:
        return team.critics[0]

    def _rewards(self, batch: JointBatch, valuation: Valuation) -> list[torch.Tensor]:
        if valuation.agent is None and not all(is_shared(rewards) for rewards in batch.rewards):
            raise ValueError(
                "MAAC's critic values one reward for each joint response, but the reward function returned different "
                "rewards for the actors. Return one value for each joint response, or set individual_rewards=True."
            )
        return super()._rewards(batch, valuation)

    def _reading(self, batch: JointBatch, valuation: Valuation) -> dict[str, torch.Tensor]:
        whose = () if valuation.agent is None else (valuation.agent,)
        texts = [
            self.render_critic_input(turn, sample, *whose)
            for turn in batch.turns
            for sample in range(len(turn.branches))
        ]
        texts += texts[:1] * (batch.num_rows - len(texts))
        limit = self.critics[0].max_length(self.args.critic_max_length)
        encoded = self.critic_tokenizers[0](
            texts, padding=True, truncation=limit is not None, max_length=limit, return_tensors="pt"
        ).to(self.accelerator.device)
        mask = encoded["attention_mask"]
        if not self._warned_of_length and limit is not None and mask.size(1) == limit:
            self._warn_of_length(texts, limit)
        return {"input_ids": encoded["input_ids"], "attention_mask": mask, "positions": mask.sum(dim=1) - 1}

    def _warn_of_length(self, texts: list[str], limit: int) -> None:
        """Say once that texts are cut."""
        lengths = [len(ids) for ids in self.critic_tokenizers[0](texts, verbose=False)["input_ids"]]
        num_cut = sum(length > limit for length in lengths)
        if num_cut:
            self._warned_of_length = True
            logger.warning(
                "%d of %d texts for the critic have more than the %d tokens that it reads, the longest %d: they lose "
                "their beginning, what the first actors were asked. Raise `critic_max_length`, take a critic with "
                "more positions, or override `render_critic_input`.",
                num_cut,
                len(texts),
                limit,
                max(lengths),
            )

    def _critic_losses(
        self, team: MultiAgentModel, valuation: Valuation, inputs: dict[str, Any], layout: dict[str, float]
    ) -> list[torch.Tensor]:
        losses = super()._critic_losses(team, valuation, inputs, layout)
        return [loss / len(self._valuations()) for loss in losses]  # several predictions of one critic count as one
