# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Critics and value heads, from what the user gave, with every check that can be made before training."""

import contextlib
import copy
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from trl import GRPOConfig

from .._compat import create_model_from_path, find_file
from ..models.critic import ValueModel
from ..models.dropout import disable_dropout
from ..models.language_model import base_language_model, hidden_width, inner_model
from ..models.value_head import VALUE_HEAD_CONFIG_FILE, VALUE_HEAD_FILE, ValueHead, load_value_head
from .loading import (
    ModelLike,
    check_vocabulary,
    identifier,
    init_kwargs,
    load_tokenizer,
    open_adapter,
    resolve_tokenizer,
)


logger = logging.getLogger(__name__)

_OTHER_CRITICS = (
    "Use a critic of the actor's vocabulary, `use_separate_critic=False`, or `MAACTrainer`, whose critic reads text."
)


def load_critic(
    name: str, source: ModelLike, hidden_dim: int | None, args: GRPOConfig, peft_config: Any = None
) -> ValueModel:
    """
    A critic from an identifier, a directory or a loaded causal language model. A value head that lies beside the
    backbone (`value_head.pt`) is restored. A critic is never quantized by the actors' `quantization_config`.

    Args:
        name (`str`):
            The critic's name, for errors.
        source (`str` or model):
            The backbone.
        hidden_dim (`int`, *optional*):
            Width of the head's hidden layer. `None` is a linear head.
        args ([`ActorCriticConfig`]):
            Arguments of the run.
        peft_config ([`~peft.PeftConfig`], *optional*):
            Adapter to train instead of the full backbone.

    Raises:
        ValueError: the model is no causal language model, the adapter does not fit, or a saved head has another shape
            or was trained for another `critic_type`.
        FileNotFoundError: the backbone was saved with a head that is gone.
    """
    kwargs = init_kwargs(args)
    kwargs.pop("quantization_config", None)  # the actors'
    backbone = open_adapter(source, kwargs)
    if isinstance(backbone, str):
        backbone = create_model_from_path(backbone, AutoModelForCausalLM, **kwargs)
        saved_as = (backbone.config.architectures or [""])[0]
        if saved_as.endswith("ForSequenceClassification"):
            raise ValueError(
                f"{name}: {source} is a {saved_as}, whose score would be lost: a critic is a causal language model "
                "that gets a value head. Pass the model it was trained from."
            )
    _check_readable(name, backbone)
    if peft_config is not None:
        backbone = _add_adapter(name, backbone, peft_config)
    _check_adapters(name, backbone)
    if args.disable_dropout:
        disable_dropout(backbone)
    with _seeded(args):
        critic = ValueModel(backbone, hidden_dim, args.critic_type, getattr(torch, args.value_head_dtype))
    _restore_head(name, critic.value_head, identifier(source), args)
    return critic


def add_value_head(name: str, actor: nn.Module, source: ModelLike, hidden_dim: int | None, args: GRPOConfig) -> None:
    """
    Make an actor its own critic: give it a `value_head`, restored if one lies beside it.

    Args, Raises: as for `load_critic`.
    """
    _check_readable(name, actor)
    _check_adapters(name, actor)
    with _seeded(args):
        dtype = getattr(torch, args.value_head_dtype)
        actor.value_head = ValueHead(hidden_width(actor), hidden_dim, args.critic_type, dtype)
    _restore_head(name, actor.value_head, identifier(source), args)


def central_tokenizer(
    source: ModelLike,
    tokenizer: Any,
    critic: ValueModel,
    actor: nn.Module,
    actor_tokenizer: PreTrainedTokenizerBase,
    args: GRPOConfig,
) -> PreTrainedTokenizerBase:
    """
    The tokenizer that a central critic reads text with: the given one, else its own, else the first actor's.

    Raises:
        ValueError: it does not fit the critic's vocabulary.
    """
    if tokenizer is None and _has_tokenizer(identifier(source), args):
        tokenizer = identifier(source)
    if tokenizer is None:
        _check_same_vocabulary(critic.backbone, actor)
        tokenizer = actor_tokenizer
    tokenizer = resolve_tokenizer("critic", source, tokenizer, args)
    check_vocabulary("critic", critic.backbone, tokenizer)
    tokenizer.padding_side, tokenizer.truncation_side = "right", "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # one of them is there: it was checked
    return tokenizer


