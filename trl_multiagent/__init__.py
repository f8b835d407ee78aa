# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Train several language models together with reinforcement learning, on top of Hugging Face TRL."""

from importlib import import_module
from typing import TYPE_CHECKING


__version__ = "0.1.0.dev0"

# Public name -> module that defines it. Names load on first use, so that importing the package stays cheap.
_PUBLIC = {
    "ActorCriticConfig": "trainers.actor_critic_config",
    "ActorCriticTrainer": "trainers.actor_critic_trainer",
    "CheckpointError": "checkpoints.storage",
    "GRPOAgent": "agents.grpo_agent",
    "IACConfig": "trainers.actor_critic_config",
    "IACTrainer": "trainers.iac_trainer",
    "JointRewardConfig": "trainers.joint_reward_config",
    "JointRewardTrainer": "trainers.joint_reward_trainer",
    "MAACConfig": "trainers.actor_critic_config",
    "MAACTrainer": "trainers.maac_trainer",
    "MADPOConfig": "trainers.preference_config",
    "MADPOIterConfig": "trainers.preference_config",
    "MADPOIterTrainer": "trainers.madpo_iter_trainer",
    "MADPOTrainer": "trainers.madpo_trainer",
    "MAGRPOConfig": "trainers.reinforce_config",
    "MAGRPOTrainer": "trainers.reinforce_trainer",
    "MAREINFORCEConfig": "trainers.reinforce_config",
    "MAREINFORCETrainer": "trainers.reinforce_trainer",
    "MARLHFConfig": "trainers.marlhf_config",
    "MARLHFIterConfig": "trainers.marlhf_config",
    "MARLHFIterTrainer": "trainers.marlhf_trainer",
    "MARLHFTrainer": "trainers.marlhf_trainer",
    "MARLOOConfig": "trainers.reinforce_config",
    "MARLOOTrainer": "trainers.reinforce_trainer",
    "MAReMaxConfig": "trainers.reinforce_config",
    "MAReMaxTrainer": "trainers.reinforce_trainer",
    "MultiAgentConfig": "trainers.multi_agent_config",
    "MultiAgentModel": "models.team",
    "MultiAgentTrainer": "trainers.multi_agent_trainer",
    "PreferenceConfig": "trainers.preference_config",
    "PreferenceTrainer": "trainers.preference_trainer",
    "ReinforceConfig": "trainers.reinforce_config",
    "ReinforceTrainer": "trainers.reinforce_trainer",
    "ValueHead": "models.value_head",
    "ValueHeadExportCallback": "callbacks.value_head_export",
    "ValueModel": "models.critic",
    "WandbResumeCallback": "callbacks.wandb_resume",
    "read_checkpoint_metadata": "checkpoints.metadata",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])


if TYPE_CHECKING:
    from .agents.grpo_agent import GRPOAgent
    from .callbacks.value_head_export import ValueHeadExportCallback
    from .callbacks.wandb_resume import WandbResumeCallback
    from .checkpoints.metadata import read_checkpoint_metadata
    from .checkpoints.storage import CheckpointError
    from .models.critic import ValueModel
    from .models.team import MultiAgentModel
    from .models.value_head import ValueHead
    from .trainers.actor_critic_config import ActorCriticConfig, IACConfig, MAACConfig
    from .trainers.actor_critic_trainer import ActorCriticTrainer
    from .trainers.iac_trainer import IACTrainer
    from .trainers.joint_reward_config import JointRewardConfig
    from .trainers.joint_reward_trainer import JointRewardTrainer
    from .trainers.maac_trainer import MAACTrainer
    from .trainers.madpo_iter_trainer import MADPOIterTrainer
    from .trainers.madpo_trainer import MADPOTrainer
    from .trainers.marlhf_config import MARLHFConfig, MARLHFIterConfig
    from .trainers.marlhf_trainer import MARLHFIterTrainer, MARLHFTrainer
    from .trainers.multi_agent_config import MultiAgentConfig
    from .trainers.multi_agent_trainer import MultiAgentTrainer
    from .trainers.preference_config import MADPOConfig, MADPOIterConfig, PreferenceConfig
    from .trainers.preference_trainer import PreferenceTrainer
    from .trainers.reinforce_config import (
        MAGRPOConfig,
        MAREINFORCEConfig,
        MAReMaxConfig,
        MARLOOConfig,
        ReinforceConfig,
    )
    from .trainers.reinforce_trainer import (
        MAGRPOTrainer,
        MAREINFORCETrainer,
        MAReMaxTrainer,
        MARLOOTrainer,
        ReinforceTrainer,
    )
