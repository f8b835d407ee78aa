# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""What a run keeps does not grow with its steps."""

import gc

import torch
from tiny import dataset, gpt2, lm, team_args, tok, word_reward
from transformers import TrainerCallback

from trl_multiagent import MAACConfig, MAACTrainer


class CountTensors(TrainerCallback):
    """Number of live tensors after each step."""

    def __init__(self):
        self.counts = []

    def on_step_end(self, args, state, control, **kwargs):
        gc.collect()
        self.counts.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))


def test_the_number_of_live_tensors_is_the_same_at_step_10_and_at_step_50(tmp_path):
    """B48"""
    counter = CountTensors()
    args = team_args(MAACConfig, tmp_path, max_steps=50, log_completions=True, logging_steps=5, eval_strategy="no")
    trainer = MAACTrainer(
        agents=[lm(0), lm(1)],
        tokenizer=tok(),
        critic_model=gpt2(2),
        critic_tokenizer=tok(),
        reward_func=word_reward,
        train_dataset=dataset(),
        args=args,
        callbacks=[counter],
    )
    trainer.train()
    assert len(counter.counts) == 50
    assert counter.counts[49] == counter.counts[9]
