# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Configs of the critic-free trainers."""

from dataclasses import dataclass

from .multi_agent_config import MultiAgentConfig


@dataclass
class MAGRPOConfig(MultiAgentConfig):
    """Configuration of [`MAGRPOTrainer`]. It has the parameters of [`MultiAgentConfig`]."""
