# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""All trained modules of a team in one module."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from .critic import is_own_critic


class MultiAgentModel(nn.Module):
    """
    The actors and critics of a team as one module, so that one optimizer, one wrapper (DDP, DeepSpeed) and one
    checkpoint hold them.

    Its forward takes a *step*, a callable, and returns `step(self)`: everything of a micro-batch that needs gradients
    runs inside one call of the wrapper, which is what DDP and ZeRO need when several modules share a backward pass.

    Args:
        agents (sequence of [`~transformers.PreTrainedModel`]):
            The actors, in actor order.
        critics (sequence of [`ValueModel`], *optional*):
            The critics. An actor that is its own critic has a `value_head` instead.
        central (`bool`, *optional*, defaults to `False`):
            Whether the critic is one for the team; otherwise critic i is that of actor i.
    """

    def __init__(self, agents: Sequence[nn.Module], critics: Sequence[nn.Module] = (), central: bool = False):
        super().__init__()
        self.agents = nn.ModuleList(agents)
        self.critics = nn.ModuleList(critics)
        self.central = central

    def forward(self, step: Callable[["MultiAgentModel"], torch.Tensor]) -> torch.Tensor:
        return step(self)

    @property
    def config(self):
        """Config of the first actor: transformers and TRL read one from every model they train."""
        return self.agents[0].config

    def entities(self) -> Iterator[tuple[str, nn.Module]]:
        """Name and module of every entity: `agent_0`, ..., and `critic` of the team, or `critic_0`, ... of each."""
        for index, agent in enumerate(self.agents):
            yield f"agent_{index}", agent
        for index, critic in enumerate(self.critics):
            yield "critic" if self.central else f"critic_{index}", critic

    def optimized_parts(self) -> Iterator[tuple[str, list[nn.Parameter]]]:
        """Name and parameters of what has a learning rate of its own: the entities, and heads apart from actors."""
        for name, module in self.entities():
            head = {id(p) for p in module.value_head.parameters()} if is_own_critic(module) else set()
            yield name, [p for p in module.parameters() if id(p) not in head]
            if head:
                yield f"{name}/value_head", list(module.value_head.parameters())

    def language_models(self) -> Iterator[nn.Module]:
        """The language model of every entity, without value heads."""
        yield from self.agents
        yield from (critic.backbone for critic in self.critics)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None) -> None:
        for model in self.language_models():
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=gradient_checkpointing_kwargs)

    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: dict | None = None, **kwargs) -> None:
        for model in self.language_models():
            model.activation_checkpointing_enable(
                activation_checkpointing_kwargs=activation_checkpointing_kwargs, **kwargs
            )
