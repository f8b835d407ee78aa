# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""A run that is set up otherwise than its checkpoint is told what differs; what may change is not in its way."""

import re
import shutil
from dataclasses import fields

import pytest
import torch
from critic_teams import team_with_critics
from datasets import Dataset
from peft import LoraConfig
from tiny import dataset, gpt2, llama, lm, tok, weights_hash, word_reward
from transformers import TrainerCallback

from trl_multiagent import (
    CheckpointError,
    IACConfig,
    MAACConfig,
    MADPOIterConfig,
    MAGRPOConfig,
    MARLHFIterConfig,
)
from trl_multiagent.checkpoints import settings
from trl_multiagent.checkpoints.settings import MAY_CHANGE, check_settings, differences


def other_reward(completions1, completions2):
    return word_reward(completions1, completions2)


def other_formatter(row):
    return row["prompt"]


def adapter(**changed):
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changed})


def longer_vocabulary():
    tokenizer = tok()
    tokenizer.add_tokens(["new"])
    return tokenizer


def with_template():
    tokenizer = tok()
    tokenizer.chat_template = "{{ messages }}"
    return tokenizer


def sgd():
    models = [lm(0), llama(1)]
    return {"agents": models, "optimizers": (torch.optim.SGD([p for m in models for p in m.parameters()], 0.1), None)}


