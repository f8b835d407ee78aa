# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""A run that is resumed, from any of its steps, is the run that never stopped, to the bit: on one process."""

import hashlib
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from critic_teams import adapter, team_with_critics
from datasets import Dataset, IterableDataset
from peft import LoraConfig, get_peft_model
from tiny import dataset, llama, lm, logged, team_args, tok, word_reward
from transformers import EarlyStoppingCallback, TrainerCallback, get_constant_schedule_with_warmup

from trl_multiagent import (
    CheckpointError,
    MADPOConfig,
    MADPOIterConfig,
    MADPOIterTrainer,
    MADPOTrainer,
    MAGRPOConfig,
    MAGRPOTrainer,
    MAREINFORCEConfig,
    MAREINFORCETrainer,
    MAReMaxConfig,
    MAReMaxTrainer,
    MARLHFConfig,
    MARLHFIterConfig,
    MARLHFIterTrainer,
    MARLHFTrainer,
    MARLOOConfig,
    MARLOOTrainer,
)
from trl_multiagent.models.value_head import ValueHead


WITHOUT_CRITICS = {
    "MADPO": (MADPOConfig, MADPOTrainer),
    "MADPOIter": (MADPOIterConfig, MADPOIterTrainer),
    "MARLHF": (MARLHFConfig, MARLHFTrainer),
    "MARLHFIter": (MARLHFIterConfig, MARLHFIterTrainer),
    "MAGRPO": (MAGRPOConfig, MAGRPOTrainer),
    "MAREINFORCE": (MAREINFORCEConfig, MAREINFORCETrainer),
    "MARLOO": (MARLOOConfig, MARLOOTrainer),
    "MAReMax": (MAReMaxConfig, MAReMaxTrainer),
}
# A generation batch serves two micro-batches in two iterations: four updates
BUFFERED = {"num_iterations": 2, "steps_per_generation": 2, "per_device_train_batch_size": 2}


def with_random_words(row):
    """A formatter that draws from every generator: what it says is not in the dataset."""
    return f"{row['prompt']} w{random.randrange(20)} w{np.random.randint(20)} w{int(torch.randint(20, ()))}"


def wander(prompt, agent_completions, num_agents, **history):
    """An environment that draws."""
    return [f"{prompt} {said} w{random.randrange(20)}" for said in agent_completions]


# What a run is


class Watch(TrainerCallback):
    """Keeps what a team is after each step."""

    def __init__(self):
        self.at: dict[int, dict[str, Any]] = {}
        self.trainer = None

    def on_step_end(self, args, state, control, **kwargs):
        self.at[state.global_step] = what_it_is(self.trainer)


def what_it_is(trainer) -> dict[str, Any]:
    """Hashes of all that a team trainer's future comes from, as far as it is open to see."""
    optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    references = [agent.ref_model for agent in trainer.agent_trainers if agent.ref_model is not None]
    return {
        "weights": {name: bits(parameter) for name, parameter in trainer.model.named_parameters()},
        "moments of heads": [bits(m.get_extra_state()) for m in trainer.model.modules() if isinstance(m, ValueHead)],
        "references": [bits(parameter) for reference in references for parameter in reference.parameters()],
        "optimizer": {
            f"{names[parameter]} {key}": bits(value)
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
        },
        "groups": [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups],
        "scheduler": scheduler.state_dict(),
        "random numbers": [bits(random.getstate()), bits(np.random.get_state()), bits(torch.get_rng_state())],
        "counts": [trainer.state.global_step, trainer.env_step],
    }


