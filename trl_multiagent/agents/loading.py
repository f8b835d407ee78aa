# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""From what a user passes for a team to models and tokenizers, with every check that can be made before training."""

import copy
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from trl import GRPOConfig

from .._compat import find_file
from ..models.language_model import base_language_model


logger = logging.getLogger(__name__)

ModelLike = str | nn.Module


def either(**values: Any) -> Any:
    """
    The value of two words for one thing, of which at most one may be given.

    Example: `either(tokenizer=None, processing_class=tok)` is `tok`.

    Raises:
        ValueError: both are given and differ.
    """
    (first, a), (second, b) = values.items()
    if a is not None and b is not None and a is not b and a != b:
        raise ValueError(
            f"`{first}` and `{second}` are two words for one thing, but have different values. Pass one of them."
        )
    return b if a is None else a


def identifier(model: ModelLike) -> str:
    """Hub id or directory of a model, `""` if it has none (built from a config)."""
    return model if isinstance(model, str) else getattr(model.config, "_name_or_path", "") or ""


def resolve_models(
    kind: str,
    model: ModelLike | os.PathLike | None,
    models: Sequence[ModelLike | os.PathLike] | None,
    count: int | None,
    hint: str = "",
) -> list[ModelLike]:
    """
    The models of a team, from the shortcut for equal ones (`agent_model`) or the list (`agents`).

    Args:
        kind (`str`):
            `"agent"` or `"critic"`, for the messages.
        model (`str` or model, *optional*):
            One source for all; a loaded model is copied, so that all start equal and none shares weights.
        models (list of `str` or model, *optional*):
            One source for each.
        count (`int`, *optional*):
            How many there must be. `None` takes the list's length.
        hint (`str`, *optional*):
            What to do where the number is wrong.

    Raises:
        ValueError: neither is given, the length is wrong, both are given and name different models, or a path leads to
            no model.
        TypeError: something else than a hub id, a directory or a model is given.
    """
    if isinstance(models, str) or (models is not None and not isinstance(models, Sequence)):
        raise ValueError(
            f"`{kind}s` must be a list of models, got {type(models).__name__}. For one, pass a list of one."
        )
    if model is not None:
        model = _checked_source(f"`{kind}_model`", model)
    if models is None:
        if model is None:
            raise ValueError(f"No {kind} was given. Pass `{kind}_model` (one for all) or `{kind}s` (a list).")
        if count is None:
            raise ValueError(f"`{kind}_model` needs the number of {kind}s. Pass `num_agents`, or `{kind}s` as a list.")
        return (
            [model] * count if isinstance(model, str) else [model, *(copy.deepcopy(model) for _ in range(count - 1))]
        )
    models = [_checked_source(f"`{kind}s[{index}]`", source) for index, source in enumerate(models)]
    if not models or (count is not None and len(models) != count):
        raise ValueError(f"`{kind}s` has {len(models)} entries, expected {count or 'at least 1'}. {hint}".rstrip())
    if model is not None and not all(_is_same(entry, model) for entry in models):
        raise ValueError(
            f"`{kind}_model` is {_shown(model)}, but `{kind}s` names [{', '.join(map(_shown, models))}]. Together "
            "they must name the same models; pass one of them."
        )
    return models


def _checked_source(name: str, source: Any) -> ModelLike:
    """A source as it is given, a path as text; an error for what can be no model."""
    source = os.fspath(source) if isinstance(source, os.PathLike) else source
    if not isinstance(source, (str, nn.Module)):
        raise TypeError(f"{name} must be a hub id, a directory or a loaded model, got {type(source).__name__}.")
    if not isinstance(source, str):
        return source
    if not os.path.isdir(source) and (source.count("/") > 1 or source.startswith((".", "/", "~"))):
        raise ValueError(f"{name}: there is no directory {source!r}.")
    if os.path.isdir(os.path.join(source, "agent_0")) and not os.path.isfile(os.path.join(source, "config.json")):
        raise ValueError(f"{name}: {source!r} is the export of a team. Pass one of its models: {_models_in(source)}.")
    return source


