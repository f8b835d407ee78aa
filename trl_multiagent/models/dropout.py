# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Turning dropout off, wherever an architecture keeps it."""

from torch import nn


def disable_dropout(model: nn.Module) -> None:
    """
    Turn off all dropout of a model, in place: `nn.Dropout` modules, and the rates that modules keep as numbers and
    pass to functions (Qwen2's `attention_dropout`, OPT's `dropout`), which TRL's `disable_dropout` does not reach.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
