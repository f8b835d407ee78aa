# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""A scored generation batch, between the rollout and the losses."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .._compat import shuffle_sequence_dict, split_tensor_dict
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
        critic_inputs (`dict`): inputs of the critics' losses, as `"critic/..."`, or `"critic_0/..."`, ...: tensors
            with first dimension R, and numbers.
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

    def from_rows(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of `to_rows`: values of the rows of all processes, `(W * R, ...)`, by turn, `(S, ...)`."""
        by_process = [
            own[: sum(counts)].split(list(counts))
            for own, counts in zip(
                values.split(self.num_rows), zip(*(turn.counts for turn in self.turns), strict=True), strict=True
            )
        ]
        return [torch.cat(parts) for parts in zip(*by_process, strict=True)]

    def local(self, values: torch.Tensor) -> torch.Tensor:
        """This process's part of a tensor over the rows of all processes."""
        return values[self.process_index * self.num_rows : (self.process_index + 1) * self.num_rows]

    def layout(self, num_splits: int, num_steps: int) -> dict[str, float]:
        """
        How the rows lie in the micro-batches of `num_steps` micro-steps, `num_splits` in each.

        Returns:
            `dict`: `num_splits`; `num_real`, the rows of this process that are no padding, and `most_real`, those of
            the process that has most; `row_scale` and `part_scale`, the rows and the micro-batches of all processes
            for each one that is not all padding.
        """
        real = samples_of_processes(self.turns)
        num_parts = num_splits * num_steps
        return {
            "num_splits": num_splits,
            "num_real": real[self.process_index],
            "most_real": max(real),
            "row_scale": len(real) * self.num_rows / sum(real),
            "part_scale": len(real) * num_parts / sum(min(count, num_parts) for count in real),
        }

    def set_advantages(self, agent: int, advantages: Sequence[torch.Tensor]) -> None:
        """Replace an actor's advantages by those of its samples, `(S,)` for each turn."""
        inputs = self.inputs[agent]
        if inputs is not None:
            inputs["advantages"] = self.local(self.to_rows(advantages, padding=0.0))


def samples_of_processes(turns: Sequence[Turn]) -> list[int]:
    """Samples of an actor on each process, in all turns."""
    return [sum(counts) for counts in zip(*(turn.counts for turn in turns), strict=True)]


def split_batch(batch: dict[str, Any], num_steps: int, shuffle: bool) -> list[list[dict[str, Any]]]:
    """
    A flat batch as micro-steps, each a list of equally many micro-batches of one size.

    Args:
        batch (`dict`):
            Tensors with first dimension R, and numbers: those of `JointBatch.layout` as `"batch/..."`.
        num_steps (`int`):
            Micro-steps.
        shuffle (`bool`):
            Whether rows come in random order. Without padding, it is that of TRL.

    Returns:
        list of lists of `dict`. Where there is padding, real rows are dealt out evenly, and `"batch/has_rows"` says
        whether the micro-batch has any on any process.
    """
    num_splits, num_real = int(batch["batch/num_splits"]), int(batch["batch/num_real"])
    num_parts = num_splits * num_steps
    num_rows = next(len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.dim())
    if num_real == num_rows:
        parts = split_tensor_dict(shuffle_sequence_dict(batch) if shuffle else batch, num_parts)
    else:
        order = torch.randperm(num_real) if shuffle else torch.arange(num_real)
        padding = list(range(num_real, num_rows))
        parts = [{}] * num_parts
        # First one micro-batch of each micro-step, then the next of each
        dealt = [step * num_splits + split for split in range(num_splits) for step in range(num_steps)]
        for position, part in enumerate(dealt):
            rows = order[position::num_parts].tolist()
            rows += [padding.pop() for _ in range(num_rows // num_parts - len(rows))]
            parts[part] = {
                name: value[rows] if isinstance(value, torch.Tensor) and value.dim() else value
                for name, value in batch.items()
            }
            parts[part]["batch/has_rows"] = position < int(batch["batch/most_real"])
    return [parts[step * num_splits : (step + 1) * num_splits] for step in range(num_steps)]
