# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Configs of the actor-critic trainers."""

from dataclasses import dataclass, field
from typing import ClassVar

from .multi_agent_config import MultiAgentConfig


_CRITIC_BASELINE = "the critic is the baseline; rewards are not compared within their group"
_ONE_TURN = "a critic over several turns is not offered yet"


@dataclass
class MAACConfig(MultiAgentConfig):
    """
    Configuration of [`MAACTrainer`].

    Parameters:
        critic_type (`str`, *optional*, defaults to `"v"`):
            What the critic values: `"v"` the history (what the actors were asked), `"q"` the history with the joint
            response.
        critic_learning_rate (`float`, *optional*, defaults to `1e-5`):
            Learning rate of the critic and its value head.
        value_loss_coef (`float`, *optional*, defaults to `0.5`):
            Weight of the mean squared value error in the loss.
        value_clip_range (`float`, *optional*):
            How far a value may move from the one at sampling time before its error is clipped. `None`: no clipping.
        advantage_normalization (`bool`, *optional*, defaults to `True`):
            Whether advantages are brought to mean 0 and standard deviation 1 over each generation batch.
        critic_max_length (`int`, *optional*):
            Longest text that the critic reads, in its tokens; the beginning is cut. Default: the model's positions.
        critic_value_head_hidden_dim (`int`, *optional*):
            Width of the value head's hidden layer. `None`: a linear head.
    """

    _refused: ClassVar[dict[str, str]] = {
        "scale_rewards": _CRITIC_BASELINE,
        "multi_objective_aggregation": _CRITIC_BASELINE,
        **dict.fromkeys(
            (
                "num_turns",
                "rollout_mode",
                "discount",
                "early_termination_threshold",
                "external_prompt_passthrough",
            ),
            _ONE_TURN,
        ),
        "turn_order": "a later actor's prompt holds what an earlier one said, so its value is no baseline for that",
    }

    critic_type: str = field(
        default="v",
        metadata={
            "help": "What the critic values: 'v' the history, 'q' the history with the joint response.",
            "choices": ["v", "q"],
        },
    )
    critic_learning_rate: float = field(
        default=1e-5,
        metadata={"help": "Learning rate of the critic and its value head."},
    )
    value_loss_coef: float = field(
        default=0.5,
        metadata={"help": "Weight of the mean squared value error in the loss."},
    )
    value_clip_range: float | None = field(
        default=None,
        metadata={"help": "How far a value may move from the one at sampling time before its error is clipped."},
    )
    advantage_normalization: bool = field(
        default=True,
        metadata={"help": "Bring advantages to mean 0 and standard deviation 1 over each generation batch."},
    )
    critic_max_length: int | None = field(
        default=None,
        metadata={"help": "Longest text that the critic reads, in its tokens; the beginning is cut."},
    )
    critic_value_head_hidden_dim: int | None = field(
        default=None,
        metadata={"help": "Width of the value head's hidden layer. Not set: a linear head."},
    )

    def __post_init__(self):
        super().__post_init__()
        if self.critic_type not in ("v", "q"):
            raise ValueError(f"critic_type={self.critic_type!r}, expected 'v' or 'q'.")
        for name in ("value_clip_range", "critic_max_length", "critic_value_head_hidden_dim"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value}, expected a positive number, or None.")
        if self.value_loss_coef < 0:
            raise ValueError(f"value_loss_coef={self.value_loss_coef}, expected 0 or more.")
