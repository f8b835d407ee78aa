# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Positions of padded rows."""

import inspect
import re

import torch
from torch import nn

from .language_model import base_language_model, inner_model


# What tables of positions are called; not a layer's `post_attention_layernorm`
_TABLE = re.compile(r"pos(?!t)|^wpe$")


def count_positions_from_text(model: nn.Module) -> None:
    """
    Make a model with absolute positions (learned or sinusoidal) count them from the first real token of each row, as
    `generate` does. Without `position_ids` it would count padding too, so that the log-probabilities of a left-padded
    row were not those it was sampled with. Models with rotary or relative positions are left alone: a shift changes
    nothing there.
    """
    if _has_absolute_positions(model):
        model.register_forward_pre_hook(_add_position_ids, with_kwargs=True)


def position_ids_of(model: nn.Module, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """
    What the inner model of a causal language model must be given besides ids and mask to see the positions that the
    whole model sees: `position_ids` after `count_positions_from_text` found absolute positions, else nothing.
    """
    counts = _add_position_ids in model._forward_pre_hooks.values()
    return {"position_ids": _from_first_token(attention_mask)} if counts else {}


def num_positions(model: nn.Module) -> int | None:
    """Longest text that a causal language model has positions for, in tokens; None where nothing limits it."""
    number = getattr(base_language_model(model).config.get_text_config(), "max_position_embeddings", None)
    if number is None or number < 1:  # XLNet says -1
        return None
    paddings = [table.padding_idx for table in _position_tables(model) if isinstance(table, nn.Embedding)]
    # RoBERTa and its kin count from behind the padding's index
    return number - max((index + 1 for index in paddings if index is not None), default=0)


def _has_absolute_positions(model: nn.Module) -> bool:
    if "position_ids" not in inspect.signature(base_language_model(model).forward).parameters:
        return False
    own_buffers = (name for name, _ in inner_model(model).named_buffers(recurse=False))  # CTRL's table of sines
    return any(_position_tables(model)) or any(map(_TABLE.search, own_buffers))


def _position_tables(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if _TABLE.search(name.rsplit(".", 1)[-1])]


def _from_first_token(attention_mask: torch.Tensor) -> torch.Tensor:
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def _add_position_ids(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    mask, ids = kwargs.get("attention_mask"), kwargs.get("input_ids")
    # While generating, the mask is longer than the new ids, and `generate` gives positions itself
    if kwargs.get("position_ids") is None and torch.is_tensor(mask) and ids is not None and mask.shape == ids.shape:
        kwargs = {**kwargs, "position_ids": _from_first_token(mask)}
    return args, kwargs
