# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""What a run keeps does not grow with its steps."""

import gc

import pytest
import torch
from tiny import dataset, gpt2, lm, team_args, tok, word_reward
from transformers import TrainerCallback

from trl_multiagent import IACConfig, IACTrainer, MAACConfig, MAACTrainer


class CountTensors(TrainerCallback):
    """Number of live tensors after steps 10 and 50."""

    def __init__(self):
        self.counts = {}

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in (10, 50):
            gc.collect()
            self.counts[state.global_step] = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


TRAINERS = {
    "MAAC": (MAACTrainer, MAACConfig, {"critic_tokenizer": tok()}, {}),
    "IAC, separate": (IACTrainer, IACConfig, {}, {}),
    "IAC, shared": (IACTrainer, IACConfig, None, {"use_separate_critic": False}),
    "IAC, shared, with all": (
        IACTrainer,
        IACConfig,
        None,
        {
            "use_separate_critic": False,
            "advantage_level": "token",
            "value_normalization": True,
            "beta": 0.1,
            "kl_in_reward": True,
            "critic_warmup_steps": 5,
        },
    ),
}


@pytest.mark.parametrize(("trainer_class", "config_class", "kwargs", "options"), TRAINERS.values(), ids=TRAINERS)
def test_the_number_of_live_tensors_is_the_same_at_step_10_and_at_step_50(
    trainer_class, config_class, kwargs, options, tmp_path
):
    """B48"""
    counter = CountTensors()
    args = team_args(
        config_class, tmp_path, max_steps=50, log_completions=True, logging_steps=5, eval_strategy="no", **options
    )
    trainer = trainer_class(
        agents=[lm(0), lm(1)],
        tokenizer=tok(),
        reward_func=word_reward,
        train_dataset=dataset(),
        args=args,
        callbacks=[counter],
        **({} if kwargs is None else {"critic_model": gpt2(2), **kwargs}),
    )
    trainer.train()
    assert counter.counts[10] > 0
    assert counter.counts[50] == counter.counts[10]
