# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
Single-turn joint rollouts and their scores.

N actors, B joint samples of this process, G joint samples for each prompt, F reward functions. Joint samples of one
prompt are neighbours; a group may span processes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from .._compat import is_conversational
from ..rewards import JointReward


Prompt = str | list[dict[str, Any]]
Formatter = Callable[[dict[str, Any]], Prompt]


class Actor(Protocol):
    """What a rollout needs of an actor."""

    def sample(self, prompts: list[Prompt]) -> list[str]: ...


@dataclass
class JointRollout:
    """
    Joint samples of this process.

    Attributes:
        rows (list of `dict`, length B): the dataset row of each joint sample.
        prompts (`N x B`): what each actor was asked.
        completions (`N x B`): what each actor answered, as text.
    """

    rows: list[dict[str, Any]]
    prompts: list[list[Prompt]]
    completions: list[list[str]]


def prompt_column(row: dict[str, Any]) -> Prompt:
    """The default formatter: every actor gets the row's `prompt`."""
    return row["prompt"]


def prompt_text(prompt: Prompt) -> str:
    """A prompt as plain text: messages become lines `role: content`, without a template."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def resolve_formatters(formatters: Formatter | Sequence[Formatter] | None, num_agents: int) -> list[Formatter]:
    """
    One formatter for each actor, from one for all, a list in actor order, or none (the column `prompt`).

    Raises:
        ValueError: the list has the wrong length.
        TypeError: an entry is not callable.
    """
    if formatters is None:
        formatters = prompt_column
    if callable(formatters):
        return [formatters] * num_agents
    formatters = list(formatters)
    if len(formatters) != num_agents:
        raise ValueError(f"`formatters` has {len(formatters)} entries, expected {num_agents}, one for each actor.")
    for index, formatter in enumerate(formatters):
        if not callable(formatter):
            raise TypeError(f"formatters[{index}] must map a dataset row to a prompt, got {type(formatter).__name__}.")
    return formatters


def check_formatters(row: dict[str, Any], formatters: Sequence[Formatter], tokenizers: Sequence) -> None:
    """
    Try every actor's formatter and chat template on one row, so that a misfit is found before training.

    Raises:
        ValueError: the row has no `prompt`, a prompt is neither text nor messages, or an actor that gets messages has
            no chat template.
    """
    for index, (formatter, tokenizer) in enumerate(zip(formatters, tokenizers, strict=True)):
        if formatter is prompt_column and "prompt" not in row:
            raise ValueError(
                f"agent_{index} gets the column 'prompt', but the dataset has only the columns {sorted(row)}. Rename "
                f"the column, or pass `formatters=`, which map a row to each actor's prompt."
            )
        prompt = _format(index, formatter, row)
        if not isinstance(prompt, str) and not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"agent_{index} gets a conversational prompt (a list of messages), but its tokenizer has no chat "
                f"template. Set `tokenizer.chat_template`, use an instruction-tuned model, or give text as prompt."
            )


def sample_joint(
    actors: Sequence[Actor],
    rows: list[dict[str, Any]],
    formatters: Sequence[Formatter],
    num_generations: int,
    first_sample: int = 0,
) -> JointRollout:
    """
    Let every actor answer every row.

    Args:
        actors (sequence, length N):
            The actors; they sample one after the other, in actor order.
        rows (list of `dict`, length B):
            Dataset rows, each repeated for its group.
        formatters (sequence, length N):
            Row to prompt, for each actor. Called once for each group, so that a group shares its prompt.
        num_generations (`int`):
            Group size G.
        first_sample (`int`, *optional*, defaults to 0):
            Number of this process's first joint sample among those of all processes: where groups begin.
    """
    groups = [(first_sample + sample) // num_generations for sample in range(len(rows))]
    prompts = [_prompts(index, formatter, rows, groups) for index, formatter in enumerate(formatters)]
    completions = [actor.sample(list(asked)) for actor, asked in zip(actors, prompts, strict=True)]
    return JointRollout(rows, prompts, completions)


def _prompts(index: int, formatter: Formatter, rows: list[dict[str, Any]], groups: list[int]) -> list[Prompt]:
    prompts: list[Prompt] = []
    for sample, row in enumerate(rows):
        same_group = sample > 0 and groups[sample] == groups[sample - 1]
        prompts.append(prompts[-1] if same_group else _format(index, formatter, row))
    if len({isinstance(prompt, str) for prompt in prompts}) > 1:
        raise ValueError(
            f"agent_{index} got both texts and message lists as prompts in one batch. Its formatter must return the "
            f"same kind for every row."
        )
    return prompts


def _format(index: int, formatter: Formatter, row: dict[str, Any]) -> Prompt:
    prompt = formatter(dict(row))
    is_messages = isinstance(prompt, list) and prompt and is_conversational({"prompt": prompt})
    if not isinstance(prompt, str) and not is_messages:
        raise ValueError(
            f"agent_{index}: the prompt is a {type(prompt).__name__} ({str(prompt)[:80]!r}), expected a text or a "
            f"list of messages with 'role' and 'content'."
        )
    return prompt


def score_joint(
    rollout: JointRollout,
    reward: JointReward,
    num_generations: int,
    accelerator: Accelerator,
    num_samples: int | None = None,
) -> torch.Tensor:
    """
    Rewards of the joint samples of all processes. A reward function always sees a whole group: where groups span
    processes, the joint samples are gathered and the groups are shared out.

    Args:
        rollout ([`JointRollout`]):
            This process's joint samples; every process has the same number B of them.
        reward ([`JointReward`]):
            The reward functions.
        num_generations (`int`):
            Group size G.
        accelerator ([`~accelerate.Accelerator`]):
            The processes.
        num_samples (`int`, *optional*):
            How many of the joint samples of all processes are to be scored; the rest only fills the last batch of an
            evaluation.

    Returns:
        `torch.Tensor` of shape `(N, B over all processes, F)`, float32, on the accelerator's device.
    """
    world, rank, local = accelerator.num_processes, accelerator.process_index, len(rollout.rows)
    total = local * world
    spans = world > 1 and local % num_generations > 0
    rows, completions = rollout.rows, rollout.completions
    if spans:
        rows = gather_object(rows)
        completions = [gather_object(list(texts)) for texts in completions]
    first = 0 if spans else rank * local
    wanted = total if num_samples is None else num_samples
    rewards = torch.full((len(completions), len(rows), len(reward.funcs)), torch.nan)
    kept = [
        sample
        for sample in range(len(rows))
        if first + sample < wanted and (not spans or (sample // num_generations) % world == rank)
    ]
    if kept:
        texts = [[actor[sample] for sample in kept] for actor in completions]
        rewards[:, kept] = reward(texts, [rows[sample] for sample in kept], num_generations)
    rewards = rewards.to(accelerator.device)
    if world == 1:
        return rewards
    gathered = accelerator.gather(rewards.transpose(0, 1).contiguous())  # (world * rows, N, F)
    if spans:
        by_rank = gathered.view(world, total, *gathered.shape[1:])
        scorer = (torch.arange(total, device=gathered.device) // num_generations) % world
        gathered = by_rank[scorer, torch.arange(total, device=gathered.device)]
    return gathered.transpose(0, 1).contiguous()  # (N, B over all processes, F)
