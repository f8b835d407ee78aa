# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""A table of what the actors were asked and answered."""

import json
import os
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from accelerate.utils import gather_object
from transformers.utils import is_rich_available

from .._compat import print_prompt_completions_sample
from ..agents.grpo_agent import trained_tokens
from ..functional.advantages import is_shared
from ..rollouts.batch import JointBatch
from .multi_agent_config import MultiAgentConfig


class CompletionsLog:
    """
    Keeps the latest batch and writes it to `output_dir/completions/completions_<step>.parquet`.

    The table has one row for each sample: `step`, `turn` (from 1), for each actor `<name>/prompt`, `<name>/completion`
    and, if it learns, `<name>/advantage`, and for each reward function `<name>/rewards/<function>` (or
    `rewards/<function>` where the actors share the rewards). With crossed joint responses a sample's reward is the
    mean over its own. Messages are JSON where an actor was also asked texts.

    Args:
        agent_names (sequence of `str`):
            Names of the actors.
        reward_names (sequence of `str`):
            Names of the reward functions.
    """

    def __init__(self, agent_names: Sequence[str], reward_names: Sequence[str]):
        self.agent_names = agent_names
        self.reward_names = reward_names
        self._rows: list[dict[str, Any]] = []

    def state(self) -> list[dict[str, Any]]:
        """The rows that wait to be written, for a checkpoint."""
        return self._rows

    def load(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def note(self, batch: JointBatch) -> None:
        """Keep a batch instead of the one before. Call it on every process."""
        per_func = [turn.rewards for turn in batch.turns]
        own_rewards = [
            batch.of_samples(index, [rewards[index] for rewards in per_func]) for index in range(len(self.agent_names))
        ]
        # Whether one number tells what every actor got
        shared = all(is_shared(torch.stack(actors).flatten(1)) for actors in zip(*own_rewards, strict=True))
        # One sync for each actor
        advantages = [None if inputs is None else _advantage_of_rows(inputs).tolist() for inputs in batch.inputs]
        own_rewards = [[values.tolist() for values in turns] for turns in own_rewards]
        rows: list[dict[str, Any]] = []
        for number, turn in enumerate(batch.turns):
            for sample in range(len(turn.branches)):
                row: dict[str, Any] = {"turn": turn.number}
                for index, name in enumerate(self.agent_names):
                    row[f"{name}/prompt"] = turn.prompts[index][sample]
                    row[f"{name}/completion"] = turn.completions[index][sample]
                    if advantages[index] is not None:
                        row[f"{name}/advantage"] = advantages[index][len(rows)]
                    for function, value in zip(
                        self.reward_names, own_rewards[index][number][turn.start + sample], strict=True
                    ):
                        row[f"rewards/{function}" if shared else f"{name}/rewards/{function}"] = value
                rows.append(row)
        self._rows = gather_object(rows)

    def write(self, args: MultiAgentConfig, step: int) -> pd.DataFrame | None:
        """
        Write the table, and print a sample of it if rich is installed.

        Args:
            args ([`MultiAgentConfig`]):
                `output_dir`, `num_completions_to_print` and `log_unique_prompts` are read.
            step (`int`):
                Optimizer step.

        Returns:
            [`~pandas.DataFrame`], *optional*: the table to show elsewhere; with `log_unique_prompts` one row for each
            prompt. `None` without rows.
        """
        if not self._rows:
            return None
        frame = pd.DataFrame(self._rows)
        frame.insert(0, "step", step)
        for name in self.agent_names:
            prompts = frame[f"{name}/prompt"]
            if prompts.map(type).nunique() > 1:  # a column has one type
                frame[f"{name}/prompt"] = prompts.map(
                    lambda prompt: prompt if isinstance(prompt, str) else json.dumps(prompt)
                )
        if is_rich_available():
            self._print(frame, args.num_completions_to_print, step)
        directory = os.path.join(args.output_dir, "completions")
        os.makedirs(directory, exist_ok=True)
        frame.to_parquet(os.path.join(directory, f"completions_{step:05d}.parquet"))
        if args.log_unique_prompts:
            frame = frame[~frame[f"{self.agent_names[0]}/prompt"].astype(str).duplicated()]
        return frame

    def _print(self, frame: pd.DataFrame, count: int | None, step: int) -> None:
        for name in self.agent_names:
            columns = {f: f"rewards/{f}" for f in self.reward_names}
            rewards = {
                f: frame[column if column in frame else f"{name}/{column}"].tolist() for f, column in columns.items()
            }
            advantage = f"{name}/advantage"
            print_prompt_completions_sample(
                frame[f"{name}/prompt"].astype(str).tolist(),
                frame[f"{name}/completion"].tolist(),
                rewards,
                frame[advantage].tolist() if advantage in frame else [0.0] * len(frame),
                step,
                count,
            )


def _advantage_of_rows(inputs: dict[str, Any]) -> torch.Tensor:
    """An actor's advantage of each row, `(R,)`; where each token has one of its own, the mean over those trained."""
    advantages = inputs["advantages"].float()
    if advantages.dim() == 1:
        return advantages
    tokens = trained_tokens(inputs)
    return advantages.masked_fill(~tokens, 0.0).sum(dim=1) / tokens.sum(dim=1).clamp(min=1)
