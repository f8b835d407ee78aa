# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Configs of the actor-critic trainers."""

from dataclasses import dataclass, field
from typing import ClassVar

from .multi_agent_config import MultiAgentConfig, check_choice, check_number


_CRITIC_BASELINE = "the critic is the baseline; rewards are not compared within their group"


@dataclass
class ActorCriticConfig(MultiAgentConfig):
    """
    What the configs of the actor-critic trainers share.

    Parameters:
        critic_type (`str`, *optional*, defaults to `"v"`):
            What a critic values: `"v"` the history (what was asked), `"q"` the history with the response.
        critic_learning_rate (`float`, *optional*, defaults to `1e-5`):
            Learning rate of critics and value heads.
        critic_warmup_steps (`int`, *optional*, defaults to `0`):
            First optimizer steps, in which only critics and value heads learn. They count as steps of the run.
        critic_max_length (`int`, *optional*):
            Longest text that a critic reads, in tokens; the beginning is cut. Default: the critic's positions.
        critic_value_head_hidden_dim (`int`, *optional*):
            Width of the hidden layer of a critic's value head. `None`: a linear head.
        value_head_dtype (`str`, *optional*, defaults to `"float32"`):
            Precision of value heads, whatever their backbone's: `"float32"`, `"bfloat16"` or `"float16"`.
        gae_lambda (`float`, *optional*, defaults to `0.95`):
            Lambda of generalized advantage estimation, 0 to 1: 0 is the temporal-difference error, 1 the discounted
            return minus the value. A step is a turn, for IAC's `advantage_level="token"` a token, and so `discount` is
            applied between steps. In a single turn it has no effect on advantages of turns.
        advantage_normalization (`bool`, *optional*, defaults to `True`):
            Whether advantages are brought to mean 0 and standard deviation 1 over each generation batch.
        value_loss_coef (`float`, *optional*, defaults to `0.5`):
            Weight of the mean squared value error in the loss. (There is no further factor 0.5, as in OpenAI's PPO
            and TRL's, whose `vf_coef` is twice this.)
        value_clip_range (`float`, *optional*):
            How far a value may move from the one at sampling time before its error is clipped. `None`: no clipping.
        value_normalization (`bool`, *optional*, defaults to `False`):
            Whether value heads predict in units of the running standard deviation of the returns, from their running
            mean, and value errors, and `value_clip_range`, are counted in these units. Both are saved with the head.
        kl_in_reward (`bool`, *optional*, defaults to `False`):
            Whether the KL to the references is a penalty in the reward, `r - beta * (log pi - log pi_ref)`, instead of
            a term of the loss. A central critic's reward is reduced by those of all actors.

    > [!NOTE]
    > `num_generations` may be 1: the value of the history is the baseline. With `critic_type="q"` take 2 or more: the
    > baseline is the mean value of the context's other samples, and without any that of other contexts.
    """

    _refused: ClassVar[dict[str, str]] = {
        "scale_rewards": _CRITIC_BASELINE,
        "multi_objective_aggregation": _CRITIC_BASELINE,
    }

    critic_type: str = field(
        default="v",
        metadata={
            "help": "What a critic values: 'v' the history, 'q' the history with the response.",
            "choices": ["v", "q"],
        },
    )
    critic_learning_rate: float = field(
        default=1e-5,
        metadata={"help": "Learning rate of critics and value heads."},
    )
    critic_warmup_steps: int = field(
        default=0,
        metadata={"help": "First optimizer steps, in which only critics and value heads learn."},
    )
    critic_max_length: int | None = field(
        default=None,
        metadata={"help": "Longest text that a critic reads, in tokens; the beginning is cut."},
    )
    critic_value_head_hidden_dim: int | None = field(
        default=None,
        metadata={"help": "Width of the hidden layer of a critic's value head. Not set: a linear head."},
    )
    value_head_dtype: str = field(
        default="float32",
        metadata={"help": "Precision of value heads.", "choices": ["float32", "bfloat16", "float16"]},
    )
    gae_lambda: float = field(
        default=0.95,
        metadata={"help": "Lambda of generalized advantage estimation: 0 is TD, 1 is return minus value."},
    )
    advantage_normalization: bool = field(
        default=True,
        metadata={"help": "Bring advantages to mean 0 and standard deviation 1 over each generation batch."},
    )
    value_loss_coef: float = field(
        default=0.5,
        metadata={"help": "Weight of the mean squared value error in the loss."},
    )
    value_clip_range: float | None = field(
        default=None,
        metadata={"help": "How far a value may move from the one at sampling time before its error is clipped."},
    )
    value_normalization: bool = field(
        default=False,
        metadata={"help": "Predict values in units of the running standard deviation of the returns."},
    )
    kl_in_reward: bool = field(
        default=False,
        metadata={"help": "Put the KL to the references into the reward, not into the loss."},
    )

    def __post_init__(self):
        super().__post_init__()
        check_choice("critic_type", self.critic_type, ("v", "q"))
        check_choice("value_head_dtype", self.value_head_dtype, ("float32", "bfloat16", "float16"))
        for name in ("critic_max_length", *self._widths()):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), int, 1)
        check_number("critic_warmup_steps", self.critic_warmup_steps, int, 0)
        check_number("gae_lambda", self.gae_lambda, float, 0, 1)
        for name in ("critic_learning_rate", "value_loss_coef"):
            check_number(name, getattr(self, name), float, 0)
        if self.value_clip_range is not None:
            check_number("value_clip_range", self.value_clip_range, float)
            if self.value_clip_range <= 0:
                raise ValueError(f"value_clip_range={self.value_clip_range}, expected a positive number, or None.")
        if self.advantage_normalization and self.generation_batch_size * self._advantages_per_sample() < 2:
            raise ValueError(
                f"advantage_normalization=True compares the advantages of a generation batch, but there is one in "
                f"each (per_device_train_batch_size={self.per_device_train_batch_size}, "
                f"steps_per_generation={self.steps_per_generation}). Raise one of them, or turn it off."
            )
        if self.critic_type == "q" and self.generation_batch_size == 1:
            raise ValueError(
                "critic_type='q' takes the mean value of the other samples as the baseline, but a generation batch "
                "has one sample. Raise num_generations or per_device_train_batch_size, or set critic_type='v'."
            )
        if self.kl_in_reward and not self.beta:
            raise ValueError(f"kl_in_reward=True needs its coefficient, but beta={self.beta}. Set `beta` above 0.")
        if self.critic_warmup_steps:
            if self.ddp_find_unused_parameters is False:
                raise ValueError(
                    f"critic_warmup_steps={self.critic_warmup_steps}, but ddp_find_unused_parameters=False: in these "
                    "steps the actors' parameters are not used. Leave ddp_find_unused_parameters out."
                )
            reentrant = (self.gradient_checkpointing_kwargs or {}).get("use_reentrant", False)
            if self.gradient_checkpointing and reentrant and self.world_size > 1 and not self.deepspeed:
                raise ValueError(
                    f"critic_warmup_steps={self.critic_warmup_steps} does not go together with "
                    "gradient_checkpointing_kwargs={'use_reentrant': True} in several processes: DDP then wants every "
                    "parameter used in every step. Leave use_reentrant out, or set gradient_checkpointing=False."
                )
            self.ddp_find_unused_parameters = True

    def _min_generations(self) -> int:
        return 1

    def _advantages_per_sample(self) -> int:
        """How many advantages each joint sample has, at most."""
        return self.num_turns

    def _widths(self) -> list[str]:
        """The options that are widths of value heads."""
        return ["critic_value_head_hidden_dim"]


