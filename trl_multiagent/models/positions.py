# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Positions of left-padded rows."""

import inspect

import torch
from torch import nn

from .critic import base_language_model


def count_positions_from_text(model: nn.Module) -> None:
    """
    Make a model with learned positions count them from the first real token of each row, as `generate` does. Without
    `position_ids` it would count padding too, so that the log-probabilities of a left-padded row were not those it was
    sampled with. Models with rotary or relative positions are left alone: a shift changes nothing there.
    """
    if _has_learned_positions(model):
        model.register_forward_pre_hook(_add_position_ids, with_kwargs=True)


def _has_learned_positions(model: nn.Module) -> bool:
    if "position_ids" not in inspect.signature(base_language_model(model).forward).parameters:
        return False
    return any(
        isinstance(module, nn.Embedding) and ("pos" in name.rsplit(".", 1)[-1] or name.endswith("wpe"))
        for name, module in model.named_modules()
    )


def _add_position_ids(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    mask, ids = kwargs.get("attention_mask"), kwargs.get("input_ids")
    # While generating, the mask is longer than the new ids, and `generate` gives positions itself
    if kwargs.get("position_ids") is None and torch.is_tensor(mask) and ids is not None and mask.shape == ids.shape:
        kwargs = {**kwargs, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    return args, kwargs
