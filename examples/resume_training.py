# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
Train two actors in two parts (MAGRPO): two epochs, and from their last checkpoint two more, as one run and one curve.

    accelerate launch examples/resume_training.py
    accelerate launch examples/resume_training.py --agents my/model-a my/model-b --output_dir outputs/mine

The second actor shall write two to three times as much as the first. Stop it whenever you like, also with `kill -9`,
and start it again with the same line: it goes on from the last checkpoint that is whole. With W&B installed, all parts
are one W&B run (offline, unless WANDB_MODE says otherwise). `--help` lists all options.
"""

import copy
import importlib.util
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from example_model import MODEL_NAME
from example_parser import ExampleParser
from example_team import (
    EXAMPLE_DEFAULTS,
    RewardBar,
    lora,
    quiet_libraries,
    team_sources,
    use_all_cores,
    wandb_run_of,
)
from transformers import ProgressCallback

from trl_multiagent import MAGRPOConfig, MAGRPOTrainer, read_checkpoint_metadata


PROMPTS = [
    "Describe a city in the clouds:",
    "Invent a new holiday and explain it:",
    "Write a bedtime story for a dragon:",
    "Design a playground on Mars:",
]


@dataclass
class ResumeArguments:
    """
    What the example trains.

    Parameters:
        agents (list of `str`, *optional*):
            The actors: hub ids or local directories, one for each or one for both.
        lora_rank (`int`, *optional*, defaults to `16`):
            Rank of the actors' LoRA adapters; they keep the checkpoints small. 0 trains all weights.
        first_part_epochs (`int`, *optional*, defaults to `2`):
            Epochs of the first part. `num_train_epochs` counts both parts.
    """

    agents: list[str] | None = field(
        default=None,
        metadata={"help": f"The actors: hub ids or local directories. Default: {MODEL_NAME}, from the package index."},
    )
    lora_rank: int = field(
        default=16,
        metadata={"help": "Rank of the actors' LoRA adapters. 0: train all weights, in larger checkpoints."},
    )
    first_part_epochs: int = field(
        default=2, metadata={"help": "Epochs of the first part; --num_train_epochs counts both."}
    )


def length_ratio_reward(completions1: list[str], completions2: list[str]) -> list[float]:
    """1 where the second text is two to three times as long as the first (in characters), else less."""
    rewards = []
    for first, second in zip(completions1, completions2, strict=True):
        ratio = len(second) / max(len(first), 1)
        distance = 0.0 if 2 <= ratio <= 3 else min(abs(ratio - 2), abs(ratio - 3))
        rewards.append(math.exp(-distance))
    return rewards


def build_trainer(example: ResumeArguments, args: MAGRPOConfig, wandb_config: dict[str, Any] | None) -> MAGRPOTrainer:
    """The same trainer for every part: what must not differ is in one place."""
    trainer = MAGRPOTrainer(
        agents=team_sources(example.agents, ["first", "second"]),
        reward_func=length_ratio_reward,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        args=args,
        peft_config=lora(example.lora_rank or None),
        wandb_config=wandb_config,
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(RewardBar())
    return trainer


def newest_epoch(checkpoint_dir: Path) -> int:
    """Number of the last epoch that has a checkpoint; 0 without any."""
    return max((int(path.name.rsplit("-", 1)[1]) for path in checkpoint_dir.glob("checkpoint-*")), default=0)


def wandb_settings(output_dir: Path, checkpoint: Path | None) -> dict[str, Any] | None:
    """The W&B run to log to: that of the checkpoint, if there is one. None where W&B is not installed."""
    if importlib.util.find_spec("wandb") is None:
        return None
    os.environ.setdefault("WANDB_MODE", "offline")
    config = {"project": "trl-multiagent-examples", "name": "resume-demo", "dir": str(output_dir)}
    return {**config, **(wandb_run_of(checkpoint) or {})}


def print_curve(history: Sequence[dict[str, Any]], first_steps: int) -> None:
    """Reward by step, of all parts."""
    print("\n  step  env_step  epoch  reward  part")
    for row in history:
        if "reward" in row:
            part = "first" if row["step"] <= first_steps else "second"
            print(f"  {row['step']:4d}  {row['env_step']:8d}  {row['epoch']:5.2f}  {row['reward']:6.3f}  {part}")


def main() -> None:
    defaults = {
        **EXAMPLE_DEFAULTS,
        "num_train_epochs": 4,
        "max_steps": -1,
        "steps_per_generation": 1,
        "max_completion_length": 64,
        "learning_rate": 2e-4,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "output_dir": "outputs/resume_training",
    }
    parser = ExampleParser((ResumeArguments, MAGRPOConfig), __doc__.split("\n\n")[0].strip(), defaults)
    example, args = parser.parse_args_and_config()
    quiet_libraries()
    use_all_cores(args)
    total = int(args.num_train_epochs)
    if not 0 < example.first_part_epochs < total:
        raise ValueError(
            f"--first_part_epochs {example.first_part_epochs} and --num_train_epochs {total}: the first part must be "
            "at least one epoch, and shorter than both."
        )
    checkpoint_dir = Path(args.output_dir) / "checkpoints"
    trainer = None
    for part, epochs in (("first", example.first_part_epochs), ("second", total)):
        done = newest_epoch(checkpoint_dir)
        checkpoint = checkpoint_dir / f"checkpoint-{done}" if done else None
        if done >= epochs:
            continue  # an earlier start of this script did it
        own_args = copy.deepcopy(args)
        own_args.num_train_epochs = epochs
        trainer = build_trainer(example, own_args, wandb_settings(Path(args.output_dir), checkpoint))
        if trainer.is_world_process_zero():
            start = f"on from {checkpoint}" if checkpoint else "from the start"
            print(f"The {part} part, up to epoch {epochs}: {start}.", flush=True)
        trainer.train(
            # The newest that is whole, should the last save have been killed
            resume_from_checkpoint=checkpoint is not None,
            checkpoint_dir=checkpoint_dir,
            checkpoint_interval=1,
        )
    if trainer is None:
        print(f"All {total} epochs are done. Raise --num_train_epochs, or name another --output_dir.")
        return
    if trainer.is_world_process_zero():
        steps_in_epoch = trainer.state.global_step // total
        print_curve(trainer.state.log_history, example.first_part_epochs * steps_in_epoch)
        print(f"\nCheckpoints: {checkpoint_dir}")
        if trainer.args.report_to:
            print(f"W&B: one run, {read_checkpoint_metadata(checkpoint_dir / f'checkpoint-{total}')['wandb']}")


if __name__ == "__main__":
    main()
