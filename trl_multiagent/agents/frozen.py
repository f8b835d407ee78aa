# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Actors that answer beside the team, and are no part of it."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig

from ..checkpoints.random_states import own_random_state
from .grpo_agent import GRPOAgent
from .loading import ModelLike, check_vocabulary, clear_dense_quantization, init_kwargs, open_adapter


def load_frozen_actors(
    sources: Sequence[ModelLike],
    tokenizers: Sequence[PreTrainedTokenizerBase],
    args: GRPOConfig,
    *,
    names: Sequence[str],
    reward_names: list[str],
    team_trainer: Any,
) -> list[GRPOAgent]:
    """
    One frozen actor for each source, on the team's accelerator. Loading them leaves the random numbers as they are.

    Raises:
        ValueError: a model does not fit its tokenizer.
    """
    agents = []
    with own_random_state(args.seed):  # TRL's trainers set a seed
        for source, tokenizer, name in zip(sources, tokenizers, names, strict=True):
            model = open_adapter(source, init_kwargs(args))
            agent = GRPOAgent(
                model,
                args,
                processing_class=tokenizer,
                reward_names=reward_names,
                team_trainer=team_trainer,
                trainable=False,
                name=name,
            )
            check_vocabulary(name, agent.model, tokenizer)
            clear_dense_quantization(name, agent.model)
            agent.model.eval()
            agents.append(agent)
    return agents
