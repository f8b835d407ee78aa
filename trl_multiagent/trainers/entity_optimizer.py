# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""One optimizer for a team, with parameter groups for each entity."""

import logging
from collections.abc import Callable

import torch
from accelerate import Accelerator
from transformers import TrainerCallback

from ..models.team import MultiAgentModel
from ..placement.backends import states_by_group


logger = logging.getLogger(__name__)


def split_by_entity(
    optimizer: torch.optim.Optimizer, team: MultiAgentModel, learning_rate: Callable[[str], float]
) -> None:
    """
    Split the parameter groups of a fresh optimizer by actor, critic and head on an actor, in place. Each keeps the
    options of the group it came from (such as weight decay), and gets its part's learning rate and its name as
    `"entity"`.

    Args:
        optimizer ([`~torch.optim.Optimizer`]):
            An optimizer without state.
        team ([`MultiAgentModel`]):
            The parts, by `optimized_parts`.
        learning_rate (`Callable`):
            Name of a part to its learning rate.
    """
    groups = [dict(group) for group in optimizer.param_groups]
    optimizer.param_groups.clear()
    for name, members in team.optimized_parts():
        own = {id(parameter) for parameter in members}
        for group in groups:
            parameters = [parameter for parameter in group["params"] if id(parameter) in own]
            if parameters:
                rate = learning_rate(name)
                optimizer.add_param_group({**group, "params": parameters, "lr": rate, "entity": name})


class WarmupEnd(TrainerCallback):
    """
    Lets the actors' optimizer begin when the critics' warm-up ends.

    In the warm-up actors have no gradients, and the optimizer leaves them out. DeepSpeed gives it zeros instead, so
    that Adam counts steps: its bias correction would take the first real gradients for late ones.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            What prepared the optimizer, whose groups carry `"entity"`.
        num_steps (`int`):
            Steps of the warm-up.
    """

    def __init__(self, accelerator: Accelerator, num_steps: int):
        self.accelerator = accelerator
        self.num_steps = num_steps

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if self.num_steps >= state.max_steps:
            logger.warning(
                "critic_warmup_steps=%d, but the run has %d steps: no actor learns in it. Lower it, or train longer.",
                self.num_steps,
                state.max_steps,
            )

    def on_step_end(self, args, state, control, optimizer=None, **kwargs) -> None:
        if state.global_step != self.num_steps:
            return
        for group, own in states_by_group(self.accelerator, optimizer):
            if not is_critic(group["entity"]) and "step" in own:
                own["step"] = own["step"] * 0  # a number or a tensor


def is_critic(name: str) -> bool:
    """Whether a part of a team, by its name, predicts values: a critic, or a head on an actor."""
    return name.startswith("critic") or name.endswith("/value_head")


class DecayGuard(TrainerCallback):
    """
    Holds back weight decay of entities that a step has nothing to teach.

    Where all rewards of a step are equal or missing, every advantage is 0, and so are the gradients; weight decay
    would still move the weights, toward zero and away from what was learned.

    Args:
        optimizer ([`~torch.optim.Optimizer`]):
            An optimizer whose groups carry `"entity"`.
        accelerator ([`~accelerate.Accelerator`]):
            The processes: an entity is taught if it is taught on any of them.
        names (list of `str`):
            Names of the entities.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, accelerator: Accelerator, names: list[str]):
        self.optimizer = optimizer
        self.accelerator = accelerator
        self.taught = dict.fromkeys(names, False)

    def clear(self) -> None:
        """Forget what was noted since the last step."""
        self.taught = dict.fromkeys(self.taught, False)

    def note(self, name: str, taught: bool) -> None:
        """Say whether a micro-batch of the current step teaches an entity."""
        self.taught[name] = self.taught[name] or taught

    def hold(self) -> None:
        """Before a step: no weight decay for the entities that no micro-batch of it teaches. On every process."""
        flags = torch.tensor([float(flag) for flag in self.taught.values()], device=self.accelerator.device)
        flags = self.accelerator.reduce(flags, reduction="sum").tolist()
        idle = {name for name, flag in zip(self.taught, flags, strict=True) if not flag}
        for group in self.optimizer.param_groups:
            if group["entity"] in idle:
                group["held_weight_decay"], group["weight_decay"] = group["weight_decay"], 0.0
        self.clear()

    def on_optimizer_step(self, args, state, control, **kwargs) -> None:
        for group in self.optimizer.param_groups:
            if "held_weight_decay" in group:
                group["weight_decay"] = group.pop("held_weight_decay")