def build(directory, lora=False, kind="MAAC", kwargs=None, **options):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, **options}
    return team_with_critics(kind, directory, lora=lora, kwargs=kwargs, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of full models and one of adapters."""
    directories = {}
    for lora in (False, True):
        directories[lora] = tmp_path_factory.mktemp("adapters" if lora else "full")
        build(directories[lora], lora).train()
    return directories


def refused(trainer, directory) -> list[str]:
    """What is named as differing; nothing is loaded."""
    before = weights_hash(trainer.model)
    with pytest.raises(CheckpointError, match=r"set up otherwise \(saved -> now\)") as error:
        trainer.train(resume_from_checkpoint=directory / "checkpoint-1")
    assert weights_hash(trainer.model) == before and trainer.state.global_step == 0
    return re.findall(r"^  (\S+): (.*) -> (.*)$", str(error.value), re.M)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"learning_rate": 5e-3}, [("options.learning_rate", "0.01", "0.005")]),
        ({"critic_learning_rate": 1e-3}, [("options.critic_learning_rate", "0.01", "0.001")]),
        ({"temperature": 0.7}, [("options.temperature", "1.0", "0.7")]),
        ({"max_completion_length": 5}, [("options.max_completion_length", "6", "5")]),
        ({"discount": 0.9}, [("options.discount", "1.0", "0.9")]),
        ({"seed": 7}, [("options.seed", "42", "7")]),
        ({"beta": 0.1}, [("options.beta", "0.0", "0.1")]),
        ({"bf16": True}, [("backend.mixed_precision", "'no'", "'bf16'"), ("options.bf16", "False", "True")]),
        ({"agent_names": ["a", "b"]}, [("agent_names", "['agent_0', 'agent_1']", "['a', 'b']")]),
        (
            {"lr_scheduler_type": "cosine", "warmup_steps": 1},
            [("options.lr_scheduler_type", "'linear'", "'cosine'"), ("options.warmup_steps", "0", "1")],
        ),
    ],
    ids=str,
)
def test_each_option_that_differs_is_named(changed, named, saved, tmp_path):
    """T4"""
    assert refused(build(tmp_path, **changed), saved[False]) == named


@pytest.mark.parametrize(
    ("kwargs", "names"),
    [
        ({"reward_func": other_reward}, ["reward_func"]),
        ({"formatters": other_formatter}, ["formatters"]),
        ({"agents": [lm(0), gpt2(1)]}, ["agent_1.model"]),
        ({"agents": [llama(1), lm(0)]}, ["agent_0.model", "agent_1.model"]),
        ({"agents": [lm(0, hidden=32), llama(1)]}, r"agent_0\.config\.(hidden|intermediate)_size"),
        ({"critics": [lm(5)]}, ["critic.model"]),
        (
            {"model_config": {"critic_value_head_hidden_dim": 4}},
            r"(critic\.value_head\.\w+|critic\.trained_parameters)",
        ),
        ({"peft_config": adapter()}, r"agent_[01]\.(adapter.*|trained_parameters|frozen_weights)"),
        ({"tokenizer": with_template()}, r".*/tokenizer\.chat_template"),
        ({"train_dataset": dataset(5)}, ["train_dataset.rows", "train_dataset.sample"]),
        (
            {"train_dataset": dataset(4).add_column("more", [1, 2, 3, 4])},
            ["train_dataset.columns", "train_dataset.sample"],
        ),
        (
            {"train_dataset": Dataset.from_dict({"prompt": ["w1"] * 4, "gold": ["w1"] * 4})},
            ["train_dataset.sample"],
        ),
        (sgd(), ["optimizers"]),
    ],
    ids=lambda value: str(list(value)) if isinstance(value, dict) else "",
)
def test_each_thing_that_differs_is_named(kwargs, names, saved, tmp_path):
    """T4"""
    found = [name for name, _, _ in refused(build(tmp_path, kwargs=kwargs), saved[False])]
    if isinstance(names, str):
        assert found and all(re.fullmatch(names, name) for name in found), found
    else:
        assert found == names


@pytest.mark.parametrize(
    ("kwargs", "names"),
    [
        ({"peft_config": adapter(r=2)}, r"agent_[01]\.adapter\.default\.r"),
        ({"peft_config": adapter(lora_alpha=3)}, r"agent_[01]\.adapter\.default\.lora_alpha"),
        ({"agents": [lm(3), llama(1)]}, r"agent_0\.frozen_weights"),
        ({"critics": [llama(6)]}, r"critic\.frozen_weights"),
    ],
    ids=lambda value: str(list(value)) if isinstance(value, dict) else "",
)
def test_adapters_and_the_base_below_them_are_compared(kwargs, names, saved, tmp_path):
    """A base is not in the checkpoint: an adapter over another one would be nonsense."""
    kwargs = {"peft_config": adapter(), "critic_peft_config": adapter(), **kwargs}
    trainer = team_with_critics("MAAC", tmp_path, kwargs=kwargs, max_steps=2)
    found = [name for name, _, _ in refused(trainer, saved[True])]
    assert found and all(re.fullmatch(names, name) for name in found), found


@pytest.mark.parametrize(
    ("changed", "kwargs"),
    [
        ({"logging_steps": 7, "log_completions": True, "run_name": "another"}, {}),
        ({"save_steps": 5, "save_total_limit": 1, "eval_strategy": "steps", "eval_steps": 1}, {"eval_dataset": 2}),
        ({"dataloader_num_workers": 1, "influence_steps": 1}, {}),
        ({}, {"agents": [lm(8), llama(9)], "critics": [llama(5)]}),
        pytest.param({}, {"callbacks": [TrainerCallback()]}, id="another callback"),
    ],
    ids=str,
)
def test_what_does_not_decide_what_is_learned_may_change(changed, kwargs, saved, tmp_path):
    """T4: where models are trained in full, those that the trainer was built with are replaced."""
    if "eval_dataset" in kwargs:
        kwargs = {"eval_dataset": dataset(kwargs["eval_dataset"])}
    whole, resumed = build(tmp_path / "whole"), build(tmp_path / "resumed", kwargs=kwargs, **changed)
    whole.train()
    resumed.train(resume_from_checkpoint=saved[False] / "checkpoint-1")
    assert weights_hash(resumed.model) == weights_hash(whole.model)


def test_another_actor_that_learns_is_named(saved, tmp_path):
    found = [name for name, _, _ in refused(build(tmp_path, trainable_agents=[True, False]), saved[False])]
    assert "trainable_agents" in found and all(name.startswith(("trainable_agents", "agent_1.")) for name in found)


def test_a_reference_that_is_another_model_is_named(tmp_path):
    """With `beta` the models that the trainer is built with are the references, which are not in checkpoints."""
    build(tmp_path, beta=0.1).train()
    found = refused(build(tmp_path, beta=0.1, kwargs={"agents": [lm(7), llama(1)]}), tmp_path)
    assert [name for name, _, _ in found] == ["agent_0/reference"]


def test_a_checkpoint_may_be_moved(saved, tmp_path):
    shutil.copytree(saved[True] / "checkpoint-1", tmp_path / "elsewhere")
    trainer = build(tmp_path / "run", lora=True)
    trainer.train(resume_from_checkpoint=tmp_path / "elsewhere")
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("first_is_path", [False, True])
def test_a_model_may_be_given_by_path_or_loaded(first_is_path, tmp_path):
    for name, model in (("a", lm(0)), ("b", llama(1)), ("critic", llama(5))):
        model.save_pretrained(tmp_path / name)
        tok().save_pretrained(tmp_path / name)
    paths = {
        "agents": [str(tmp_path / "a"), str(tmp_path / "b")],
        "critics": [str(tmp_path / "critic")],
        "tokenizer": None,
    }
    objects = {"agents": [lm(0), llama(1)], "critics": [llama(5)]}
    first, second = (paths, objects) if first_is_path else (objects, paths)
    build(tmp_path / "run", kwargs=first, max_steps=1).train()
    trainer = build(tmp_path / "run", kwargs=second)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 2


def test_every_option_that_may_change_exists():
    """A name that upstream drops, or misspelt here, would be a hole; versions differ in a few."""
    configs = (MAGRPOConfig, IACConfig, MAACConfig, MADPOIterConfig, MARLHFIterConfig)
    known = [{field.name for field in fields(config)} for config in configs]
    unknown = MAY_CHANGE - set().union(*known)
    assert len(unknown) <= 12, sorted(unknown)
    assert all(names >= settings._TOLD_OTHERWISE for names in known)


def test_differences_are_named_by_dotted_paths():
    old = {"a": {"b": 1, "c": [1, 2]}, "d": {}, "e": float("inf")}
    new = {"a": {"b": 2, "c": [1, 2], "f": {"g": "x"}}, "d": {}, "e": float("inf")}
    assert differences(old, new) == ["a.b: 1 -> 2", "a.f.g: not there -> 'x'"]
    assert differences(old, old) == []
    check_settings("checkpoint-1", old, old)
