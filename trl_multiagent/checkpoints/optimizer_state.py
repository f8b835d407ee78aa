# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""An optimizer's state by the names of entities and parameters, not by their places in a list."""

from typing import Any

import torch
from torch import nn

from .storage import CheckpointError


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """
    The state of an optimizer under names.

    Args:
        optimizer ([`~torch.optim.Optimizer`]):
            An optimizer of some of the model's parameters. Groups may say their `"entity"`.
        model ([`~torch.nn.Module`]):
            The model that names the parameters.

    Returns:
        `dict`: `"state"` maps a parameter's name to its state (moments, step), `"groups"` lists the groups, with the
        names of their parameters as `"params"`.
    """
    names = _names(optimizer, model)
    plain = optimizer.state_dict()
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in plain["param_groups"]]
    return {"state": {names[index]: state for index, state in plain["state"].items()}, "groups": groups}


def load_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, saved: dict[str, Any]) -> None:
    """
    Load what `optimizer_state` returned, in whatever order the optimizer has its groups and parameters now.

    Raises:
        CheckpointError: the optimizer has other parameters, they are grouped otherwise, or a parameter has another
            shape; they are named. Nothing is loaded then.
    """
    names = _names(optimizer, model)
    own = optimizer.state_dict()["param_groups"]
    by_members = {frozenset(group["params"]): group for group in saved["groups"]}
    expected = [frozenset(names[index] for index in group["params"]) for group in own]
    if set(by_members) != set(expected):
        saved_names, own_names = frozenset().union(*by_members), frozenset().union(*expected)
        differ = sorted(saved_names ^ own_names) or ["they are grouped otherwise"]
        raise CheckpointError(
            f"The optimizer has other parameters than in the checkpoint: {', '.join(differ[:8])}"
            f"{', ...' if len(differ) > 8 else ''}. Train the same entities, with the same adapters and options."
        )
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, state in saved["state"].items():
        moment = state.get("exp_avg")
        if moment is not None and tuple(moment.shape) != shapes[name]:
            raise CheckpointError(
                f"The parameter {name} has the shape {shapes[name]}, in the checkpoint {tuple(moment.shape)}."
            )
    index_of = {name: index for index, name in enumerate(names)}
    optimizer.load_state_dict(
        {
            "state": {index_of[name]: state for name, state in saved["state"].items()},
            "param_groups": [
                {**by_members[members], "params": group["params"]}
                for group, members in zip(own, expected, strict=True)
            ],
        }
    )


def _names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """The name of each parameter, in the order in which `state_dict` counts them."""
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    unknown = sum(id(parameter) not in by_id for parameter in parameters)
    if unknown:
        raise CheckpointError(f"The optimizer holds {unknown} parameters that are not the model's.")
    return [by_id[id(parameter)] for parameter in parameters]