def _models_in(export: str) -> str:
    return ", ".join(sorted(str(path.parent) for path in Path(export).glob("**/config.json")))


def _shown(model: ModelLike) -> str:
    return repr(identifier(model)) if identifier(model) else f"a loaded {type(model).__name__}"


def _is_same(first: ModelLike, second: ModelLike) -> bool:
    return first is second or (identifier(first) != "" and identifier(first) == identifier(second))


def check_independent(models: dict[str, nn.Module]) -> None:
    """Raise a `ValueError` if two models share weights: one weight would stand in the optimizer twice."""
    owner: dict[int, str] = {}
    for name, model in models.items():
        for parameter in {id(p): p for p in model.parameters()}:
            if owner.setdefault(parameter, name) != name:
                raise ValueError(
                    f"{owner[parameter]} and {name} share weights. Each must be a model of its own: pass copies "
                    f"(`copy.deepcopy(model)`), identifiers, or for equal ones `agent_model` with `num_agents`, or "
                    f"`critic_model`."
                )


def resolve_num_agents(argument: int | None, config: int | None) -> int | None:
    """The number of actors from the constructor's or the config's `num_agents`, which must agree if both are given."""
    if argument is not None and config is not None and argument != config:
        raise ValueError(f"`num_agents` is {argument} in the constructor and {config} in the config. Make them equal.")
    count = config if argument is None else argument
    if count is not None and count < 1:
        raise ValueError(f"`num_agents` is {count}, expected at least 1.")
    return count


def resolve_tokenizers(
    tokenizer: Any, agents: Sequence[ModelLike], names: Sequence[str], args: GRPOConfig
) -> list[PreTrainedTokenizerBase]:
    """
    One tokenizer for each actor: copies of those given (one for all, or a list in actor order), else the identifier's
    own. TRL may set a pad token, which must not change the tokenizer of another actor or of the user.

    Raises:
        ValueError: a loaded model has no tokenizer, or the list has the wrong length.
    """
    if isinstance(tokenizer, (list, tuple)):
        if len(tokenizer) != len(agents):
            raise ValueError(f"`tokenizer` has {len(tokenizer)} entries, expected {len(agents)}, one for each actor.")
        given = list(tokenizer)
    else:
        given = [tokenizer] * len(agents)
    return [resolve_tokenizer(name, agent, own, args) for name, agent, own in zip(names, agents, given, strict=True)]


def resolve_tokenizer(name: str, model: ModelLike, tokenizer: Any, args: GRPOConfig) -> PreTrainedTokenizerBase:
    """One entity's tokenizer: a copy of the given one, or the identifier's own. Errors as in `resolve_tokenizers`."""
    if isinstance(tokenizer, ProcessorMixin):
        raise ValueError(f"{name}: got a {type(tokenizer).__name__}, expected a tokenizer. Actors are text models.")
    if tokenizer is None and not isinstance(model, str):
        raise ValueError(
            f"{name} is a loaded model and has no tokenizer. Pass `tokenizer=`: one that all actors share, or a list "
            f"in actor order."
        )
    if tokenizer is None or isinstance(tokenizer, str):
        tokenizer = load_tokenizer(tokenizer or model, args)
    else:
        tokenizer = copy_tokenizer(name, tokenizer)
    if tokenizer.eos_token is None and tokenizer.pad_token is None:
        raise ValueError(f"{name}: its tokenizer has neither an EOS nor a pad token. Set `tokenizer.pad_token`.")
    return tokenizer