def check_reads_ids_of(
    name: str,
    critic: ValueModel,
    source: ModelLike,
    actor_name: str,
    tokenizer: PreTrainedTokenizerBase,
    args: GRPOConfig,
) -> None:
    """
    Raise a `ValueError` if a critic cannot read the token ids of its actor: ids beyond its embeddings, or ids that its
    own tokenizer, where it has one, has for other tokens.
    """
    rows = base_language_model(critic.backbone).get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise ValueError(
            f"{name} reads the token ids of {actor_name}, whose tokenizer has {len(tokenizer)} tokens, but it embeds "
            f"only {rows}. {_OTHER_CRITICS}"
        )
    home = identifier(source)
    if not _has_tokenizer(home, args):
        return
    own = {number: token for token, number in load_tokenizer(home, args).get_vocab().items()}
    other = [(token, number) for token, number in tokenizer.get_vocab().items() if own.get(number, token) != token]
    if other:
        token, number = min(other, key=lambda pair: pair[1])
        raise ValueError(
            f"{name} reads the token ids of {actor_name}, but {len(other)} of them stand for other tokens in the "
            f"tokenizer of {home}: {number} is {token!r} for the actor and {own[number]!r} for the critic. "
            f"{_OTHER_CRITICS}"
        )


@contextlib.contextmanager
def _seeded(args: GRPOConfig) -> Iterator[None]:
    """Inside, a head's weights are drawn that do not depend on what was built before it."""
    with torch.random.fork_rng():
        torch.manual_seed(args.seed)
        yield


def _check_readable(name: str, model: nn.Module) -> None:
    language_model = base_language_model(model)
    if language_model.get_output_embeddings() is None or not language_model.can_generate():
        raise ValueError(
            f"{name} is a {type(language_model).__name__}, expected a causal language model (for example "
            "Qwen2ForCausalLM): a value head is added to its last hidden states."
        )
    if inner_model(model) is language_model:
        raise ValueError(
            f"{name} is a {type(language_model).__name__}, which does not tell its inner model apart "
            f"(`base_model`), so that its last hidden states cannot be read. Use another architecture."
        )
    if _reads_both_ways(language_model):
        raise ValueError(
            f"{name} is a {type(language_model).__name__} that reads a text in both directions: the value of a token "
            "would depend on what follows it. Set is_decoder=True in its config where there is such an option, or use "
            "a causal language model."
        )


def _reads_both_ways(language_model: nn.Module) -> bool:
    config = language_model.config
    modules = inner_model(language_model).modules()
    encoder = any(getattr(module, "is_decoder", None) is False for module in modules)
    return config.model_type in ("cpmant", "xlnet") or (encoder and getattr(config, "is_decoder", None) is False)


def _add_adapter(name: str, backbone: nn.Module, peft_config: Any) -> nn.Module:
    from peft import PeftConfig, get_peft_model

    if not isinstance(peft_config, PeftConfig):
        raise TypeError(f"{name}: `critic_peft_config` must be a PeftConfig, got {type(peft_config).__name__}.")
    if hasattr(backbone, "get_base_model"):
        raise ValueError(f"{name} has an adapter already, and gets `critic_peft_config` too. Pass one of them.")
    return get_peft_model(backbone, copy.deepcopy(peft_config))  # PEFT writes the base model's name into it


def _check_adapters(name: str, model: nn.Module) -> None:
    for config in getattr(model, "peft_config", {}).values():
        if config.is_prompt_learning:
            raise ValueError(
                f"{name}: a value head cannot read a model with {type(config).__name__}, whose virtual tokens shift "
                "the positions. Use an adapter on the weights, such as LoRA."
            )


def _has_tokenizer(source: str, args: GRPOConfig) -> bool:
    return any(_find(source, name, args) for name in ("tokenizer_config.json", "tokenizer.json"))


def _find(source: str, name: str, args: GRPOConfig) -> str | None:
    """A file of the revision that models are loaded from."""
    return find_file(source, name, (args.model_init_kwargs or {}).get("revision"))


def _check_same_vocabulary(critic: nn.Module, actor: nn.Module) -> None:
    """A critic without a tokenizer may take the actor's if the two models seem to share a vocabulary."""
    critic, actor = base_language_model(critic), base_language_model(actor)
    rows = [model.get_input_embeddings().num_embeddings for model in (critic, actor)]
    if rows[0] != rows[1] and critic.config.model_type != actor.config.model_type:
        raise ValueError(
            f"critic comes without a tokenizer, and the first actor's does not fit it: it embeds {rows[0]} tokens "
            f"({critic.config.model_type}), the actor {rows[1]} ({actor.config.model_type}). Pass `critic_tokenizer=`."
        )


def _restore_head(name: str, head: ValueHead, source: str, args: GRPOConfig) -> None:
    """Load the head that lies beside a backbone, if there is one."""
    paths = [_find(source, file, args) for file in (VALUE_HEAD_CONFIG_FILE, VALUE_HEAD_FILE)]
    found = next(filter(None, paths), None)
    if found is not None:
        load_value_head(head, os.path.dirname(found))
        logger.warning("%s: restored the value head from %s.", name, os.path.join(source, VALUE_HEAD_FILE))
        if head.moments.count and not args.value_normalization:
            logger.warning(
                "%s: its value head was trained with value_normalization=True (returns of mean %g and standard "
                "deviation %g). Here it is off: errors are in the rewards' units, and the moments stay. Set "
                "value_normalization=True to go on as before.",
                name,
                head.moments.mean,
                head.moments.std,
            )
