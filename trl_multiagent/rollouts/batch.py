# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""A scored generation batch, between the rollout and the losses."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .interaction import Turn


@dataclass
class JointBatch:
    """
    A scored generation batch. N actors, S samples of each actor in a turn over all processes, J joint responses of a
    turn, F reward functions, R rows of this process in the losses.

    The rows of a process are its samples of all turns, in order, then padding, so that every process has R.

    Attributes:
        turns (list of [`Turn`]): what was sampled.
        rewards (list of `torch.Tensor` of shape `(N, J)`): for each turn the weighted sum of the reward functions, NaN
            where there is none.
        returns (list of `torch.Tensor` of shape `(N, J)`): rewards with what follows them.
        num_rows (`int`): R.
        num_generations (`int`): samples of each task in the first turn.
        mode (`str`): `"train"` or `"eval"`.
        inputs (list of `dict`, length N): inputs of each actor's TRL loss, tensors with first dimension R. `None` for
            a frozen actor.
        critic_inputs (`dict`): inputs of the critics' loss, tensors with first dimension R.
    """

    turns: list[Turn]
    rewards: list[torch.Tensor]
    returns: list[torch.Tensor]
    num_rows: int
    num_generations: int
    mode: str
    inputs: list[dict[str, Any] | None] = field(default_factory=list)
    critic_inputs: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def process_index(self) -> int:
        return self.turns[0].process_index

    @property
    def num_joint_responses(self) -> int:
        """Joint responses of all processes and turns."""
        return sum(len(turn.pairing.members) for turn in self.turns)

    @property
    def num_samples(self) -> int:
        """Samples of an actor, of all processes and turns."""
        return sum(len(turn.tasks) for turn in self.turns)

    def prompts(self, agent: int) -> list:
        """What an actor was asked in the rows of this process, without padding."""
        return [prompt for turn in self.turns for prompt in turn.prompts[agent]]

    def of_samples(self, agent: int, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Values of joint responses, `(J, ...)` for each turn, as means over those of each sample, `(S, ...)`."""
        columns = [
            turn.pairing.columns[agent].to(value.device) for turn, value in zip(self.turns, values, strict=True)
        ]
        return [value[column].nanmean(dim=1) for column, value in zip(columns, values, strict=True)]

    def to_rows(self, values: Sequence[torch.Tensor], padding: float) -> torch.Tensor:
        """Values of samples, `(S, ...)` for each turn, in the order of the rows of all processes, `(W * R, ...)`."""
        by_turn = [value.split(turn.counts) for turn, value in zip(self.turns, values, strict=True)]
        rows = []
        for process in range(len(self.turns[0].counts)):
            own = torch.cat([parts[process] for parts in by_turn])
            rows += [own, own.new_full((self.num_rows - len(own), *own.shape[1:]), padding)]
        return torch.cat(rows)

    def local(self, values: torch.Tensor) -> torch.Tensor:
        """This process's part of a tensor over the rows of all processes."""
        return values[self.process_index * self.num_rows : (self.process_index + 1) * self.num_rows]

    def set_advantages(self, agent: int, advantages: Sequence[torch.Tensor]) -> None:
        """Replace an actor's advantages by those of its samples, `(S,)` for each turn."""
        inputs = self.inputs[agent]
        if inputs is not None:
            inputs["advantages"] = self.local(self.to_rows(advantages, padding=0.0))