def copy_tokenizer(name: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy of a tokenizer; a `ValueError` naming the entity if it cannot be copied, and so neither be saved."""
    try:
        return copy.deepcopy(tokenizer)
    except Exception as error:
        raise ValueError(
            f"{name}: its tokenizer can be neither copied nor saved ({type(error).__name__}: {error}). A custom part "
            f"of a `tokenizers` pipeline has no serialized form; use a tokenizer without one."
        ) from error


def load_tokenizer(source: str, args: GRPOConfig | None = None) -> PreTrainedTokenizerBase:
    """
    The tokenizer of a hub id or directory; of the models' `revision`, and with `trust_remote_code` if `args` say so.

    `AutoTokenizer` takes the class that belongs to the model's architecture even where the files say that they are
    complete in themselves, and gives other ids for other tokenizers (a word-level one beside a Qwen2 model). Here the
    files decide.
    """
    kwargs = {"padding_side": "left", "truncation_side": "left"}
    if args is not None:
        kwargs["trust_remote_code"] = args.trust_remote_code
        kwargs["revision"] = (args.model_init_kwargs or {}).get("revision")
    if get_tokenizer_config(source, revision=kwargs.get("revision")).get("tokenizer_class") in (
        "TokenizersBackend",
        "PreTrainedTokenizerFast",
    ):
        return PreTrainedTokenizerFast.from_pretrained(source, **kwargs)
    return AutoTokenizer.from_pretrained(source, **kwargs)


def open_adapter(model: ModelLike, kwargs: dict[str, Any]) -> ModelLike:
    """
    An identifier that holds an adapter only (a directory or a hub id) becomes the trainable PEFT model, on its base,
    which is loaded with `kwargs`; anything else is returned as it is.
    """
    if not isinstance(model, str) or find_file(model, "config.json") or not find_file(model, "adapter_config.json"):
        return model
    from peft import AutoPeftModelForCausalLM

    return AutoPeftModelForCausalLM.from_pretrained(model, is_trainable=True, **{"dtype": torch.float32, **kwargs})


def check_vocabulary(name: str, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a `ValueError` if the tokenizer has ids that the model's embeddings do not."""
    embeddings = base_language_model(model).get_input_embeddings()
    while not hasattr(embeddings, "num_embeddings"):  # adapters on embeddings wrap them
        embeddings = getattr(embeddings, "original_module", None) or embeddings.get_base_layer()
    rows = embeddings.num_embeddings
    if len(tokenizer) > rows:
        raise ValueError(
            f"{name}: the tokenizer has {len(tokenizer)} tokens, but the model embeds only {rows}. Use the tokenizer "
            f"that belongs to the model, or call `model.resize_token_embeddings({len(tokenizer)})`."
        )


def clear_dense_quantization(name: str, model: nn.Module) -> None:
    """
    Make a model that was loaded from GGUF saveable: its weights are dense, but it still says that it is quantized and
    refuses `save_pretrained`.
    """
    model = base_language_model(model)
    quantizer = getattr(model, "hf_quantizer", None)
    method = getattr(getattr(model, "quantization_method", None), "value", getattr(model, "quantization_method", None))
    if method != "gguf" and getattr(getattr(quantizer, "quantization_config", None), "quant_method", None) != "gguf":
        return
    if getattr(quantizer, "packed_modules", None):
        raise ValueError(
            f"{name} was loaded from GGUF with packed weights, which can neither be trained nor saved. Load it with "
            f"`quantization_config=GgufConfig(dequantize=True)`."
        )
    logger.info("%s was loaded from GGUF; its weights are dense and will be saved as a normal model.", name)
    for attribute in ("hf_quantizer", "quantization_method", "is_quantized"):
        if hasattr(model, attribute):
            setattr(model, attribute, False if attribute == "is_quantized" else None)
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config


def init_kwargs(args: GRPOConfig, quantization_config: Any = None) -> dict[str, Any]:
    """Keyword arguments for loading a model, with a quantization instead of the one in `args`, if it is given."""
    # Without a device map the trainer places the models; TRL's default, "auto", would fill the first device first
    kwargs = {"trust_remote_code": args.trust_remote_code, "device_map": None, **(args.model_init_kwargs or {})}
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        kwargs["device_map"] = None
    if quantization_config is not None:
        kwargs["quantization_config"] = quantization_config
    return kwargs
