# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""The actors of a team, from what the user gave."""

import copy
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig

from ..placement.backends import check_backend
from .grpo_agent import GRPOAgent
from .loading import (
    ModelLike,
    check_independent,
    check_vocabulary,
    clear_dense_quantization,
    init_kwargs,
    open_adapter,
)


def resolve_names(names: Sequence[str] | None, num_agents: int) -> list[str]:
    """The actors' names: the given ones, or `agent_0`, `agent_1`, ..."""
    names = [f"agent_{index}" for index in range(num_agents)] if names is None else list(names)
    if len(names) != num_agents:
        raise ValueError(
            f"`agent_names` has {len(names)} entries ({names}), expected {num_agents}, one for each actor."
        )
    return names


def resolve_trainable(
    trainable: Sequence[bool] | None, sources: Sequence[ModelLike], peft_configs: Sequence[Any], names: Sequence[str]
) -> list[bool]:
    """
    Which actors learn. By default those that are loaded, that get an adapter, or that have a trainable parameter.

    Raises:
        ValueError: the list has the wrong length, an actor that shall learn cannot, or one that shall not gets an
            adapter.
    """
    able = [
        isinstance(source, str) or config is not None or any(p.requires_grad for p in source.parameters())
        for source, config in zip(sources, peft_configs, strict=True)
    ]
    if trainable is None:
        trainable = able
    if len(trainable) != len(sources):
        raise ValueError(
            f"`trainable_agents` has {len(trainable)} entries, expected {len(sources)}, one for each actor: {names}."
        )
    for name, learns, can, config in zip(names, trainable, able, peft_configs, strict=True):
        if learns and not can:
            raise ValueError(
                f"trainable_agents says that {name} learns, but none of its parameters requires a gradient. Unfreeze "
                f"them, give it a `peft_config`, or set its entry to False."
            )
        if not learns and config is not None:
            raise ValueError(f"trainable_agents says that {name} is frozen, but it gets a `peft_config`. Drop one.")
    if not any(trainable):
        raise ValueError("No parameter of the team is trainable. Unfreeze at least one actor.")
    return list(trainable)


def resolve_peft_configs(peft_config: Any, num_agents: int, name: str = "peft_config") -> list[Any]:
    """One adapter config for each actor, from one for all or a list."""
    configs = list(peft_config) if isinstance(peft_config, (list, tuple)) else [peft_config] * num_agents
    if len(configs) != num_agents:
        raise ValueError(
            f"`{name}` has {len(configs)} entries, expected {num_agents}, one for each actor. For equal adapters pass "
            "one config."
        )
    # PEFT writes the base model's name into the config, so no two actors may share one
    return [copy.deepcopy(config) for config in configs]


def build_agents(
    sources: Sequence[ModelLike],
    tokenizers: Sequence[PreTrainedTokenizerBase],
    args: GRPOConfig,
    *,
    names: Sequence[str],
    trainable: Sequence[bool],
    reward_names: list[str],
    peft_configs: Sequence[Any],
    quantization_config: Any = None,
    kl_in_reward: bool = False,
) -> list[GRPOAgent]:
    """
    One TRL trainer for each actor, on one accelerator, which the first of them makes.

    Raises:
        ValueError: a model is shared by two actors, does not fit its tokenizer, or the back end is not supported.
    """
    check_independent(
        {name: source for name, source in zip(names, sources, strict=True) if not isinstance(source, str)}
    )
    agents: list[GRPOAgent] = []
    for index, (name, source) in enumerate(zip(names, sources, strict=True)):
        model = open_adapter(source, init_kwargs(args, quantization_config))
        if not isinstance(model, str):
            check_vocabulary(name, model, tokenizers[index])
            clear_dense_quantization(name, model)
        agent = GRPOAgent(
            model,
            args,
            processing_class=tokenizers[index],
            reward_names=reward_names,
            peft_config=peft_configs[index],
            quantization_config=quantization_config,
            team_trainer=agents[0] if agents else None,
            trainable=trainable[index],
            name=name,
            kl_in_reward=kl_in_reward,
        )
        check_vocabulary(name, agent.model, agent.processing_class)
        agents.append(agent)
    check_backend(agents[0].accelerator)
    return agents
