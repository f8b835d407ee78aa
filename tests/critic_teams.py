# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Teams of two actors with value heads in every place where they can be."""

import torch
from known_values import heads
from peft import LoraConfig
from tiny import dataset, llama, lm, team_args, tok, word_reward

from trl_multiagent import IACConfig, IACTrainer, MAACConfig, MAACTrainer


# Where each head is on disk
PLACES = {
    "MAAC": ["critic"],
    "IAC separate": ["agent_0/critic", "agent_1/critic"],
    "IAC shared": ["agent_0", "agent_1"],
}


def team_with_critics(kind, output_dir, lora=False, kwargs=None, **options):
    """
    A trainer of two actors of different architectures; options of the config by name, arguments of the trainer in
    `kwargs`. With `lora` every entity gets an adapter.
    """
    kwargs = {"agents": [lm(0), llama(1)], "tokenizer": tok(), "train_dataset": dataset(4), **(kwargs or {})}
    if lora:
        kwargs["peft_config"] = adapter()
    if kind == "IAC shared":
        options["use_separate_critic"] = False
    else:
        kwargs.setdefault("critics", [llama(5), lm(6)][: len(PLACES[kind])])
        kwargs |= {"critic_peft_config": adapter()} if lora else {}
    config_class, trainer_class = (MAACConfig, MAACTrainer) if kind == "MAAC" else (IACConfig, IACTrainer)
    options = {"critic_learning_rate": 1e-2, "value_normalization": True, "influence_steps": 0, **options}
    args = team_args(config_class, output_dir, **options)
    return trainer_class(args=args, **{"reward_func": word_reward, **kwargs})


def adapter():
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def head_states(trainer):
    """A copy of what each head is, with its moments."""
    return [{name: tensor.clone() for name, tensor in head.state_dict().items()} for head in heads(trainer)]


def is_same_head(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
