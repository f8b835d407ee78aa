# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Actor-critic trainers: a learned value is the baseline."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..agents.loading import ModelLike, either, load_value_model, resolve_models
from ..functional.advantages import explained_variance, is_shared, leave_one_out_mean, normalize_advantages, td_error
from ..functional.value_losses import value_loss
from ..models.team import MultiAgentModel
from ..rollouts.batch import JointBatch
from ..rollouts.formatters import prompt_text
from ..rollouts.interaction import Turn
from .actor_critic_config import MAACConfig
from .multi_agent_trainer import MultiAgentTrainer


class MAACTrainer(MultiAgentTrainer):
    """
    Multi-Agent Actor-Critic: the actors share one central critic, which sees what all of them see (centralised
    training with decentralised execution, Lowe et al. 2017; with TRL's clipped policy loss it is MAPPO, Yu et al.
    2022).

    The critic reads the joint input as text, with its own tokenizer. `critic_type="v"` values the history `V(h)`, and
    the advantage of a joint sample is its TD error, `r - V(h)` in a single turn. `critic_type="q"` values the history
    with the joint response, `Q(h, a)`; the advantage is `r` minus the mean Q of the *other* samples of the prompt, an
    estimate of `V(h)`. (`r - Q(h, a)` itself vanishes as Q gets right, and with it the learning signal.)

    Args:
        critic_model (`str` or [`~transformers.PreTrainedModel`], *optional*):
            The critic: a causal language model, to which a value head is added. A head that lies beside the backbone
            is restored.
        critics (list with one entry, *optional*):
            The same as a list.
        critic_tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            The critic's tokenizer. By default the one that lies beside the critic, else the first actor's.
        model_config (`dict`, *optional*):
            `critic_value_head_hidden_dim`: as in [`MAACConfig`].
        **kwargs:
            See [`MultiAgentTrainer`].
    """

    config_class = MAACConfig

    def __init__(
        self,
        *args,
        critic_model: ModelLike | None = None,
        critics: Sequence[ModelLike] | None = None,
        critic_tokenizer: PreTrainedTokenizerBase | str | None = None,
        model_config: dict[str, Any] | None = None,
        **kwargs,
    ):
        self._critic_source = resolve_models("critic", critic_model, critics, 1)[0]
        self._critic_tokenizer = critic_tokenizer
        self._model_config = dict(model_config or {})
        unknown = set(self._model_config) - {"critic_value_head_hidden_dim"}
        if unknown:
            raise ValueError(
                f"`model_config` has unknown entries {sorted(unknown)}; known: critic_value_head_hidden_dim."
            )
        super().__init__(*args, **kwargs)

    def _build_critics(self, agents: list[nn.Module], tokenizers: list[PreTrainedTokenizerBase]):
        hidden_dim = either(
            model_config=self._model_config.get("critic_value_head_hidden_dim"),
            critic_value_head_hidden_dim=self.args.critic_value_head_hidden_dim,
        )
        critic, tokenizer = load_value_model(
            "critic", self._critic_source, self._critic_tokenizer, agents[0], tokenizers[0], hidden_dim, self.args
        )
        tokenizer.padding_side, tokenizer.truncation_side = "right", "left"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token  # one of them is there: it was checked
        return [critic], [tokenizer]

    def render_critic_input(self, turn: Turn, sample: int) -> str:
        """
        The joint input of the critic, as text: what each actor was asked and, for `critic_type="q"`, what each
        answered. Override it for another layout.

        Args:
            turn ([`~trl_multiagent.rollouts.interaction.Turn`]):
                What was sampled.
            sample (`int`):
                Number of the joint response on this process.
        """
        parts = [f"[agent {i} is asked]\n{prompt_text(asked[sample])}" for i, asked in enumerate(turn.prompts)]
        if self.args.critic_type == "q":
            parts += [f"[agent {i} answers]\n{said[sample]}" for i, said in enumerate(turn.completions)]
        return "\n".join(parts)

    def _credit(self, batch: JointBatch) -> None:
        turn, rewards = batch.turns[0], batch.rewards[0]  # (N, B over all processes)
        if not is_shared(rewards):
            raise ValueError(
                "MAAC has one central critic, which values one reward for each joint response, but the reward "
                "function returned different rewards for the actors. Return one value for each joint response."
            )
        rewards = rewards[0]  # (B over all processes,)
        valid = ~torch.isnan(rewards)
        inputs = self._tokenize_joint(turn)
        local_values = self._values_of(inputs)
        values = self.accelerator.gather(local_values)  # (B over all processes,)
        baseline = values
        if self.args.critic_type == "q" and batch.num_generations > 1:
            baseline = leave_one_out_mean(values, batch.num_generations)
        advantages = td_error(rewards, baseline)
        if self.args.advantage_normalization:
            advantages = normalize_advantages(advantages, valid)
        for agent in range(len(batch.inputs)):
            batch.set_advantages(agent, [advantages])
        batch.critic_inputs = {
            **inputs,
            "old_values": local_values,
            "returns": batch.local(rewards.nan_to_num(nan=0.0)),
            "valid": batch.local(valid),
            "valid_share": valid.float().mean(),  # of the whole generation batch, a scalar
        }
        for name, value in {
            "value_mean": values.mean(),
            "value_error": (rewards - values)[valid].abs().mean(),
            "explained_variance": explained_variance(values, rewards),
        }.items():
            self._metrics.add(batch.mode, f"critic/{name}", value.item())

    def _tokenize_joint(self, turn: Turn) -> dict[str, torch.Tensor]:
        texts = [self.render_critic_input(turn, sample) for sample in range(len(turn.branches))]
        tokenizer = self.critic_tokenizers[0]
        limit = getattr(self.critics[0].config.get_text_config(), "max_position_embeddings", None)
        limit = min(filter(None, (self.args.critic_max_length, limit)), default=None)
        encoded = tokenizer(texts, padding=True, truncation=limit is not None, max_length=limit, return_tensors="pt")
        device = self.accelerator.device
        return {
            "input_ids": encoded["input_ids"].to(device),  # (B, T), padded on the right
            "attention_mask": encoded["attention_mask"].to(device),
        }

    def _values_of(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Values of all rows without gradient, in micro-batches of the training's size, shape `(B,)`."""
        size = self.args.per_device_train_batch_size
        chunks = zip(inputs["input_ids"].split(size), inputs["attention_mask"].split(size), strict=True)
        with torch.no_grad(), self.accelerator.autocast():
            return torch.cat([self.critics[0](ids, mask) for ids, mask in chunks])

    def _critic_loss(self, team: MultiAgentModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        mask = inputs["attention_mask"]
        length = int(mask.sum(dim=1).max())  # padding that no row of this micro-batch needs
        values = team.critics[0](inputs["input_ids"][:, :length], mask[:, :length])
        # Parts of a batch may miss different numbers of rewards; dividing by the expected number makes the mean over
        # micro-batches and processes the loss of the whole batch
        num_targets = (inputs["valid_share"] * len(values)).clamp(min=1e-6)
        loss = value_loss(
            values,
            inputs["returns"],
            inputs["valid"],
            inputs["old_values"],
            self.args.value_clip_range,
            num_targets,
        )
        mode = "train" if team.training else "eval"
        self._metrics.add(mode, "critic/loss", self.accelerator.gather(loss.detach()).mean().item())
        if self._decay_guard is not None and team.training:
            self._decay_guard.note("critic", bool(inputs["valid"].any()))
        return self.args.value_loss_coef * loss
