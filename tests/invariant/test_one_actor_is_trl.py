# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""A team of one actor is TRL's `GRPOTrainer`: equal weights and equal logged numbers, to the bit."""

import copy
import math

import pytest
from datasets import Dataset
from peft import LoraConfig
from tiny import CHAT_TEMPLATE, dataset, gpt2, lm, tok, weights_hash, word_reward
from trl import GRPOConfig, GRPOTrainer

from trl_multiagent import MAGRPOConfig, MAGRPOTrainer


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")

# What depends on the clock
TIMES = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
TEAM_WIDE = {
    "loss",
    "grad_norm",
    "learning_rate",
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "num_tokens",
    "rewards/word_reward/mean",
    "rewards/word_reward/std",
    "epoch",
    "step",
}
OF_THE_ACTOR = {
    "entropy",
    "clip_ratio/low_mean",
    "clip_ratio/low_min",
    "clip_ratio/high_mean",
    "clip_ratio/high_max",
    "clip_ratio/region_mean",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/clipped_ratio",
    "completions/mean_terminated_length",
    "completions/min_terminated_length",
    "completions/max_terminated_length",
}

CASES = {
    "plain": {},
    "KL": {"beta": 0.1},
    "two iterations": {"num_iterations": 2},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "generation batch of several updates": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "all of these": {
        "beta": 0.1,
        "num_iterations": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "per_device_train_batch_size": 2,
    },
    "loss type grpo": {"loss_type": "grpo", "gradient_accumulation_steps": 2},
    "loss type dr_grpo": {"loss_type": "dr_grpo", "num_iterations": 2},
    "sequence level, scaled by the batch": {"importance_sampling_level": "sequence", "scale_rewards": "batch"},
    "bf16 autocast": {"bf16": True, "beta": 0.1, "num_iterations": 2},
    "without checkpointing": {"gradient_checkpointing": False},
    "LoRA": {"peft_config": LORA},
    "LoRA, KL, iterations, accumulation": {
        "peft_config": LORA,
        "beta": 0.1,
        "num_iterations": 2,
        "gradient_accumulation_steps": 2,
    },
    "LoRA, KL, without checkpointing": {"peft_config": LORA, "beta": 0.1, "gradient_checkpointing": False},
}


def source(tmp_path, build=lm):
    """A model with a name, since `GRPOTrainer` loads its reference by name."""
    build(0).save_pretrained(tmp_path / "source")
    return type(build(0)).from_pretrained(tmp_path / "source")


def options(tmp_path, **changed):
    return {
        "output_dir": str(tmp_path / "run"),
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "num_train_epochs": 2,  # shuffled: each has an order of its own
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "seed": 3,
        "disable_dropout": True,
        **changed,
    }


def train_both(tmp_path, monkeypatch, build=lm, tokenizer=None, data=None, reward=word_reward, **changed):
    """Train the stock trainer and the team of one on the same; returns the trainers after training."""
    monkeypatch.setattr(GRPOTrainer, "_send_telemetry", lambda self: None)
    peft_config = changed.pop("peft_config", None)
    # A multiple of every batch here: `GRPOTrainer` drops the prompts that do not fill one
    shared = {"train_dataset": data or dataset(8)}

    def stock_reward(completions, **kwargs):
        return reward([text if isinstance(text, str) else text[-1]["content"] for text in completions])

    stock_reward.__name__ = reward.__name__
    stock = GRPOTrainer(
        model=source(tmp_path, build),
        reward_funcs=stock_reward,
        args=GRPOConfig(**options(tmp_path, **changed)),
        processing_class=tokenizer or tok(),
        peft_config=copy.deepcopy(peft_config),
        **shared,
    )
    stock.train()
    team = MAGRPOTrainer(
        agents=[source(tmp_path, build)],
        reward_func=reward,
        args=MAGRPOConfig(**options(tmp_path, **changed)),
        tokenizer=tokenizer or tok(),
        peft_config=copy.deepcopy(peft_config),
        **shared,
    )
    team.train()
    return stock, team