def differing(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    return [name for name in first if first[name] != second[name]]


def bits(value) -> str:
    """A hash of every bit of a tensor, or of plain data."""
    if isinstance(value, torch.Tensor):
        value = (str(value.dtype), value.shape, value.detach().contiguous().flatten().view(torch.uint8).numpy())
    return hashlib.sha256(pickle.dumps(value)).hexdigest()[:12]


def rows(trainer) -> list[dict[str, Any]]:
    """What was logged, without times and the sums over one call of `train`."""
    return [
        {
            name: value
            for name, value in row.items()
            if not name.endswith(("step_time", "_runtime", "_per_second", "jit_compilation_time"))
        }
        for row in trainer.state.log_history
        if "train_runtime" not in row
    ]


def build(kind: str, directory: Path, lora: bool = False, kwargs: dict | None = None, **options):
    """A trainer that saves after each step, and its `Watch`."""
    watch = Watch()
    kwargs = {"train_dataset": dataset(6), "formatters": with_random_words, **(kwargs or {})}
    kwargs["callbacks"] = [*kwargs.get("callbacks", []), watch]
    options = {"save_strategy": "steps", "save_steps": 1, "influence_steps": 1, "max_completion_length": 4, **options}
    if kind.startswith("MARLHF"):
        source = directory.parent / "reward source"
        llama(9).save_pretrained(source)
        tok().save_pretrained(source)
        options = {**options, "reward_model_name": str(source), "preference_num_candidates": 4}
    if kind.startswith("MADPO"):
        sampling = {"num_generations": 1, "preference_num_candidates": 4, "preference_pairs_per_sample": 2}
        options = {**options, **sampling, "influence_steps": 0}
    if options.get("num_turns", 1) > 1:
        kwargs["external_transition"] = wander
        options["max_completion_length"] = 2
    if kind in WITHOUT_CRITICS:
        config_class, trainer_class = WITHOUT_CRITICS[kind]
        kwargs = {"agents": [lm(0), llama(1)], "tokenizer": tok(), "reward_func": word_reward, **kwargs}
        kwargs |= {"peft_config": adapter()} if lora else {}
        trainer = trainer_class(args=team_args(config_class, directory, **options), **kwargs)
    else:
        trainer = team_with_critics(kind, directory, lora=lora, kwargs=kwargs, **options)
    watch.trainer = trainer
    return trainer, watch


def checkpoint(directory: Path, step: int) -> str:
    return str(directory / f"checkpoint-{step}")


# Each way to set up a run


@dataclass
class Case:
    """A run: its trainer, its options, and what makes its arguments anew for each trainer."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    kwargs: Callable[[], dict[str, Any]] = dict
    steps: int = 5

    def build(self, directory: Path, **changed):
        options = {"max_steps": self.steps, **self.options, **changed}
        return build(self.kind, directory, self.lora, self.kwargs(), **options)


def evaluated() -> dict[str, Any]:
    return {"eval_dataset": dataset(3)}


def in_bfloat16() -> dict[str, Any]:
    return {"agents": [lm(0).to(torch.bfloat16), llama(1).to(torch.bfloat16)]}


def given_optimizer() -> dict[str, Any]:
    agents = [lm(0), llama(1)]
    parameters = [parameter for agent in agents for parameter in agent.parameters()]
    return {"agents": agents, "optimizers": (torch.optim.SGD(parameters, lr=1e-2, momentum=0.9), None)}


def given_optimizer_and_scheduler() -> dict[str, Any]:
    agents = [lm(0), llama(1)]
    parameters = [parameter for agent in reversed(agents) for parameter in agent.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True)
    return {"agents": agents, "optimizers": (optimizer, get_constant_schedule_with_warmup(optimizer, 4))}


def stream(data: Dataset | None = None) -> IterableDataset:
    return (dataset(6) if data is None else data).to_iterable_dataset()


def with_a_random_word(row):
    return {**row, "prompt": f"{row['prompt']} w{random.randrange(20)}"}


def transformed() -> Dataset:
    """Rows that are made when they are fetched, with random numbers."""
    data = dataset(6)
    data.set_transform(
        lambda batch: {
            **batch,
            "prompt": [f"{text} w{random.randrange(20)} w{np.random.randint(20)}" for text in batch["prompt"]],
        }
    )
    return data


# An epoch of three micro-steps: two optimizer steps with an accumulation of 2, of which the second has one micro-step
TWO_EPOCHS = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 1}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
MOVING_REFERENCES = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
ITERATIONS = {"max_steps": -1, "num_iterations": 3, "num_train_epochs": 2, "gradient_accumulation_steps": 2}
ADAPTIVE_ENTROPY = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 1.8}

CASES = {
    "MAGRPO": Case("MAGRPO", {**BUFFERED, **MOVING_REFERENCES, "logging_steps": 3}),
    "MAGRPO, LoRA": Case("MAGRPO", {**TWO_EPOCHS, "num_train_epochs": 3, "logging_strategy": "epoch"}, lora=True),
    "MAREINFORCE": Case("MAREINFORCE", {**BUFFERED, **EVALUATED, "num_turns": 2}, kwargs=evaluated),
    "MAREINFORCE, LoRA": Case(
        "MAREINFORCE",
        {**TWO_EPOCHS, "num_turns": 2, "rollout_mode": "chain", "log_completions": True, "logging_steps": 3},
        lora=True,
    ),
    "MARLOO": Case("MARLOO", {"gradient_accumulation_steps": 3, "max_steps": -1, "num_train_epochs": 3}),
    "MARLOO, LoRA": Case("MARLOO", {**BUFFERED, "bf16": True, "weight_decay": 0.1}, lora=True),
    "MAReMax": Case("MAReMax", {**BUFFERED, "remax_baseline": "greedy", "log_completions": True, "logging_steps": 3}),
    "MAReMax, LoRA": Case(
        "MAReMax", {**BUFFERED, "remax_baseline": "greedy", "num_turns": 2, "rollout_mode": "chain"}, lora=True
    ),
    # 12 pairs: the second accumulation of an epoch has one micro-batch
    "MADPO": Case(
        "MADPO",
        {**EVALUATED, "max_steps": -1, "num_train_epochs": 3, "gradient_accumulation_steps": 2, "weight_decay": 0.1},
        kwargs=evaluated,
    ),
    "MADPO, LoRA": Case(
        "MADPO", {"max_steps": -1, "num_train_epochs": 2, "precompute_ref_log_probs": True, "bf16": True}, lora=True
    ),
    "MADPOIter": Case(
        "MADPOIter",
        {
            **ITERATIONS,
            "comparator_policy": "history",
            "comparator_history_k": 1,
            "preference_replay_mode": "lambda_decay",
            "preference_replay_lambda": 0.6,
            "preference_replay_sample_size": 10,
        },
    ),
    "MADPOIter, LoRA": Case("MADPOIter", {**ITERATIONS, "pair_selection": "random", "logging_steps": 3}, lora=True),
    "MARLHF": Case("MARLHF", {**BUFFERED, "scale_rewards": "none", "logging_steps": 3}),
    "MARLHF by IAC, LoRA": Case("MARLHF", {"rl_algorithm": "iac", "use_separate_critic": False}, lora=True),
    "MARLHFIter": Case(
        "MARLHFIter",
        {
            "max_steps": -1,
            "num_iterations": 2,
            "num_train_epochs": 1,
            "preference_scoring_reward": "reward_model",
            "comparator_policy": "history",
            "comparator_history_k": 1,
        },
    ),
    "MAAC": Case("MAAC", {**BUFFERED, "critic_warmup_steps": 2, "weight_decay": 0.1}),
    "MAAC, LoRA": Case("MAAC", {**TWO_EPOCHS, "logging_steps": 4, "num_turns": 2}, lora=True),
    "MAAC q": Case(
        "MAAC", {**BUFFERED, **EVALUATED, "critic_type": "q", "individual_rewards": True}, kwargs=evaluated
    ),
    "MAAC q, LoRA": Case(
        "MAAC", {**BUFFERED, "critic_type": "q", "critic_value_head_hidden_dim": 4, "logging_steps": 3}, lora=True
    ),
    "IAC separate": Case("IAC separate", {**TWO_EPOCHS, "num_turns": 2, "logging_strategy": "epoch"}),
    "IAC separate, LoRA": Case("IAC separate", {**BUFFERED, "critic_warmup_steps": 3}, lora=True),
    "IAC shared": Case("IAC shared", {**BUFFERED, **MOVING_REFERENCES}),
    "IAC shared, LoRA": Case("IAC shared", {**TWO_EPOCHS, "critic_warmup_steps": 3}, lora=True),
    "IAC shared, token": Case("IAC shared", {**BUFFERED, "advantage_level": "token", "logging_steps": 3}),
    "IAC shared, token, LoRA": Case(
        "IAC shared", {**BUFFERED, "advantage_level": "token", "num_turns": 2, "beta": 0.1}, lora=True
    ),
    "running baselines": Case(
        "MAGRPO", {**BUFFERED, "advantage_groups": "role", "scale_rewards": "none", "role_baseline_decay": 0.5}
    ),
    "adaptive entropy": Case("MAGRPO", {**BUFFERED, **ADAPTIVE_ENTROPY}),
    "bfloat16": Case("MAGRPO", {**BUFFERED, "bf16": True}, kwargs=in_bfloat16),
    "stream": Case("MAGRPO", {"logging_steps": 2}, kwargs=lambda: {"train_dataset": stream()}, steps=8),
    "stream that draws": Case(
        "MAGRPO",
        {**BUFFERED, "gradient_accumulation_steps": 2},
        kwargs=lambda: {"train_dataset": stream().map(with_a_random_word)},
        steps=8,
    ),
    "transform": Case("MAGRPO", TWO_EPOCHS, kwargs=lambda: {"train_dataset": transformed()}),
    "transform, buffered": Case("MAGRPO", BUFFERED, kwargs=lambda: {"train_dataset": transformed()}),
    "stream, logged by pass": Case(
        "MAGRPO", {"logging_strategy": "epoch"}, kwargs=lambda: {"train_dataset": stream()}, steps=7
    ),
    "plateau": Case(
        "MAGRPO",
        {
            **EVALUATED,
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5},
            "metric_for_best_model": "reward",
            "eval_steps": 1,
        },
        kwargs=evaluated,
    ),
    "given optimizer": Case("MAGRPO", BUFFERED, kwargs=given_optimizer),
    "given optimizer and scheduler": Case("MAGRPO", BUFFERED, kwargs=given_optimizer_and_scheduler),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_resume_from_any_step_is_the_run_that_never_stopped(case, tmp_path):
    """
    B02, B03, B05, B06: after every later step the same weights, moments, optimizer state by name, schedule, random
    numbers and counts; the same log and tables. Here the resumed run saves nothing.
    """
    whole, whole_watch = case.build(tmp_path / "whole")
    whole.train()
    steps = whole.state.max_steps
    assert list(whole_watch.at) == list(range(1, steps + 1))
    hashes = [str(at["weights"]) for at in whole_watch.at.values()]
    assert len(set(hashes)) == steps  # something is learned in each
    end = what_it_is(whole)
    for start in range(1, steps):
        directory = tmp_path / f"from {start}"
        resumed, watch = case.build(directory, save_strategy="no")
        resumed.train(resume_from_checkpoint=checkpoint(tmp_path / "whole", start))
        assert list(watch.at) == list(range(start + 1, steps + 1))
        for step, at in watch.at.items():
            assert at == whole_watch.at[step], f"from {start}: {differing(at, whole_watch.at[step])} of step {step}"
        assert what_it_is(resumed) == end
        assert rows(resumed) == rows(whole)
        for name in ("epoch", "num_train_epochs", "total_flos", "best_metric"):
            assert getattr(resumed.state, name) == getattr(whole.state, name), name
        for table in (directory / "completions").glob("*"):
            expected = pd.read_parquet(tmp_path / "whole" / "completions" / table.name)
            pd.testing.assert_frame_equal(pd.read_parquet(table), expected, check_exact=True)
        tables = [path.name for path in (tmp_path / "whole" / "completions").glob("*")]
        later = [name for name in tables if int(name.removesuffix(".parquet")[-5:]) > start]
        assert sorted(path.name for path in (directory / "completions").glob("*")) == sorted(later)


@pytest.mark.parametrize(
    "name", ["MAGRPO", "MAREINFORCE", "MAAC", "IAC shared, LoRA", "transform", "stream that draws"]
)
def test_a_run_that_saves_is_one_that_does_not(name, tmp_path):
    case, runs = CASES[name], []
    for strategy in ("steps", "no"):
        trainer, watch = case.build(tmp_path / strategy, save_strategy=strategy)
        trainer.train()
        runs.append([watch.at, what_it_is(trainer), rows(trainer)])
    assert (tmp_path / "steps" / "checkpoint-1").exists() and not list(tmp_path.glob("no/checkpoint-*"))
    assert runs[0] == runs[1]


def test_a_run_goes_on_over_many_stops(tmp_path):
    """Each part does one step: what a resumed run saves is as good."""
    case = CASES["MAAC"]
    whole, whole_watch = case.build(tmp_path / "whole")
    whole.train()
    for step in range(1, case.steps + 1):
        part, watch = case.build(tmp_path / "parts")
        stop = StopAt(step)
        part.add_callback(stop)
        part.train(resume_from_checkpoint=step > 1)
        assert watch.at == {step: whole_watch.at[step]}
    assert rows(part) == rows(whole)


class StopAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.parametrize(
    "name", ["MAGRPO", "MAAC, LoRA", "IAC shared", "adaptive entropy", "transform", "given optimizer and scheduler"]
)
def test_a_trainer_that_has_trained_can_go_back_to_its_checkpoint(name, tmp_path):
    """Nothing of the first training is left in it, and it is not taken for one that is set up otherwise."""
    trainer, watch = CASES[name].build(tmp_path)
    trainer.train()
    first, first_rows, first_end = dict(watch.at), rows(trainer), what_it_is(trainer)
    watch.at.clear()
    trainer.train(resume_from_checkpoint=checkpoint(tmp_path, 2))
    assert watch.at == {step: at for step, at in first.items() if step > 2}
    assert rows(trainer) == first_rows and what_it_is(trainer) == first_end


@pytest.mark.parametrize(("name", "steps"), [("MAGRPO", 3), ("IAC shared, LoRA", None), ("stream", 5), ("stream", 6)])
def test_a_run_that_had_come_to_its_end_trains_no_more(name, steps, tmp_path):
    """It ends within an epoch or with one."""
    changed = {} if steps is None else {"max_steps": steps}
    whole, _ = CASES[name].build(tmp_path, **changed)
    whole.train()
    resumed, watch = CASES[name].build(tmp_path, **changed)
    resumed.train(resume_from_checkpoint=True)
    assert watch.at == {} and rows(resumed) == rows(whole)
    assert what_it_is(resumed)["weights"] == what_it_is(whole)["weights"]
    assert resumed.state.global_step == whole.state.global_step == resumed.state.max_steps


# Schedules


@pytest.mark.parametrize(("kind", "accumulation"), [("MAGRPO", 2), ("MAAC", 1), ("IAC shared", 2)])
def test_a_linear_schedule_ends_at_zero_and_so_it_does_after_a_resume(kind, accumulation, tmp_path):
    """B07: it is counted in optimizer steps; each part has its own rate."""
    options = {"max_steps": 5, "gradient_accumulation_steps": accumulation, "steps_per_generation": 1}
    options |= {} if kind == "MAGRPO" else {"critic_learning_rate": 4e-3}
    whole, whole_watch = build(kind, tmp_path / "whole", **options)
    whole.train()
    resumed, resumed_watch = build(kind, tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=checkpoint(tmp_path / "whole", 3))
    for trainer, watch in ((whole, whole_watch), (resumed, resumed_watch)):
        assert trainer.lr_scheduler.last_epoch == trainer.state.global_step == 5
        assert {group["lr"] for group in trainer.optimizer.param_groups} == {0.0}
        for step, at in watch.at.items():
            for group in at["groups"]:
                of_critic = "critic" in group["entity"] or "value_head" in group["entity"]
                assert group["lr"] == pytest.approx((4e-3 if of_critic else 1e-2) * (1 - step / 5), abs=1e-12)
        assert logged(trainer, "learning_rate") == pytest.approx([1e-2 * (1 - step / 5) for step in range(5)])


def test_an_epoch_may_end_within_an_accumulation(tmp_path):
    """B05: of 10 rows, one a micro-step, an epoch makes optimizer steps of 4, 4 and 2."""
    options = {
        "max_steps": -1,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 1,
    }
    kwargs = {"train_dataset": dataset(10)}
    whole, whole_watch = build("MAGRPO", tmp_path / "whole", kwargs=kwargs, **options)
    whole.train()
    assert whole.state.global_step == whole.state.max_steps == 6
    assert whole.state.epoch == 2 and whole.lr_scheduler.last_epoch == 6
    assert [at["counts"][1] for at in whole_watch.at.values()] == [8, 16, 20, 28, 36, 40]
    assert sorted(path.name for path in (tmp_path / "whole").glob("checkpoint-*"))[-1] == "checkpoint-6"
    for start in (2, 3, 5):
        resumed, watch = build("MAGRPO", tmp_path / "resumed", kwargs=kwargs, save_strategy="no", **options)
        resumed.train(resume_from_checkpoint=checkpoint(tmp_path / "whole", start))
        assert watch.at == {step: whole_watch.at[step] for step in range(start + 1, 7)}
        assert rows(resumed) == rows(whole)


@pytest.mark.parametrize("kind", ["MAGRPO", "IAC separate"])
def test_counters_of_tokens_and_responses_go_on(kind, tmp_path):
    """B06: two prompts of 6 tokens and two joint samples each, for two actors that always say 3 tokens; 4 steps."""
    options = {**BUFFERED, "max_steps": 8, "max_completion_length": 3, "generation_kwargs": {"min_new_tokens": 3}}
    whole, _ = build(kind, tmp_path / "whole", **options)
    whole.train()
    resumed, _ = build(kind, tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=checkpoint(tmp_path / "whole", 3))
    tokens_of_batch = 4 * 2 * (6 + 3)
    for trainer in (whole, resumed):
        assert logged(trainer, "env_step")[:8] == [4] * 4 + [8] * 4
        assert logged(trainer, "num_tokens") == [tokens_of_batch, 2 * tokens_of_batch]
        assert trainer.env_step == 8


# The length of a run


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ({"max_steps": 3}, {"max_steps": 5}),
        ({"max_steps": -1, "num_train_epochs": 1}, {"max_steps": -1, "num_train_epochs": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["MAGRPO", "IAC shared"])
def test_a_run_may_be_made_longer(kind, short, long, tmp_path):
    """T4: with a constant schedule it is the run that had the larger number from the start."""
    whole, whole_watch = build(kind, tmp_path / "whole", lr_scheduler_type="constant", **long)
    whole.train()
    first, _ = build(kind, tmp_path / "parts", lr_scheduler_type="constant", **short)
    first.train()
    second, watch = build(kind, tmp_path / "parts", lr_scheduler_type="constant", **long)
    second.train(resume_from_checkpoint=True)
    done = first.state.global_step
    assert watch.at == {step: at for step, at in whole_watch.at.items() if step > done} != {}
    assert what_it_is(second) == what_it_is(whole)
    assert second.state.global_step == whole.state.global_step == second.state.max_steps


@pytest.mark.parametrize("kind", ["MAGRPO", "IAC shared"])
def test_a_run_that_is_made_longer_goes_on_with_the_longer_schedule(kind, tmp_path):
    """A linear one: two steps of two, then two of four. The third has not the rate at which the first ended."""
    build(kind, tmp_path, max_steps=2)[0].train()
    second, watch = build(kind, tmp_path, max_steps=4)
    second.train(resume_from_checkpoint=True)
    assert logged(second, "learning_rate") == pytest.approx([1e-2, 5e-3, 5e-3, 2.5e-3])
    assert all(group["lr"] == pytest.approx(2.5e-3) for group in watch.at[3]["groups"])


@pytest.mark.parametrize(
    ("before", "now", "steps"),
    [
        ({"max_steps": 4}, {"max_steps": 3}, (3, 4)),
        ({"max_steps": -1, "num_train_epochs": 2}, {"max_steps": -1, "num_train_epochs": 1}, (3, 6)),
    ],
    ids=str,
)
def test_a_run_may_not_be_made_shorter(before, now, steps, tmp_path):
    """T4"""
    first, _ = build("MAGRPO", tmp_path, **before)
    first.train()
    second, watch = build("MAGRPO", tmp_path, **now)
    weights = [bits(parameter) for parameter in second.model.parameters()]
    message = f"This run has {steps[0]} steps in all, the one that wrote .*checkpoint-2.* had {steps[1]}.*not lowered"
    with pytest.raises(CheckpointError, match=message):
        second.train(resume_from_checkpoint=checkpoint(tmp_path, 2))
    assert [bits(parameter) for parameter in second.model.parameters()] == weights and watch.at == {}


def test_a_checkpoint_of_models_only_cannot_be_resumed(tmp_path):
    first, _ = build("MAGRPO", tmp_path, save_only_model=True)
    first.train()
    second, _ = build("MAGRPO", tmp_path, max_steps=2)
    with pytest.raises(CheckpointError, match="save_only_model=True: it holds models and no training state"):
        second.train(resume_from_checkpoint=checkpoint(tmp_path, 1))


def test_the_intervals_are_those_of_the_resumed_run(tmp_path):
    """T4"""
    build("MAGRPO", tmp_path, max_steps=8, save_steps=4)[0].train()
    options = {"save_steps": 1, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "max_steps": 8}
    second, _ = build("MAGRPO", tmp_path, kwargs={"eval_dataset": dataset(2)}, **options)
    second.train(resume_from_checkpoint=checkpoint(tmp_path, 4))
    found = sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*"))
    assert found == [4, 5, 6, 7, 8]
    later = [row for row in second.state.log_history if row["step"] > 4]
    assert [row["step"] for row in later if "loss" in row] == [6, 8]
    assert [row["step"] for row in later if "eval_reward" in row] == [6, 8]


class EndsEpochs(TrainerCallback):
    """Ends each epoch of three steps after its second."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step % 2 == 0


@pytest.mark.parametrize("start", [1, 2, 3, 4])
def test_an_epoch_that_a_callback_ended_stays_ended(start, tmp_path):
    def make(directory):
        return build("MAGRPO", tmp_path / directory, kwargs={"callbacks": [EndsEpochs()]}, max_steps=6)

    whole, whole_watch = make("whole")
    whole.train()
    resumed, watch = make("resumed")
    resumed.train(resume_from_checkpoint=checkpoint(tmp_path / "whole", start))
    assert watch.at == {step: at for step, at in whole_watch.at.items() if step > start}
    assert rows(resumed) == rows(whole)


def test_an_interrupted_trainer_goes_on_without_what_it_had_begun(tmp_path):
    """As in a notebook: an interruption within an accumulation, then `True` in the same trainer."""
    case = Case("MAAC", {"gradient_accumulation_steps": 3, "steps_per_generation": 1}, steps=4)
    whole, _ = case.build(tmp_path / "whole")
    whole.train()
    trainer, _ = case.build(tmp_path / "parts")
    interruption = InterruptsIn(2)
    trainer.add_callback(interruption)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(interruption)
    trainer.train(resume_from_checkpoint=True)
    assert rows(trainer) == rows(whole) and what_it_is(trainer) == what_it_is(whole)


class InterruptsIn(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_one_directory_for_both_kinds_of_checkpoints_is_an_error(tmp_path):
    trainer, watch = build("MAGRPO", tmp_path / "run")
    with pytest.raises(ValueError, match="checkpoint_dir=.* is the output_dir too"):
        trainer.train(checkpoint_dir=tmp_path / "elsewhere" / ".." / "run")
    assert watch.at == {}


@pytest.mark.parametrize("name", ["policy", "default"])
def test_a_given_adapter_may_have_a_name(name, tmp_path):
    def make(directory):
        agents = [get_peft_model(model, adapter(), adapter_name=name) for model in (lm(0), llama(1))]
        return build("MAGRPO", tmp_path / directory, kwargs={"agents": agents}, max_steps=3)

    whole, whole_watch = make("whole")
    whole.train()
    saved = tmp_path / "whole" / "checkpoint-1" / "agent_0"
    assert (saved / "adapter_model.safetensors").is_file() and not (saved / name).exists()
    resumed, watch = make("resumed")
    resumed.train(resume_from_checkpoint=checkpoint(tmp_path / "whole", 1))
    assert watch.at == {step: at for step, at in whole_watch.at.items() if step > 1}


@pytest.mark.parametrize(
    "changed",
    [
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"trainable_token_indices": [3, 4]},
        {"modules_to_save": ["embed_tokens"]},
    ],
    ids=str,
)
def test_adapters_may_be_on_embeddings(changed, tmp_path):
    def make(directory):
        config = LoraConfig(**{"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **changed})
        return build("MAGRPO", tmp_path / directory, kwargs={"peft_config": config}, max_steps=3)

    whole, whole_watch = make("whole")
    whole.train()
    resumed, watch = make("resumed")
    resumed.train(resume_from_checkpoint=checkpoint(tmp_path / "whole", 1))
    assert watch.at == {step: at for step, at in whole_watch.at.items() if step > 1}


# Callbacks of transformers


class Rewards:
    """A reward function that knows what the rows of evaluation are to get, a number for each evaluation."""

    __name__ = "rewards"

    def __init__(self, of_evaluations):
        self.of_evaluations = list(of_evaluations)

    def __call__(self, *completions, batch_items):
        if batch_items[0]["gold"] == "evaluation":
            return [self.of_evaluations.pop(0)] * len(batch_items)
        return word_reward(*completions)


def with_rewards_of_evaluations(*rewards: float) -> dict[str, Any]:
    one_row = Dataset.from_dict({"prompt": ["w1 w2"], "gold": ["evaluation"]})
    return {"eval_dataset": one_row, "reward_func": Rewards(rewards)}


EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "reward", "greater_is_better": True}


class WhatIsKept(TrainerCallback):
    """The checkpoints that are there after each save."""

    def __init__(self):
        self.steps: list[list[str]] = []

    def on_save(self, args, state, control, **kwargs):
        self.steps.append(sorted(path.name for path in Path(args.output_dir).glob("checkpoint-*")))


@pytest.mark.parametrize(
    ("kind", "lora"),
    [("MAGRPO", False), ("MAGRPO", True), ("MAAC", False), ("IAC separate", True), ("IAC shared", False)],
)
@pytest.mark.parametrize("start", [None, 2])
def test_at_the_end_every_entity_is_that_of_the_best_checkpoint(kind, lora, start, tmp_path):
    """B42: the evaluations give 3.6, 3.8 and 3.3, also where the run is resumed after the second."""
    options = {**EVERY_STEP, "max_steps": 3, "load_best_model_at_end": True, "save_total_limit": 1}

    def make(*rewards):
        kept = WhatIsKept()
        kwargs = {**with_rewards_of_evaluations(*rewards), "callbacks": [kept]}
        return *build(kind, tmp_path, lora, kwargs, **options), kept

    trainer, watch, kept = make(3.6, 3.8, 3.3)
    best = watch.at
    if start is not None:
        trainer.add_callback(StopAt(start))
    trainer.train()
    if start is not None:
        trainer, watch, kept = make(3.3)
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.best_model_checkpoint == checkpoint(
        tmp_path, 2
    ) and trainer.state.best_metric == pytest.approx(3.8)
    end = what_it_is(trainer)
    assert end["weights"] == best[2]["weights"] != watch.at[3]["weights"]
    assert end["moments of heads"] == best[2]["moments of heads"]
    both = ["checkpoint-2", "checkpoint-3"]
    assert kept.steps == ([["checkpoint-1"], ["checkpoint-2"], both] if start is None else [both])
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_the_best_checkpoint_is_found_where_it_was_moved(tmp_path):
    options = {**EVERY_STEP, "load_best_model_at_end": True}
    first, watch = build(
        "MAGRPO", tmp_path / "old", kwargs=with_rewards_of_evaluations(1, 5, 2), max_steps=3, **options
    )
    first.train()
    (tmp_path / "old").rename(tmp_path / "new")
    second, _ = build("MAGRPO", tmp_path / "new", kwargs=with_rewards_of_evaluations(3), max_steps=4, **options)
    second.train(resume_from_checkpoint=True)
    assert second.state.best_model_checkpoint == checkpoint(tmp_path / "new", 2)
    assert what_it_is(second)["weights"] == watch.at[2]["weights"]


@pytest.mark.parametrize("start", [1, 2, 3, 4])
def test_early_stopping_counts_on(start, tmp_path):
    """The second evaluation is the best: with a patience of 2 the run ends after the fourth, and stays ended."""
    rewards = [1.0, 5.0, 4.0, 3.0, 2.0, 1.0]

    def make(directory, later):
        kwargs = {**with_rewards_of_evaluations(*later), "callbacks": [EarlyStoppingCallback(2)]}
        trainer, _ = build("MAGRPO", tmp_path / directory, kwargs=kwargs, max_steps=6, **EVERY_STEP)
        assert not trainer.args.restore_callback_states_from_checkpoint
        return trainer

    whole = make("whole", rewards)
    whole.train()
    resumed = make("resumed", rewards[start:])
    resumed.train(resume_from_checkpoint=checkpoint(tmp_path / "whole", start))
    assert resumed.state.global_step == whole.state.global_step == 4
    assert rows(resumed) == rows(whole)


def test_an_evaluation_is_not_repeated(tmp_path):
    """Neither the one of the checkpoint's step nor the one on start; the last step has one in any case."""
    case = CASES["MAAC q"]
    whole, _ = case.build(tmp_path / "whole")
    whole.train()
    resumed, _ = case.build(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=checkpoint(tmp_path / "whole", 4))
    for trainer in (whole, resumed):
        assert [row["step"] for row in trainer.state.log_history if "eval_reward" in row] == [0, 2, 4, 5]
        assert trainer.args.eval_on_start


# Data


class Seen:
    """A reward function that keeps the rows that it was called with."""

    __name__ = "seen"

    def __init__(self):
        self.rows: list[dict[str, Any]] = []

    def __call__(self, *completions, batch_items):
        self.rows += batch_items
        return word_reward(*completions)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_resumed_run_sees_the_rows_of_a_stream_that_were_to_come(shuffle, tmp_path):
    """B35: a pass through six rows has three steps; each row is seen once in it, with both samples."""

    def make(directory):
        seen = Seen()
        kwargs = {"train_dataset": stream().map(with_a_random_word), "reward_func": seen, "formatters": None}
        options = {"max_steps": 9, "shuffle_dataset": shuffle, "influence_steps": 0}
        return build("MAGRPO", tmp_path / directory, kwargs=kwargs, **options)[0], seen.rows

    whole, all_rows = make("whole")
    whole.train()
    assert len(all_rows) == 36
    golds = [row["gold"] for row in all_rows]
    for number in range(3):
        of_pass = golds[12 * number : 12 * (number + 1)]
        assert sorted(of_pass) == sorted([f"w{row}" for row in range(6)] * 2)
        assert of_pass[::2] == of_pass[1::2]
    assert (golds[:12] != golds[12:24]) == shuffle
    prompts = [row["prompt"] for row in all_rows]
    assert prompts[::2] == prompts[1::2] and len(set(prompts)) > 12  # a row has another random word in each pass
    for start in (2, 3, 4, 7):
        resumed, later_rows = make("resumed")
        resumed.train(resume_from_checkpoint=checkpoint(tmp_path / "whole", start))
        assert later_rows == all_rows[4 * start :], start


def test_a_transform_gives_all_samples_of_a_group_one_prompt(tmp_path):
    """Another one in each epoch; a resumed run gets those that were to come."""

    def make(directory):
        seen = Seen()
        kwargs = {"train_dataset": transformed(), "reward_func": seen, "formatters": None}
        options = {"max_steps": -1, "num_train_epochs": 2, "influence_steps": 0}
        return build("MAGRPO", tmp_path / directory, kwargs=kwargs, **options)[0], seen.rows

    whole, all_rows = make("whole")
    whole.train()
    prompts = [row["prompt"] for row in all_rows]
    assert prompts[::2] == prompts[1::2] and len(set(prompts)) > 6  # a row has others in the second epoch
    for start in range(1, 6):
        resumed, later_rows = make("resumed")
        resumed.train(resume_from_checkpoint=checkpoint(tmp_path / "whole", start))
        assert later_rows == all_rows[4 * start :], start


# The user's objects that have a state


class Counts:
    """What has a state: a number, a list and a tensor."""

    def __init__(self, by: int = 1):
        self.by, self.number, self.numbers, self.sum = by, 0, [], torch.zeros(1)

    def count(self) -> int:
        self.number += self.by
        self.numbers.append(self.number)
        self.sum += self.number
        return self.number

    def state_dict(self):
        return {"number": self.number, "numbers": self.numbers, "nested": {"sum": (self.sum, None)}}

    def load_state_dict(self, state):
        self.number, self.numbers, self.sum = state["number"], state["numbers"], state["nested"]["sum"][0]

    def all(self):
        return self.number, self.numbers, self.sum


class CountingCallback(Counts, TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        self.count()


class CountingReward(Counts):
    """Gives later samples more, the more often it was called."""

    __name__ = "counting"

    def __init__(self):
        super().__init__()
        self.seen: list[int] = []  # numbers of the rows' fetches

    def __call__(self, *completions, batch_items):
        number = self.count()
        self.seen += [int(row["gold"]) for row in batch_items]
        return [
            reward + number * index + 0.1 * int(row["gold"])
            for index, (reward, row) in enumerate(zip(word_reward(*completions), batch_items, strict=True))
        ]


class CountingRows:
    """Counts its fetches, and says the number in each row."""

    fetches = 0

    def __getitem__(self, key):
        self.fetches += 1
        return {**super().__getitem__(key), "gold": str(self.fetches)}

    def __getitems__(self, keys):
        return [self[key] for key in keys]

    def state_dict(self):
        return {"fetches": self.fetches}

    def load_state_dict(self, state):
        self.fetches = state["fetches"]


class CountingDataset(CountingRows, Dataset):
    """A class of the library `datasets`."""


class ListedRows(torch.utils.data.Dataset):
    def __init__(self, listed):
        self.listed = listed

    def __len__(self):
        return len(self.listed)

    def __getitem__(self, index):
        return self.listed[index]


class CountingList(CountingRows, ListedRows):
    """A class of torch."""


@pytest.mark.parametrize("kind_of_dataset", ["datasets", "torch"])
@pytest.mark.parametrize("options", [{}, BUFFERED, {"gradient_accumulation_steps": 3}], ids=str)
def test_objects_with_a_state_go_on(options, kind_of_dataset, tmp_path):
    """T5: in spite of the data loader, which fetches ahead."""

    def make(directory):
        plain = dataset(6)
        data = CountingDataset(plain.data) if kind_of_dataset == "datasets" else CountingList(list(plain))
        counts = [CountingCallback(1), CountingCallback(10), CountingReward()]
        kwargs = {"train_dataset": data, "reward_func": counts[2], "callbacks": counts[:2]}
        options_of_run = {"max_steps": 5, "scale_rewards": "none", "influence_steps": 0, **options}
        trainer, watch = build("MAGRPO", tmp_path / directory, kwargs=kwargs, **options_of_run)
        return trainer, watch, data, counts

    whole, whole_watch, whole_data, whole_counts = make("whole")
    whole.train()
    calls = len(whole_counts[2].seen) // 2  # one for each prompt with its two samples
    assert [counts.number for counts in whole_counts] == [5, 50, calls]
    if not options:  # the trainer looked at a row first; then two for each prompt, of which the first is shown
        assert whole_counts[2].seen == [number for number in range(2, 22, 2) for _ in range(2)]
    for start in range(1, 5):
        resumed, watch, data, counts = make("resumed")
        resumed.train(resume_from_checkpoint=checkpoint(tmp_path / "whole", start))
        assert [own.all() for own in counts] == [own.all() for own in whole_counts]
        later = counts[2].seen
        assert later == whole_counts[2].seen[len(whole_counts[2].seen) - len(later) :]
        assert data.fetches == whole_data.fetches
        assert watch.at == {step: at for step, at in whole_watch.at.items() if step > start}


class OddState(CountingCallback):
    def state_dict(self):
        return {"numbers": [1, {"when": np.zeros(2)}]}


class OddReward(CountingReward):
    state_dict = OddState.state_dict


class OddRows(CountingList):
    state_dict = OddState.state_dict


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("callback OddState", lambda: {"callbacks": [CountingCallback(), OddState()]}),
        ("callback OddState #2", lambda: {"callbacks": [type("OddState", (CountingCallback,), {})(), OddState()]}),
        ("reward function counting", lambda: {"reward_func": OddReward()}),
        ("train_dataset", lambda: {"train_dataset": OddRows(list(dataset(6)))}),
    ],
)
def test_a_state_that_is_no_plain_data_is_an_error_before_the_first_step(name, kwargs, tmp_path):
    """T5"""
    trainer, watch = build("MAGRPO", tmp_path, kwargs=kwargs())
    message = rf"The state of {name} cannot be saved: state_dict\(\)\['numbers'\]\[1\]\['when'\] is a numpy.ndarray"
    with pytest.raises(TypeError, match=message):
        trainer.train()
    assert watch.at == {} and trainer.env_step == 0


def test_a_state_that_is_not_saved_may_be_anything(tmp_path):
    trainer, watch = build("MAGRPO", tmp_path, kwargs={"callbacks": [OddState()]}, save_strategy="no")
    trainer.train()
    assert list(watch.at) == [1]
