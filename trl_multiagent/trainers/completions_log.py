# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""A table of what the actors were asked and answered."""

import os
from collections.abc import Sequence

import pandas as pd
from transformers.utils import is_rich_available

from .._compat import print_prompt_completions_sample
from ..agents.grpo_agent import GRPOAgent
from .multi_agent_config import MultiAgentConfig


def log_completions(agents: Sequence[GRPOAgent], args: MultiAgentConfig, step: int) -> None:
    """
    Write the latest joint samples to `output_dir/completions/completions_<step>.parquet`, print a sample if rich is
    installed, and hand the table to W&B and trackio if they are on.

    The table has one row for each joint sample: `step`, `agent_i/prompt`, `agent_i/completion`, `agent_i/advantage`
    and, for each reward function, `agent_i/<name>` (or `<name>` where the actors share the rewards).

    Args:
        agents (sequence of [`GRPOAgent`]):
            The actors.
        args ([`MultiAgentConfig`]):
            `output_dir`, `report_to`, `num_completions_to_print` and `log_unique_prompts` are read.
        step (`int`):
            Optimizer step.
    """
    tables = [agent.completions_table() for agent in agents]
    if not tables[0]["prompt"]:
        return
    shared = all(table["rewards"] == tables[0]["rewards"] for table in tables)
    columns = {"step": [step] * len(tables[0]["prompt"])}
    for index, table in enumerate(tables):
        columns |= {f"agent_{index}/{name}": table[name] for name in ("prompt", "completion", "advantage")}
        for name, values in table["rewards"].items():
            columns[name if shared else f"agent_{index}/{name}"] = values
        if is_rich_available():
            print_prompt_completions_sample(
                [str(prompt) for prompt in table["prompt"]],
                [str(completion) for completion in table["completion"]],
                table["rewards"],
                table["advantage"],
                step,
                args.num_completions_to_print,
            )
    frame = pd.DataFrame(columns)
    directory = os.path.join(args.output_dir, "completions")
    os.makedirs(directory, exist_ok=True)
    frame.to_parquet(os.path.join(directory, f"completions_{step:05d}.parquet"))
    if args.log_unique_prompts:
        frame = frame[~frame["agent_0/prompt"].astype(str).duplicated()]
    for backend in _table_backends(args):
        backend.log({"completions": backend.Table(dataframe=frame)})


def _table_backends(args: MultiAgentConfig) -> list:
    backends = []
    if "wandb" in args.report_to:
        import wandb

        if wandb.run is not None:
            backends.append(wandb)
    if "trackio" in args.report_to:
        import trackio

        backends.append(trackio)
    return backends