@dataclass
class MAACConfig(ActorCriticConfig):
    """
    Configuration of [`MAACTrainer`]. See [`ActorCriticConfig`] for what it shares with IAC's.

    Parameters:
        individual_rewards (`bool`, *optional*, defaults to `False`):
            Whether the actors have rewards of their own (the reward function returns one list for each), and the
            central critic values each actor's; it is told whose by the last line of the text.
    """

    individual_rewards: bool = field(
        default=False,
        metadata={"help": "Whether the central critic values a reward of its own for each actor."},
    )


@dataclass
class IACConfig(ActorCriticConfig):
    """
    Configuration of [`IACTrainer`]. See [`ActorCriticConfig`] for what it shares with MAAC's.

    Parameters:
        use_separate_critic (`bool`, *optional*, defaults to `True`):
            Whether each actor has a critic model of its own; otherwise a value head on its own backbone.
        value_head_hidden_dim (`int`, *optional*):
            Width of the hidden layer of a value head on an actor. `None`: a linear head.
        advantage_level (`str`, *optional*, defaults to `"turn"`):
            What has an advantage: each `"turn"` (all tokens of a completion share one) or each `"token"`.
        bootstrap_truncated (`bool`, *optional*, defaults to `False`):
            With `advantage_level="token"`: whether a completion that was cut by the length limit at the end of an
            interaction counts as unfinished, so that the value after its last token is added to its reward.
    """

    use_separate_critic: bool = field(
        default=True,
        metadata={"help": "A critic model for each actor; otherwise a value head on the actor's own backbone."},
    )
    value_head_hidden_dim: int | None = field(
        default=None,
        metadata={"help": "Width of the hidden layer of a value head on an actor. Not set: a linear head."},
    )
    advantage_level: str = field(
        default="turn",
        metadata={"help": "What has an advantage of its own: each turn, or each token.", "choices": ["turn", "token"]},
    )
    bootstrap_truncated: bool = field(
        default=False,
        metadata={
            "help": "With advantages of tokens: add the value after the last token of a completion that was cut by "
            "the length limit."
        },
    )

    def __post_init__(self):
        super().__post_init__()
        check_choice("advantage_level", self.advantage_level, ("turn", "token"))
        if self.advantage_level == "token" and self.critic_type == "q":
            raise ValueError(
                "advantage_level='token' needs values of what stands before each token: set critic_type='v'."
            )
        if self.bootstrap_truncated and self.advantage_level == "turn":
            raise ValueError(
                "bootstrap_truncated=True needs advantage_level='token': a turn that was cut is over, and its reward "
                "is known."
            )
        if self.bootstrap_truncated and self.mask_truncated_completions:
            raise ValueError(
                "bootstrap_truncated=True and mask_truncated_completions=True: nothing is learned from truncated "
                "completions then. Set one of them."
            )
        if self.use_separate_critic:
            given = {"value_head_hidden_dim": "critic_value_head_hidden_dim"}
        else:
            given = {"critic_value_head_hidden_dim": "value_head_hidden_dim", "critic_max_length": None}
        for name, other in given.items():
            if getattr(self, name) is not None:
                instead = f"Set `{other}`." if other else "Leave it out: the head reads what the actor reads."
                raise ValueError(
                    f"{name}={getattr(self, name)} has no effect with "
                    f"use_separate_critic={self.use_separate_critic}. {instead}"
                )
        if not self.use_separate_critic and self.critic_type == "q" and self.mask_truncated_completions:
            raise ValueError(
                "mask_truncated_completions=True hides truncated completions from the backbone, so a head on it "
                "cannot value them. Set critic_type='v' or use_separate_critic=True."
            )

    def _advantages_per_sample(self) -> int:
        tokens = self.max_completion_length if self.advantage_level == "token" else 1
        return super()._advantages_per_sample() * tokens

    def _widths(self) -> list[str]:
        return [*super()._widths(), "value_head_hidden_dim"]
