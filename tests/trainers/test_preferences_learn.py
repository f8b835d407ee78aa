# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Teams learn a task from pairs: its reward rises on prompts that they never saw, though it never trained them."""

import random

import pytest
from datasets import Dataset
from tiny import even_lm, preference_args, tok

from trl_multiagent import (
    MADPOConfig,
    MADPOIterConfig,
    MADPOIterTrainer,
    MADPOTrainer,
    MARLHFConfig,
    MARLHFIterConfig,
    MARLHFIterTrainer,
    MARLHFTrainer,
)
from trl_multiagent.trainers.marlhf_config import RL_CONFIGS
from trl_multiagent.trainers.preference_config import IterativePreferenceConfig


WORDS = 12  # w0 to w11
WANTED = ("w1", "w3", "w5", "w7", "w9", "w11")
TRAINERS = {
    MADPOConfig: MADPOTrainer,
    MADPOIterConfig: MADPOIterTrainer,
    MARLHFConfig: MARLHFTrainer,
    MARLHFIterConfig: MARLHFIterTrainer,
}
# Each run answers 32 tasks, and learns from about 250 pairs
PAIRS = {"preference_num_candidates": 8, "preference_pairs_per_sample": 8, "max_completion_length": 4}
DPO = {**PAIRS, "per_device_train_batch_size": 8, "num_train_epochs": 2, "learning_rate": 1e-2}
RL = {
    **PAIRS,
    "reward_learning_rate": 1e-2,
    "reward_num_train_epochs": 2,
    "num_generations": 4,
    "per_device_train_batch_size": 32,
    "num_train_epochs": 4,
    "learning_rate": 2e-2,
    "influence_steps": 0,
}
CASES = {
    "MADPO": (MADPOConfig, DPO),
    "MADPO, without a reference": (MADPOConfig, {**DPO, "reference_free": True}),
    "MADPO, iterative": (MADPOIterConfig, {**DPO, "num_train_epochs": 1, "num_iterations": 2}),
    **{f"MARLHF, {algorithm}": (MARLHFConfig, {**RL, "rl_algorithm": algorithm}) for algorithm in RL_CONFIGS},
    "MARLHF, iterative": (MARLHFIterConfig, {**RL, "num_train_epochs": 2, "num_iterations": 2}),
}


def prompts(seed: int, rows: int = 32) -> Dataset:
    draw = random.Random(seed)
    words = [f"w{number}" for number in range(WORDS)]
    return Dataset.from_dict({"prompt": [" ".join(draw.choices(words, k=4)) for _ in range(rows)]})


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("reward source")
    even_lm(5, 3 + WORDS).save_pretrained(directory)
    tok(3 + WORDS).save_pretrained(directory)
    return str(directory)


class Share:
    """The share of the wanted words among those of both actors, which counts what it scored."""

    __name__ = "share"

    def __init__(self):
        self.scored = 0

    def __call__(self, first, second):
        self.scored += len(first)
        said = [f"{a} {b}".split() for a, b in zip(first, second, strict=True)]
        return [sum(word in WANTED for word in words) / max(len(words), 1) for words in said]


@pytest.mark.parametrize("case", CASES)
def test_the_reward_of_held_out_prompts_rises(case, source, tmp_path):
    config_class, options = CASES[case]
    if config_class in (MARLHFConfig, MARLHFIterConfig):
        options = {**options, "reward_model_name": source}
        if options.get("rl_algorithm") in ("maac", "iac"):
            options |= {"critic_model_name": source}
    reward = Share()
    trainer = TRAINERS[config_class](
        agents=[even_lm(0, 3 + WORDS), even_lm(1, 3 + WORDS)],
        tokenizer=tok(3 + WORDS),
        reward_func=reward,
        train_dataset=prompts(0),
        eval_dataset=prompts(1),
        args=preference_args(config_class, tmp_path, num_generations_eval=8, per_device_eval_batch_size=64, **options),
    )
    before, reward.scored = trainer.evaluate()["eval_reward"], 0
    trainer.train()
    iterative = issubclass(config_class, IterativePreferenceConfig)  # two iterations, and a comparator answers too
    assert reward.scored == 32 * 8 * (4 if iterative else 1)
    assert before < 0.5 and trainer.evaluate()["eval_reward"] > 0.8