def assert_equal_runs(stock, team):
    assert weights_hash(team.agents[0]) == weights_hash(stock.model)
    assert len(team.state.log_history) == len(stock.state.log_history) == stock.state.max_steps + 1
    for theirs, ours in zip(stock.state.log_history, team.state.log_history, strict=True):
        for name, value in theirs.items():
            if name in TIMES or name == "total_flos":
                continue
            own = name if name in ours else f"agent_0/{name}"
            assert own in ours, f"step {theirs['step']}: {name} is not logged"
            equal = ours[own] == value or (ours[own] is None and math.isnan(value))
            assert equal, f"step {theirs['step']}: {own} is {ours[own]!r}, in TRL {value!r}"


def assert_informative(stock, team, case):
    """The comparison is worth something: the run learned, and logged all that it is said to log."""
    steps = team.state.log_history[:-1]
    logged = set().union(*steps)
    assert logged >= TEAM_WIDE
    actor = OF_THE_ACTOR | ({"kl"} if case.get("beta") else set())
    assert {f"agent_0/{name}" for name in actor} <= logged
    assert any(step.get("reward_std", 0) > 0.5 for step in steps)
    assert all(step["grad_norm"] > 0 for step in steps)
    assert len({step["learning_rate"] for step in steps}) == len(steps)
    if case.get("beta"):
        assert steps[-1]["agent_0/kl"] > 0
    for name, value in case.items():
        if name != "peft_config":
            assert getattr(stock.args, name) == getattr(team.args, name) == value


@pytest.mark.parametrize("case", CASES)
def test_equal_weights_and_logs(case, tmp_path, monkeypatch):
    stock, team = train_both(tmp_path, monkeypatch, **CASES[case])
    assert_informative(stock, team, CASES[case])
    assert_equal_runs(stock, team)


def test_checkpointing_is_on_by_default(tmp_path):
    assert GRPOConfig(**options(tmp_path)).gradient_checkpointing
    assert MAGRPOConfig(**options(tmp_path)).gradient_checkpointing


def test_equal_with_learned_positions_and_tied_embeddings(tmp_path, monkeypatch):
    stock, team = train_both(tmp_path, monkeypatch, build=gpt2, beta=0.1, num_iterations=2)
    assert_equal_runs(stock, team)


def test_equal_with_a_conversation(tmp_path, monkeypatch):
    rows = [[{"role": "user", "content": f"w{i} w{i + 2}"}] for i in range(8)]
    stock, team = train_both(
        tmp_path,
        monkeypatch,
        tokenizer=tok(chat_template=CHAT_TEMPLATE),
        data=Dataset.from_dict({"prompt": rows}),
        gradient_accumulation_steps=2,
    )
    assert_equal_runs(stock, team)


def test_equal_when_some_rewards_are_missing(tmp_path, monkeypatch):
    def gaps(completions):
        values = word_reward(completions)
        return [None if int(value) % 4 == 1 else value for value in values]

    stock, team = train_both(tmp_path, monkeypatch, reward=gaps)
    assert_equal_runs(stock, team)


def test_equal_when_a_dataset_has_one_batch(tmp_path, monkeypatch):
    stock, team = train_both(
        tmp_path, monkeypatch, data=dataset(2), per_device_train_batch_size=8, num_train_epochs=3, num_iterations=3
    )
    assert stock.state.max_steps == 9
    assert_equal_runs(stock, team)


def test_equal_with_an_adapter_under_autocast_once_trl_samples_under_it(tmp_path, monkeypatch):
    """
    With `bf16=True` TRL scores a model with an adapter in bf16, but samples from it in float32: `generate` of a PEFT
    model runs inside the wrapper that has the autocast. A team samples as it scores.
    """
    generate = GRPOTrainer._generate_single_turn

    def generate_under_autocast(self, *args, **kwargs):
        with self.accelerator.autocast():
            return generate(self, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", generate_under_autocast)
    stock, team = train_both(tmp_path, monkeypatch, bf16=True, beta=0.1, num_iterations=2, peft_config=LORA)
    assert_equal_runs(stock, team)
