# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Critics learn what rewards depend on: the logged explained variance rises to nearly 1."""

import random
import statistics

import pytest
from datasets import Dataset
from tiny import even_lm, logged, team_args, tok

from trl_multiagent import IACConfig, IACTrainer, MAACConfig, MAACTrainer


WORDS = 9  # w0 to w8
ODD = ("w1", "w3", "w5", "w7")


def prompts() -> Dataset:
    """Four words, in half of the rows w0 among them."""
    draw = random.Random(0)
    rows = [draw.choices([f"w{number}" for number in range(1, WORDS)], k=4) for _ in range(64)]
    for words in rows[::2]:
        words[draw.randrange(4)] = "w0"
    return Dataset.from_dict({"prompt": [" ".join(words) for words in rows]})


def of_the_prompt(first, second, batch_items):
    """One where w0 was said in the prompt."""
    return [float("w0" in row["prompt"]) for row in batch_items]


def of_prompt_and_own_response(first, second, batch_items):
    """For each actor, one more where it answers with an odd word."""
    asked = of_the_prompt(first, second, batch_items)
    return [[r + (text in ODD) for r, text in zip(asked, texts, strict=True)] for texts in (first, second)]


def of_prompt_and_second_response(first, second, batch_items):
    """The same for a team, in which only the second actor's word counts."""
    return of_prompt_and_own_response(first, second, batch_items)[1]


SHARED = {
    "use_separate_critic": False,
    "value_head_hidden_dim": 32,
    "learning_rate": 2e-2,  # the backbone learns with the actor
    "advantage_normalization": False,  # so that a right value leaves the actor nothing to learn
}
TOKENS = {
    "advantage_level": "token",
    "max_completion_length": 3,
    "generation_kwargs": {"suppress_tokens": [3]},  # w0 is never said, so that it is known from the prompt alone
}
CASES = {
    "MAAC, V": (MAACTrainer, {}, of_the_prompt),
    "MAAC, Q": (MAACTrainer, {"critic_type": "q"}, of_prompt_and_second_response),
    "IAC, separate, V": (IACTrainer, {}, of_the_prompt),
    "IAC, separate, Q": (IACTrainer, {"critic_type": "q"}, of_prompt_and_own_response),
    "IAC, separate, values of tokens": (IACTrainer, TOKENS, of_the_prompt),
    "IAC, shared, V": (IACTrainer, SHARED, of_the_prompt),
    "IAC, shared, Q": (IACTrainer, {**SHARED, "critic_type": "q"}, of_prompt_and_own_response),
    "IAC, shared, values of tokens": (IACTrainer, {**SHARED, **TOKENS}, of_the_prompt),
}


@pytest.mark.parametrize("case", CASES)
def test_a_critic_comes_to_explain_the_rewards(case, tmp_path):
    trainer_class, options, reward_func = CASES[case]
    options = {
        "num_generations": 1,
        "per_device_train_batch_size": 32,
        "max_completion_length": 1,
        "max_steps": 50 if options.get("critic_type", "v") == "v" else 80,
        "learning_rate": 0.0,  # what is said stays as it is
        "critic_learning_rate": 2e-2,
        "logging_steps": 10,
        "influence_steps": 0,
        **options,
    }
    critics = {"critic_model": even_lm(5, 3 + WORDS)} if options.get("use_separate_critic", True) else {}
    trainer = trainer_class(
        agents=[even_lm(0, 3 + WORDS), even_lm(1, 3 + WORDS)],
        tokenizer=tok(3 + WORDS),
        reward_func=reward_func,
        train_dataset=prompts(),
        args=team_args({MAACTrainer: MAACConfig, IACTrainer: IACConfig}[trainer_class], tmp_path, **options),
        **critics,
    )
    trainer.train()
    for name in ["critic"] if trainer_class is MAACTrainer else ["agent_0/critic", "agent_1/critic"]:
        explained = logged(trainer, f"{name}/explained_variance")
        assert explained[0] < 0.7
        assert statistics.mean(explained[-2:]) > 0.9
